// What context parallelism can expect of transfers between two GPUs with access to each other's memory, as
// Markdown tables:
// 1. copies by width of their rows, pushed from the source's stream or pulled from the target's, one way and
//    both ways at once;
// 2. how long after a copy a flag behind it is seen by a kernel that polls it, and what a flag costs;
// 3. copies beside attention: what each costs the other;
// 4. the same of NCCL's all-gather and all-to-all (nccl.h in this folder says what must not happen there).
//
//     CUDA_VISIBLE_DEVICES=0,1 NCCL_NVLS_ENABLE=0 transfers
//
// The bytes that arrive are checked. Figures are medians, with the least and the most. Every kernel that
// waits has a limit of clock cycles, and the program ends after kLimit in any case.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "kernels/runtime/cuda/check.h"
#include "tests/measure/transfers/flags.h"
#include "tests/measure/transfers/nccl.h"

namespace {

using namespace cppool::measure;
using cppool::kernels::cuda::CheckCuda;

constexpr std::chrono::seconds kLimit(150);
constexpr std::size_t kTurn = 64 * kMiB;  // K and V of 8K tokens with 16 heads with head dim 128 in bf16
constexpr std::size_t kPitchOfWidth = 4;  // as one of four groups of heads lies in its rows
constexpr int kTurnsTogether = 10;        // in a figure of the first table, fewer of slow ones
constexpr double kLongMs = 20;

std::atomic<const char*> stage{"the start"};

// Ends the program when the limit has passed, whatever waits: a host thread in NCCL, a stream in the driver.
void EndInTime() {
  std::thread([] {
    std::this_thread::sleep_for(kLimit);
    std::fprintf(stderr, "transfers: not done after %lld s, in %s\n", static_cast<long long>(kLimit.count()),
                 stage.load());
    std::fflush(stdout);
    std::_Exit(3);
  }).detach();
}

// How kTurn bytes are copied.
struct Shape {
  std::string name;
  std::size_t piece = kTurn;  // of contiguous bytes
  std::size_t width = 0;      // of rows of a 2-D copy; 0: contiguous

  Rows rows() const {
    return width ? Rows{width, kPitchOfWidth * width, kTurn / width} : Rows{kTurn, kTurn, 1};
  }
};

class Copies {
 public:
  Copies() {
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      const auto at = static_cast<std::size_t>(gpu);
      sources_[at] = Allocate(gpu, kPitchOfWidth * kTurn);
      targets_[at] = Allocate(gpu, kPitchOfWidth * kTurn);
      streams_[at] = CreateStream(gpu);
      FillPattern(gpu, sources_[at].get(), kPitchOfWidth * kTurn, Seed(gpu));
    }
  }

  // From GPU 0 to GPU 1, with `both` also back. What had arrived before is poisoned, and a turn has run.
  Transfer Make(const Shape& shape, bool pull, bool both) {
    Transfer transfer;
    transfer.bytes = static_cast<double>(kTurn);
    for (int from = 0; from < (both ? 2 : 1); ++from) {
      const auto by = static_cast<std::size_t>(pull ? 1 - from : from);
      Poison(1 - from, targets_[static_cast<std::size_t>(1 - from)].get(), kPitchOfWidth * kTurn);
      transfer.streams[by] = streams_[by].get();
      transfer.turn[by] = [this, shape, from, by] { Copy(shape, from, streams_[by].get()); };
    }
    RunOnce(transfer);
    return transfer;
  }

  void Check(const Shape& shape, bool both) const {
    for (int from = 0; from < (both ? 2 : 1); ++from)
      ExpectPattern(1 - from, targets_[static_cast<std::size_t>(1 - from)].get(), shape.rows(), Seed(from), 0,
                    "copies, " + shape.name);
  }

 private:
  static std::uint32_t Seed(int gpu) { return 1u + static_cast<std::uint32_t>(gpu); }

  void Copy(const Shape& shape, int from, cudaStream_t stream) const {
    const char* const source = static_cast<const char*>(sources_[static_cast<std::size_t>(from)].get());
    char* const target = static_cast<char*>(targets_[static_cast<std::size_t>(1 - from)].get());
    if (shape.width) {
      const Rows rows = shape.rows();
      return CheckCuda(cudaMemcpy2DAsync(target, rows.pitch, source, rows.pitch, rows.width, rows.rows,
                                         cudaMemcpyDeviceToDevice, stream),
                       "a 2-D copy");
    }
    for (std::size_t at = 0; at < kTurn; at += shape.piece)
      CheckCuda(cudaMemcpyAsync(target + at, source + at, shape.piece, cudaMemcpyDeviceToDevice, stream),
                "a copy");
  }

