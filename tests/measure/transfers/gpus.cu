// See gpus.h. Works begin at once behind a kernel that holds the streams, which ends after a limit of clock
// cycles in any case.
#include <cuda_bf16.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <thread>

#include "kernels/error.h"
#include "kernels/runtime/cuda/check.h"
#include "tests/measure/transfers/gpus.h"

namespace cppool::measure {
namespace {

using kernels::RuntimeError;
using kernels::cuda::CheckCuda;

constexpr std::uint32_t kPoison = 0xA5A5A5A5u;
constexpr long long kHoldCycles = 2'000'000'000;  // about a second
constexpr int kAhead = 40;  // turns of a GPU's last work that are enqueued before works begin

struct DestroyEvent {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;

Event CreateEvent() {
  cudaEvent_t event = nullptr;
  CheckCuda(cudaEventCreate(&event), "creating an event");
  return Event(event);
}

struct Gate {
  unsigned open = 0;  // raised by the host: the number of the run that may begin
  unsigned late = 0;  // written by the kernel when its limit passed first
};

__global__ void Hold(volatile Gate* gate, unsigned run, long long limit) {
  const long long begin = clock64();
  while (gate->open != run) {
    if (clock64() - begin > limit) {
      gate->late = run;
      return;
    }
    __nanosleep(200);
  }
}

__global__ void WritePattern(std::uint32_t* words, std::size_t count, std::uint32_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    words[i] = PatternWord(i, seed);
  }
}

__global__ void WriteNormal(__nv_bfloat16* values, std::size_t count, std::uint32_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::uint32_t word = PatternWord(i, seed);
    float sum = 0;  // of four uniform bytes: variance 4 * 256^2 / 12
    for (int byte = 0; byte < 4; ++byte) sum += static_cast<float>(word >> 8 * byte & 255) - 127.5f;
    values[i] = __float2bfloat16(sum / 147.8f);
  }
}

__global__ void CountWrong(const std::uint32_t* words, std::size_t width, std::size_t pitch, std::size_t rows,
                           std::uint32_t seed, std::size_t source, unsigned long long* wrong) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  unsigned long long own = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < pitch * rows; i += step) {
    const std::uint32_t want = i % pitch < width ? PatternWord(source + i, seed) : kPoison;
    own += words[i] != want;
  }
  if (own) atomicAdd(wrong, own);
}

}  // namespace

void UseGpu(int gpu) { CheckCuda(cudaSetDevice(gpu), "choosing a GPU"); }

void Synchronize(int gpu) {
  UseGpu(gpu);
  CheckCuda(cudaDeviceSynchronize(), "waiting for a GPU");
}

void ConnectGpus() {
  int gpus = 0;
  CheckCuda(cudaGetDeviceCount(&gpus), "counting GPUs");
  if (gpus != kGpus) {
    throw RuntimeError(CPPOOL_CUDA, "two GPUs must be visible (CUDA_VISIBLE_DEVICES=0,1), and there are " +
                                        std::to_string(gpus));
  }
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    UseGpu(gpu);
    int access = 0;
    CheckCuda(cudaDeviceCanAccessPeer(&access, gpu, 1 - gpu), "asking for peer access");
    if (!access) throw RuntimeError(CPPOOL_CUDA, "the GPUs have no access to each other's memory");
    const cudaError_t result = cudaDeviceEnablePeerAccess(1 - gpu, 0);
    if (result == cudaErrorPeerAccessAlreadyEnabled)
      cudaGetLastError();
    else
      CheckCuda(result, "enabling peer access");
  }
}

Memory Allocate(int gpu, std::size_t bytes) {
  UseGpu(gpu);
  void* memory = nullptr;
  CheckCuda(cudaMalloc(&memory, bytes), "allocating device memory");
  return Memory(memory);
}

Stream CreateStream(int gpu) {
  UseGpu(gpu);
  cudaStream_t stream = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  return Stream(stream);
}

Spread SpreadOf(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples.front(), samples.back()};
}

std::string ToText(const Spread& spread, int decimals) {
  char text[96];
  std::snprintf(text, sizeof text, "%.*f (%.*f to %.*f)", decimals, spread.median, decimals, spread.least,
                decimals, spread.most);
  return text;
}

