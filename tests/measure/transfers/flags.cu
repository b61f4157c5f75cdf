// See flags.h. A block on the receiving GPU watches 128 words spread over the piece and the flag. Latency is
// from the clock at which the last of these words was there to the clock at which the flag was, on one
// multiprocessor. When the flag is there, the block reads the whole piece: a word that is not there yet would
// show that the flag does not stand for the copy. Polls end after a limit of cycles.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <thread>

#include "kernels/error.h"
#include "kernels/runtime/cuda/check.h"
#include "tests/measure/transfers/flags.h"

namespace cppool::measure {
namespace {

using kernels::RuntimeError;
using kernels::cuda::CheckCuda;

constexpr std::size_t kPiece = 8 * kMiB;
constexpr int kPieces = 32;     // of a turn when the flags' cost is measured
constexpr int kSightings = 25;  // of each way to write a flag
constexpr int kThreads = 1024, kWatchers = 128, kWarp = 32;
constexpr long long kLimitCycles = 1'000'000'000;  // about half a second

// In host memory that the GPU writes.
struct Sighting {
  unsigned started = 0;  // the epoch, when the block polls
  unsigned late = 0;     // the flag did not come within the limit
  unsigned stale = 0;    // words that were not there when the flag was
  long long cycles = 0;  // from the last watched word to the flag
  double cycles_per_us = 0;
};

__device__ std::uint32_t LoadAcquire(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ std::uint32_t LoadRelaxed(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ unsigned long long NowNs() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void __launch_bounds__(kThreads)
    Watch(const std::uint32_t* data, std::size_t words, const std::uint32_t* flag, std::uint32_t epoch,
          long long limit, volatile Sighting* sighting) {
  __shared__ volatile unsigned flagged;
  __shared__ unsigned late, stale;
  __shared__ long long last_word, flag_at;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    flagged = late = stale = 0;
    last_word = 0;
    sighting->started = epoch;
    __threadfence_system();
  }
  __syncthreads();
  const unsigned long long begin_ns = NowNs();
  const long long begin = clock64();
  if (thread == 0) {
    bool there = false;
    while (!there && clock64() - begin < limit) there = LoadAcquire(flag) == epoch;
    flag_at = clock64();
    late = !there;
    flagged = 1;
  } else if (thread >= kWarp && thread < kWarp + kWatchers) {
    const std::size_t index = words * static_cast<std::size_t>(thread - kWarp + 1) / kWatchers - 1;
    const std::uint32_t want = PatternWord(index, epoch);
    bool there = false;
    while (!there && !flagged) {
      there = LoadRelaxed(data + index) == want;
      if (there) atomicMax(&last_word, clock64());
    }
  }
  __syncthreads();  // what thread 0 has acquired is there for the others
  unsigned own = 0;
  for (std::size_t i = threadIdx.x; i < words; i += kThreads) own += data[i] != PatternWord(i, epoch);
  if (own) atomicAdd(&stale, own);
  __syncthreads();
  if (thread == 0) {
    sighting->late = late;
    sighting->stale = stale;
    sighting->cycles = last_word ? flag_at - last_word : 0;
    sighting->cycles_per_us =
        1e3 * static_cast<double>(clock64() - begin) / static_cast<double>(NowNs() - begin_ns);
    __threadfence_system();
  }
}

// A function of the driver, which is reached through the runtime: libcuda is not linked.
template <typename Function>
Function DriverFunction(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CheckCuda(cudaGetDriverEntryPointByVersion(name, &entry, 11070, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess || !entry)
    throw RuntimeError(CPPOOL_CUDA, std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(entry);
}

void CheckDriver(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS)
    throw RuntimeError(CPPOOL_CUDA,
                       std::string(what) + ": error " + std::to_string(result) + " of the driver");
}

enum class Way { kWriteValue, kMemOp, kCopy };
constexpr std::array<std::pair<Way, const char*>, 3> kWays = {
    {{Way::kWriteValue, "cuStreamWriteValue32"},
     {Way::kMemOp, "cuStreamBatchMemOp of one write"},
     {Way::kCopy, "peer copy of 4 bytes"}}};

// Pieces go from GPU 0 to GPU 1. Epochs grow and nothing is reset.
class Flags {
 public:
  Flags()
      : source_(Allocate(0, kPiece)),
        epoch_source_(Allocate(0, sizeof(std::uint32_t))),
        target_(Allocate(1, kPiece)),
        flag_(Allocate(1, sizeof(std::uint32_t))),
        watching_(CreateStream(1)),
        streams_{CreateStream(0), CreateStream(1)} {
    CheckCuda(cudaHostAlloc(&sighting_, sizeof(Sighting), cudaHostAllocPortable | cudaHostAllocMapped),
              "allocating host memory");
    UseGpu(1);
    CheckCuda(cudaMemset(flag_.get(), 0, sizeof(std::uint32_t)), "clearing the flag");
    Synchronize(1);
  }
  ~Flags() { cudaFreeHost(sighting_); }
  Flags(const Flags&) = delete;
  Flags& operator=(const Flags&) = delete;

  // Loads what a copy and a flag need: that may wait for the device, where a block would poll.
  void Load(Way way, bool pull) {
    NextEpoch();
    UseGpu(pull);
    Copy(pull);
    Raise(way, pull);
    for (int gpu = 0; gpu < kGpus; ++gpu) Synchronize(gpu);
  }

  // Copies a piece and raises its flag, or with `early` does so the other way round, and returns what the
  // polling block saw.
  Sighting Sight(Way way, bool pull, bool early = false) {
    NextEpoch();
    *sighting_ = Sighting{};
    UseGpu(1);
    Watch<<<1, kThreads, 0, watching_.get()>>>(static_cast<const std::uint32_t*>(target_.get()), kPiece / 4,
                                               static_cast<const std::uint32_t*>(flag_.get()), epoch_,
                                               kLimitCycles, sighting_);
    CheckCuda(cudaGetLastError(), "starting the block that polls");
    const auto begin = std::chrono::steady_clock::now();
    while (const_cast<volatile unsigned&>(sighting_->started) != epoch_) {
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(2))
        throw RuntimeError(CPPOOL_CUDA, "the block that polls did not start");
      std::this_thread::yield();
    }
    UseGpu(pull);
    if (early) Raise(way, pull);
    Copy(pull);
    if (!early) Raise(way, pull);
    for (int gpu = 0; gpu < kGpus; ++gpu) Synchronize(gpu);
    if (sighting_->late) throw RuntimeError(CPPOOL_CUDA, "a flag was not seen within half a second");
    return *sighting_;
  }

  // Microseconds from the last watched word to the flag.
  double Latency(Way way, bool pull) {
    const Sighting seen = Sight(way, pull);
    if (seen.stale) {
      throw RuntimeError(CPPOOL_CUDA,
                         "the flag was seen before " + std::to_string(seen.stale) + " words of its piece");
    }
    return static_cast<double>(seen.cycles) / seen.cycles_per_us;
  }

  // Microseconds that a flag after each piece adds to the copying stream, with other work beside it.
  double Cost(Way way, bool pull, std::vector<Work> beside) {
    double ms[2];
    for (const bool flags : {false, true}) {
      NextEpoch();
      std::vector<Work> works = beside;
      works.push_back({pull ? 1 : 0, streams_[pull].get(), 1, [&] {
                         for (int piece = 0; piece < kPieces; ++piece) {
                           Copy(pull);
                           if (flags) Raise(way, pull);
                         }
                       }});
      ms[flags] = Run(works).back().back();
    }
    return 1e3 * (ms[1] - ms[0]) / kPieces;
  }

 private:
  // Other bytes to send, and another value of the flag.
  void NextEpoch() {
    ++epoch_;
    FillPattern(0, source_.get(), kPiece, epoch_);
    CheckCuda(cudaMemcpy(epoch_source_.get(), &epoch_, sizeof epoch_, cudaMemcpyHostToDevice),
              "setting the flag's source");
    Synchronize(0);
  }

  void Copy(bool pull) {
    CheckCuda(
        cudaMemcpyAsync(target_.get(), source_.get(), kPiece, cudaMemcpyDeviceToDevice, streams_[pull].get()),
        "copying a piece");
  }

  void Raise(Way way, bool pull) {
    cudaStream_t stream = streams_[pull].get();
    const auto address = reinterpret_cast<CUdeviceptr>(flag_.get());
    switch (way) {
      case Way::kWriteValue:
        return CheckDriver(write_value_(stream, address, epoch_, CU_STREAM_WRITE_VALUE_DEFAULT),
                           "cuStreamWriteValue32");
      case Way::kMemOp: {
        CUstreamBatchMemOpParams write{};
        write.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        write.writeValue.address = address;
        write.writeValue.value = epoch_;
        write.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
        return CheckDriver(mem_op_(stream, 1, &write, 0), "cuStreamBatchMemOp");
      }
      case Way::kCopy:
        return CheckCuda(cudaMemcpyAsync(flag_.get(), epoch_source_.get(), sizeof epoch_,
                                         cudaMemcpyDeviceToDevice, stream),
                         "copying a flag");
    }
  }

  const PFN_cuStreamWriteValue32_v11070 write_value_ =
      DriverFunction<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32");
  const PFN_cuStreamBatchMemOp_v11070 mem_op_ =
      DriverFunction<PFN_cuStreamBatchMemOp_v11070>("cuStreamBatchMemOp");
  Memory source_, epoch_source_, target_, flag_;
  Stream watching_;
  std::array<Stream, kGpus> streams_;  // of the GPU that copies: the source's pushes, the target's pulls
  Sighting* sighting_ = nullptr;
  std::uint32_t epoch_ = 0;
};

}  // namespace

void MeasureFlags(const Attention& attention) {
  Flags flags;
  flags.Load(Way::kWriteValue, true);
  if (!flags.Sight(Way::kWriteValue, true, true).stale)
    throw RuntimeError(CPPOOL_CUDA,
                       "a flag before its copy was not noticed: the check for missing words does not work");
  std::printf(
      "\n| flag after a piece of 8 MiB | direction | last watched word to flag, us | cost on the copying "
      "stream, us | the "
      "same beside attention, us |\n| --- | --- | --- | --- | --- |\n");
  for (const auto& [way, name] : kWays) {
    for (const bool pull : {false, true}) {
      const char* direction = pull ? "pull" : "push";
      try {
        flags.Load(way, pull);
        flags.Latency(way, pull);  // not counted
        std::vector<double> latency, alone, beside;
        for (int i = 0; i < kSightings; ++i) latency.push_back(flags.Latency(way, pull));
        for (int i = 0; i < kSamples; ++i) {
          alone.push_back(flags.Cost(way, pull, {}));
          beside.push_back(flags.Cost(way, pull, {attention.Passes(0, false), attention.Passes(1, false)}));
        }
        std::printf("| %s | %s | %s | %s | %s |\n", name, direction, ToText(SpreadOf(latency), 2).c_str(),
                    ToText(SpreadOf(alone), 2).c_str(), ToText(SpreadOf(beside), 2).c_str());
      } catch (const RuntimeError& error) {
        std::printf("| %s | %s | failed: %s | | |\n", name, direction, error.what());
        for (int gpu = 0; gpu < kGpus; ++gpu) Synchronize(gpu);  // throws where the context is lost
      }
      std::fflush(stdout);
    }
  }
}

}  // namespace cppool::measure