  std::array<Memory, kGpus> sources_, targets_;
  std::array<Stream, kGpus> streams_;
};

Shape Contiguous(std::size_t piece) {
  return {piece == kTurn ? "contiguous" : "pieces of " + std::to_string(piece / kMiB) + " MiB", piece, 0};
}
Shape Strided(std::size_t width) {
  return {"rows of " + (width < 1024 ? std::to_string(width) + " B" : std::to_string(width / 1024) + " KiB"),
          kTurn, width};
}

// GB/s of the slower direction.
Spread RateOf(const Transfer& transfer) {
  int together = 1;
  std::vector<Work> works;
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    const auto at = static_cast<std::size_t>(gpu);
    if (!transfer.turn[at]) continue;
    works.push_back({gpu, transfer.streams[at], 1, [&together, &turn = transfer.turn[at]] {
                       for (int i = 0; i < together; ++i) turn();
                     }});
  }
  const auto milliseconds = [&] {
    double ms = 0;
    for (const auto& ends : Run(works)) ms = std::max(ms, ends.back());
    return ms;
  };
  together = std::clamp(static_cast<int>(kLongMs / milliseconds()), 1, kTurnsTogether);
  std::vector<double> rates;
  for (int sample = 0; sample < kSamples; ++sample)
    rates.push_back(transfer.bytes * together / milliseconds() * 1e-6);
  return SpreadOf(rates);
}

void MeasureCopies(Copies& copies) {
  std::printf(
      "\nCopies of 64 MiB, GB/s in each direction; rows of a 2-D copy lie four widths apart on both GPUs.\n\n"
      "| copy | one way, push | one way, pull | both ways, push | both ways, pull |\n"
      "| --- | --- | --- | --- | --- |\n");
  std::vector<Shape> shapes;
  for (const std::size_t mib : {64, 32, 16, 8, 4, 2}) shapes.push_back(Contiguous(mib * kMiB));
  for (std::size_t width = 64 * 1024; width >= 256; width /= 2) shapes.push_back(Strided(width));
  for (const Shape& shape : shapes) {
    std::printf("| %s |", shape.name.c_str());
    for (const bool both : {false, true}) {
      for (const bool pull : {false, true}) {
        std::printf(" %s |", ToText(RateOf(copies.Make(shape, pull, both)), 0).c_str());
        copies.Check(shape, both);
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

void MeasureCopiesBesideAttention(Copies& copies, const Attention& attention) {
  std::printf(
      "\nCopies of 64 MiB from GPU 0 to GPU 1 (both ways: also back) beside attention of 16384 tokens, 16 "
      "heads with "
      "head dim 128, bf16, "
      "causal.\n\n");
  PrintSideBySideHeader("copy | direction | ways", 3);
  for (const Shape& shape : {Contiguous(kTurn), Contiguous(8 * kMiB), Strided(4096), Strided(1024)}) {
    for (const bool pull : {false, true}) {
      for (const bool both : {false, true}) {
        const Transfer transfer = copies.Make(shape, pull, both);
        for (const bool backward : {false, true}) {
          const SideBySide figures = MeasureSideBySide(attention, backward, transfer);
          copies.Check(shape, both);
          PrintSideBySide(shape.name + (pull ? " | pull" : " | push") + (both ? " | both |" : " | one |"),
                          backward, figures);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) {
    std::fprintf(stderr, "transfers takes no arguments; CUDA_VISIBLE_DEVICES chooses the two GPUs\n");
    return 2;
  }
  try {
    PrepareNccl();
    // Streams that shared a hardware queue would wait for each other.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    EndInTime();
    ConnectGpus();
    const Attention attention;
    Copies copies;
    // The others are worth having where one fails.
    bool good = true;
    const auto measure = [&](const char* name, const auto& work) {
      stage = name;
      try {
        work();
      } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "transfers: %s: %s\n", name, error.what());
        good = false;
      }
    };
    measure("copies", [&] { MeasureCopies(copies); });
    measure("flags", [&] { MeasureFlags(attention); });
    measure("copies beside attention", [&] { MeasureCopiesBesideAttention(copies, attention); });
    measure("NCCL", [&] { MeasureNccl(attention); });
    stage = "the end";
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "transfers: %s\n", error.what());
    return 1;
  }
}