void OnEveryGpu(const std::function<void(int)>& work) {
  std::mutex mutex;
  std::exception_ptr failure;
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    threads.emplace_back([&, gpu] {
      try {
        UseGpu(gpu);
        work(gpu);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (failure) return;
        failure = std::current_exception();
        if (abort_waits) abort_waits();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

std::vector<std::vector<double>> Run(const std::vector<Work>& works) {
  static Gate* gate = nullptr;
  static unsigned run = 0;
  static Stream holder;
  static Event opened;
  if (!gate) {
    CheckCuda(cudaHostAlloc(&gate, sizeof(Gate), cudaHostAllocPortable | cudaHostAllocMapped),
              "allocating host memory");
    *gate = Gate{};
    holder = CreateStream(0);
    opened = CreateEvent();
  }
  ++run;
  UseGpu(0);
  Hold<<<1, 1, 0, holder.get()>>>(gate, run, kHoldCycles);
  CheckCuda(cudaGetLastError(), "holding the streams");
  CheckCuda(cudaEventRecord(opened.get(), holder.get()), "recording an event");

  std::vector<std::vector<Event>> events(works.size());
  std::atomic<int> ready{0};
  OnEveryGpu([&](int gpu) {
    std::vector<std::size_t> own;
    for (std::size_t w = 0; w < works.size(); ++w)
      if (works[w].gpu == gpu) own.push_back(w);
    const auto let_begin = [&] {
      if (++ready == kGpus) *const_cast<volatile unsigned*>(&gate->open) = run;
    };
    bool waiting = true;
    for (const std::size_t w : own) {
      const Work& work = works[w];
      for (int turn = 0; turn <= work.turns; ++turn) events[w].push_back(CreateEvent());
      CheckCuda(cudaStreamWaitEvent(work.stream, opened.get(), 0), "waiting for an event");
      CheckCuda(cudaEventRecord(events[w][0].get(), work.stream), "recording an event");
      for (int turn = 1; turn <= work.turns; ++turn) {
        work.turn();
        CheckCuda(cudaEventRecord(events[w][static_cast<std::size_t>(turn)].get(), work.stream),
                  "recording an event");
        if (w == own.back() && turn == kAhead) waiting = false, let_begin();
      }
    }
    if (waiting) let_begin();
  });
  for (int gpu = 0; gpu < kGpus; ++gpu) Synchronize(gpu);
  if (gate->late == run)
    throw RuntimeError(CPPOOL_CUDA, "the works of a run were not enqueued within a second");

  std::vector<std::vector<double>> ends(works.size());
  for (std::size_t w = 0; w < works.size(); ++w) {
    for (std::size_t turn = 1; turn < events[w].size(); ++turn) {
      float ms = 0;
      CheckCuda(cudaEventElapsedTime(&ms, events[w][0].get(), events[w][turn].get()), "reading an event");
      ends[w].push_back(ms);
    }
  }
  return ends;
}

void FillPattern(int gpu, void* memory, std::size_t bytes, std::uint32_t seed) {
  UseGpu(gpu);
  WritePattern<<<1024, 256>>>(static_cast<std::uint32_t*>(memory), bytes / 4, seed);
  CheckCuda(cudaGetLastError(), "filling memory");
  Synchronize(gpu);
}

void FillNormal(int gpu, void* memory, std::size_t count, std::uint32_t seed) {
  UseGpu(gpu);
  WriteNormal<<<1024, 256>>>(static_cast<__nv_bfloat16*>(memory), count, seed);
  CheckCuda(cudaGetLastError(), "filling memory");
  Synchronize(gpu);
}

void Poison(int gpu, void* memory, std::size_t bytes) {
  UseGpu(gpu);
  CheckCuda(cudaMemset(memory, static_cast<int>(kPoison & 255), bytes), "poisoning memory");
  Synchronize(gpu);
}

void ExpectPattern(int gpu, const void* memory, const Rows& rows, std::uint32_t seed,
                   std::size_t source_offset, const std::string& what) {
  const Memory count = Allocate(gpu, sizeof(unsigned long long));
  auto* const wrong = static_cast<unsigned long long*>(count.get());
  CheckCuda(cudaMemset(wrong, 0, sizeof *wrong), "clearing memory");
  CountWrong<<<1024, 256>>>(static_cast<const std::uint32_t*>(memory), rows.width / 4, rows.pitch / 4,
                            rows.rows, seed, source_offset / 4, wrong);
  CheckCuda(cudaGetLastError(), "checking memory");
  unsigned long long words = 0;
  CheckCuda(cudaMemcpy(&words, wrong, sizeof words, cudaMemcpyDeviceToHost), "checking memory");
  if (words == 0) return;
  throw RuntimeError(CPPOOL_CUDA, what + ": " + std::to_string(words) + " words at GPU " +
                                      std::to_string(gpu) + " are not what was sent");
}

}  // namespace cppool::measure
