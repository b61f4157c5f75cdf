// Two GPUs with access to each other's memory, for programs that measure what moves between them: memory,
// streams, work that begins on both at once, and patterns that show which bytes arrived. Errors throw
// kernels::RuntimeError.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace cppool::measure {

inline constexpr int kGpus = 2;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr int kSamples = 7;  // for each figure

struct FreeMemory {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
using Memory = std::unique_ptr<void, FreeMemory>;  // by cudaMalloc: no other kind is used
using Stream = std::unique_ptr<CUstream_st, DestroyStream>;

// Lets both GPUs read and write each other's memory. Throws where they cannot, or where other than two are
// visible: the runtime spreads ranks over all of them.
void ConnectGpus();
void UseGpu(int gpu);
void Synchronize(int gpu);  // waits for all work of the GPU; the program's time limit ends a wait that lasts
Memory Allocate(int gpu, std::size_t bytes);
Stream CreateStream(int gpu);

struct Spread {
  double median = 0, least = 0, most = 0;
};
Spread SpreadOf(std::vector<double> samples);
std::string ToText(const Spread& spread, int decimals);  // "372 (368 to 375)"

// What OnEveryGpu calls when a thread fails, so that the other does not wait for it: aborts communicators.
inline std::function<void()> abort_waits;

// Runs `work(gpu)` on a thread for each GPU and throws what the first one that failed has thrown.
void OnEveryGpu(const std::function<void(int)>& work);

struct Work {
  int gpu = 0;
  cudaStream_t stream = nullptr;
  int turns = 1;
  std::function<void()> turn;  // enqueues one turn on the stream
};

// Enqueues the works, those of a GPU in their order on a thread of its own, lets them begin at once and waits
// for them. Returns for each work when its turns ended, in ms after it began. They begin when everything is
// enqueued, or all but the later turns of each GPU's last work: a stream takes about a thousand operations
// while it is held. Every turn must have run before, because what is loaded on first use may wait for the
// device.
std::vector<std::vector<double>> Run(const std::vector<Work>& works);

// The word at an index of the pattern with a seed.
__host__ __device__ inline std::uint32_t PatternWord(std::uint64_t index, std::uint32_t seed) {
  std::uint32_t x = static_cast<std::uint32_t>(index) * 2654435761u ^ seed * 2246822519u;
  x ^= x >> 15;
  x *= 2246822519u;
  return x ^ x >> 13;
}

// All of these wait until the work is done.
void FillPattern(int gpu, void* memory, std::size_t bytes, std::uint32_t seed);
void FillNormal(int gpu, void* memory, std::size_t count, std::uint32_t seed);  // bf16, roughly normal
void Poison(int gpu, void* memory, std::size_t bytes);
// Throws unless each of `rows` rows of `pitch` bytes holds the pattern's words from `source_offset` bytes on
// in its first `width` bytes and poison in the others. Sizes are multiples of 4.
struct Rows {
  std::size_t width = 0, pitch = 0, rows = 1;
};
void ExpectPattern(int gpu, const void* memory, const Rows& rows, std::uint32_t seed,
                   std::size_t source_offset, const std::string& what);

}  // namespace cppool::measure
