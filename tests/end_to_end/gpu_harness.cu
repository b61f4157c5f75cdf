// A harness that uses the GPUs itself, as a separate process: `cppool_gpu_harness MODE ...`. If something is
// wrong it prints it and exits with code 1, else with 0. It links CUDA's runtime, which loads the driver at
// the first CUDA call; the client library never makes one.
//
//     fork          before it uses CUDA: lists devices, runs cases, forks; the child uses CUDA and a Pool
//     context       uses its own CUDA context before, during and after the life of a daemon
//     run DEVICES WORLD_SIZE ROUNDS
//     memory        leaves too little device memory for a case, then frees what it holds
//     idle          reads the device's free memory before, during and after the life of a daemon with an
//                   idle time; no other process may allocate memory meanwhile
//     devices       prints the UUIDs that CUDA sees
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <cppool/pool.h>

namespace {

using cppool::Json;
using cppool::Pool;
using cppool::PoolOptions;
using cppool::Result;

void Expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("expected: " + what);
}

void Cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

__global__ void Square(int* values, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] = i * i;
}

// CUDA work of the harness's own, on its first device: [n] squares.
void OwnWork() {
  constexpr int kCount = 10000;
  int* device = nullptr;
  Cuda(cudaMalloc(&device, kCount * sizeof(int)));
  Square<<<(kCount + 255) / 256, 256>>>(device, kCount);
  Cuda(cudaGetLastError());
  std::vector<int> host(kCount);
  Cuda(cudaMemcpy(host.data(), device, kCount * sizeof(int), cudaMemcpyDeviceToHost));
  Cuda(cudaFree(device));
  for (int i = 0; i < kCount; ++i) Expect(host[i] == i * i, "the kernel computes squares");
}

bool HoldsCuda() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("libcuda.so") != std::string::npos || line.find("/dev/nvidia") != std::string::npos)
      return true;
  return false;
}

PoolOptions Options(int world_size) {
  PoolOptions options;
  options.daemon = CPPOOL_DAEMON;
  options.backend = "cuda";
  options.world_size = world_size;
  return options;
}

const Json kCase = {{"max_seqlen_q", 256}, {"max_seqlen_kv", 256}, {"num_heads", 4}, {"num_gqa_groups", 4}};

void RunCase(Pool& pool, const Json& params = kCase) {
  const Result result = pool.Run(params);
  Expect(result.ok(), "the case passes: " + result.error);
  Expect(result.attempts == 1, "the case needs one attempt");
}

