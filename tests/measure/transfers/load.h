// cppool's own attention on both GPUs as the load beside transfers, and what each costs the other.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <functional>
#include <memory>

#include "tests/measure/transfers/gpus.h"

namespace cppool::measure {

// Forward or backward passes of 16384 tokens, 16 heads with head dim 128, bf16, causal: a persistent kernel
// on every multiprocessor.
class Attention {
 public:
  Attention();
  ~Attention();
  // A few ms of passes, on a stream of the GPU's.
  Work Passes(int gpu, bool backward) const;
  double operations(bool backward) const;  // for one pass

 private:
  struct Rank;
  std::array<std::unique_ptr<Rank>, kGpus> ranks_;
};

// A transfer that is repeated: `turn` of each GPU whose stream has a part in it; NULL: the other GPU's stream
// does all.
struct Transfer {
  double bytes = 0;  // that arrive at a GPU in a turn
  std::array<cudaStream_t, kGpus> streams{};
  std::array<std::function<void()>, kGpus> turn;
};

// A turn, which connects and loads what it needs.
void RunOnce(const Transfer& transfer);

struct SideBySide {
  // GB/s that arrive at a GPU, of the slower one: without and with attention.
  Spread alone, beside;
  // Attention's time beside the transfer over its time alone, less 1, in percent.
  std::array<Spread, kGpus> slower;
  std::array<Spread, kGpus> attention;  // alone, TFLOP/s
};

// Runs the transfer alone, attention alone, and both, in turns. Beside attention the transfer lasts longer
// than that; its rate is of the turns that ended while both GPUs attended. The transfer has run before.
SideBySide MeasureSideBySide(const Attention& attention, bool backward, const Transfer& transfer);

// The header and a row of a table of such figures; the cells before them are the caller's, with a | after
// each.
void PrintSideBySideHeader(const char* first_columns, int count);
void PrintSideBySide(const std::string& first_cells, bool backward, const SideBySide& figures);

}  // namespace cppool::measure