int InChild(const std::function<void()>& work) {
  const pid_t pid = fork();
  if (pid == 0) {
    int code = 0;
    try {
      work();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
      code = 1;
    }
    _exit(code);
  }
  int status = 0;
  Expect(waitpid(pid, &status, 0) == pid, "waitpid returns the child");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

void Fork() {
  Pool pool(Options(2));
  Json hello = pool.Hello();
  Expect(hello["devices"].size() == 2, "a device for each rank");
  RunCase(pool);
  Expect(!HoldsCuda(), "the harness has not loaded CUDA after listing devices and running cases");
  const int code = InChild([&] {
    OwnWork();
    Pool own(Options(1));
    RunCase(own);
    RunCase(pool);  // in the child: with another daemon than the parent's
    Expect(pool.Hello()["pid"] != hello["pid"], "the child has a daemon of its own");
    OwnWork();
    own.Stop();
    pool.Stop();
  });
  Expect(code == 0, "the child's own CUDA and Pools work");
  RunCase(pool);
  Expect(pool.Hello()["pid"] == hello["pid"], "the parent's daemon is the same");
  Expect(!HoldsCuda(), "the parent has not loaded CUDA");
  OwnWork();
  RunCase(pool);
}

void Context() {
  OwnWork();
  int* kept = nullptr;
  Cuda(cudaMalloc(&kept, 1 << 20));
  Cuda(cudaMemset(kept, 0x5A, 1 << 20));
  for (int i = 0; i < 3; ++i) {
    Pool pool(Options(2));
    RunCase(pool);
    OwnWork();
    RunCase(pool);
    // A child of a process with a CUDA context cannot use CUDA, but it can use a Pool.
    Expect(InChild([&] {
             RunCase(pool);
             pool.Stop();
           }) == 0,
           "a forked child's Pool works beside the parent's context");
  }
  std::vector<unsigned char> bytes(1 << 20);
  Cuda(cudaMemcpy(bytes.data(), kept, bytes.size(), cudaMemcpyDeviceToHost));
  for (unsigned char byte : bytes) Expect(byte == 0x5A, "the harness's memory is unchanged");
  Cuda(cudaFree(kept));
}

void RunOn(const std::string& devices, int world_size, int rounds) {
  PoolOptions options = Options(world_size);
  options.devices = {devices};
  Pool pool(options);
  for (int i = 0; i < rounds; ++i) RunCase(pool);
  const Json hello = pool.Hello();
  for (const Json& device : hello["devices"]) std::printf("%s\n", device["uuid"].get<std::string>().c_str());
}

std::size_t FreeMemory() {
  std::size_t free = 0, total = 0;
  Cuda(cudaMemGetInfo(&free, &total));
  return free;
}

void Idle() {
  Cuda(cudaFree(nullptr));
  const std::size_t before = FreeMemory();
  PoolOptions options = Options(1);
  options.idle_exit = std::chrono::seconds(2);
  Pool pool(options);
  RunCase(pool);
  const Json first = pool.Hello()["pid"];
  const std::size_t meanwhile = FreeMemory();
  const std::size_t held = before > meanwhile ? before - meanwhile : 0;
  Expect(held > std::size_t{64} << 20, "the daemon has a context and memory on the device");
  bool back = false;
  for (int i = 0; i < 300 && !back; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    back = FreeMemory() + held / 20 > before;
  }
  Expect(back, "an idle daemon frees its memory: " + std::to_string(before) + " bytes were free, " +
                   std::to_string(meanwhile) + " while it ran, " + std::to_string(FreeMemory()) +
                   " after it");
  RunCase(pool);
  Expect(pool.Hello()["pid"] != first, "the next case runs in a new daemon");
}

void Memory() {
  Pool pool(Options(1));
  const Json hello = pool.Hello();
  const Json large = {
      {"max_seqlen_q", 16384}, {"max_seqlen_kv", 16384}, {"num_heads", 32}, {"num_gqa_groups", 32}};
  cppool::RunOptions unchecked;
  unchecked.checks = false;
  Cuda(cudaFree(nullptr));  // creates the context before memory is measured
  std::vector<void*> held;
  for (;;) {  // all but one GiB
    const std::size_t free = FreeMemory();
    if (free <= std::size_t{5} << 28) break;
    void* block = nullptr;
    Cuda(cudaMalloc(&block, std::min(free - (std::size_t{1} << 30), std::size_t{8} << 30)));
    held.push_back(block);
  }
  const Result refused = pool.Run(large, unchecked);
  Expect(!refused.ok() && refused.failure && refused.failure->kind == "out_of_memory",
         "a case that does not fit beside the harness's memory is answered out_of_memory, not: " +
             refused.error);
  Expect(!refused.fatal, "the answer is not fatal");
  RunCase(pool);
  for (void* block : held) Cuda(cudaFree(block));
  const Result runs = pool.Run(large, unchecked);
  Expect(runs.ok(), "the case runs when the memory is free: " + runs.error);
  Expect(pool.Hello()["pid"] == hello["pid"], "the daemon is the same");
}

void Devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return;  // none
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    Cuda(cudaGetDeviceProperties(&properties, i));
    std::string uuid = "GPU-";
    for (int byte = 0; byte < 16; ++byte) {
      char digits[4];
      std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(properties.uuid.bytes[byte]));
      uuid += (byte == 4 || byte == 6 || byte == 8 || byte == 10 ? "-" : "") + std::string(digits);
    }
    std::printf("%s\n", uuid.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "fork") {
      Fork();
    } else if (mode == "context") {
      Context();
    } else if (mode == "run" && argc == 5) {
      RunOn(argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
    } else if (mode == "memory") {
      Memory();
    } else if (mode == "idle") {
      Idle();
    } else if (mode == "devices") {
      Devices();
    } else {
      return 2;
    }
    return 0;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
