// See load.h.
#include "tests/measure/transfers/load.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/backend.h"
#include "kernels/error.h"

namespace cppool::measure {

namespace k = cppool::kernels;

namespace {

constexpr int kTokens = 16384, kHeads = 16, kDim = 128;
constexpr int kMostTurns = 400;
constexpr double kLonger = 1.6;  // the transfer's time over that of the attention beside it
constexpr std::size_t kElements = std::size_t{kTokens} * kHeads * kDim;

k::KernelRequest Request() {
  k::KernelRequest request;
  request.shape.heads = request.shape.kv_heads = kHeads;
  request.shape.dim_qk = request.shape.dim_v = kDim;
  request.shape.scale = 1 / std::sqrt(static_cast<float>(kDim));
  return request;
}

}  // namespace

// This world uses the daemon's own runtime, whose kernels come from its module. Members are destroyed from
// the last to the first.
struct Attention::Rank {
  explicit Rank(int gpu, const std::shared_ptr<k::Backend>& the_backend)
      : backend(the_backend), rank(backend->OpenRank(gpu)) {}

  // On the GPU's thread, when all ranks are open.
  void Prepare(int gpu) {
    const k::KernelRequest request = Request();
    const k::FamilyChoice choice = k::ChooseFamily("cuda", request);
    if (!choice.family) throw k::RuntimeError(CPPOOL_UNSUPPORTED, choice.refusal);
    kernels = std::make_unique<k::RankKernels>(rank->seam(), *choice.family);
    kernels->ops->Load();
    kernels->attention->Load(request);
    rank->BeginCase();
    const k::Layout layout = k::GlobalLayout(k::QkvFormat::kBshd, k::UniformSequences(1, kTokens));
    plan = kernels->attention->Plan(request, layout, layout, {{-k::kOpen, 0}}, rank->seam()->stream);
    pairs = static_cast<double>(plan->pairs());
    workspace = Allocate(gpu, choice.family->WorkspaceBytes(request, layout.rows, layout.rows) + 1);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors[i] = Allocate(gpu, kElements * 2);
      FillNormal(gpu, tensors[i].get(), kElements, static_cast<std::uint32_t>(i + 1));
    }
    lse = Allocate(gpu, sizeof(float) * kTokens * kHeads);
    delta = Allocate(gpu, sizeof(float) * kTokens * kHeads);
    stream = CreateStream(gpu);
    Forward();
    kernels->ops->Delta(std::int64_t{kTokens} * kHeads, kDim, Tensor(kOut), Tensor(kDout), Floats(delta),
                        seam_stream());
    Backward();
    Synchronize(gpu);
  }

  void Forward() const {
    k::ForwardArgs args;
    args.plan = plan.get();
    args.workspace = workspace.get();
    args.q = Tensor(kQ), args.k = Tensor(kK), args.v = Tensor(kV), args.out = Tensor(kOut);
    args.lse = Floats(lse);
    kernels->attention->Forward(Request().shape, args, seam_stream());
  }

  void Backward() const {
    k::BackwardArgs args;
    args.plan = plan.get();
    args.workspace = workspace.get();
    args.q = Tensor(kQ), args.k = Tensor(kK), args.v = Tensor(kV);
    args.dout = Tensor(kDout), args.out = Tensor(kOut);
    args.lse = Floats(lse), args.delta = Floats(delta);
    args.dq = Tensor(kDq), args.dk = Tensor(kDk), args.dv = Tensor(kDv);
    kernels->attention->Backward(Request().shape, args, seam_stream());
  }

  enum Name { kQ, kK, kV, kOut, kDout, kDq, kDk, kDv, kNames };
  k::TensorOut Tensor(Name name) const { return {tensors[name].get(), k::Dtype::kBf16}; }
  static float* Floats(const Memory& memory) { return static_cast<float*>(memory.get()); }
  cppool_stream seam_stream() const { return reinterpret_cast<cppool_stream>(stream.get()); }

  std::shared_ptr<k::Backend> backend;
  std::unique_ptr<k::RankRuntime> rank;
  std::unique_ptr<k::RankKernels> kernels;
  std::unique_ptr<k::BlockPlan> plan;
  std::array<Memory, kNames> tensors;
  Memory workspace, lse, delta;
  Stream stream;
  double pairs = 0;
};

Attention::Attention() {
  const std::shared_ptr<k::Backend> backend = k::CreateCudaBackend(kGpus, k::Transport::kPeer);
  OnEveryGpu([&](int gpu) { ranks_[static_cast<std::size_t>(gpu)] = std::make_unique<Rank>(gpu, backend); });
  OnEveryGpu([&](int gpu) { ranks_[static_cast<std::size_t>(gpu)]->Prepare(gpu); });
}

Attention::~Attention() {
  try {
    OnEveryGpu([&](int gpu) { ranks_[static_cast<std::size_t>(gpu)].reset(); });
  } catch (const k::RuntimeError& error) {  // a context that is lost, which has been reported
    std::fprintf(stderr, "transfers: at the end of attention: %s\n", error.what());
  }
}

Work Attention::Passes(int gpu, bool backward) const {
  const Rank& rank = *ranks_[static_cast<std::size_t>(gpu)];
  return {gpu, rank.stream.get(), backward ? 2 : 5,
          [&rank, backward] { backward ? rank.Backward() : rank.Forward(); }};
}

double Attention::operations(bool backward) const {
  return (backward ? 10.0 : 4.0) * ranks_[0]->pairs * kHeads * kDim;
}

namespace {

// Turns that have ended at a time, with the part of the one under way.
double TurnsUntil(double ms, const std::vector<double>& ends) {
  double turns = 0, last = 0;
  for (const double end : ends) {
    if (end > ms) return turns + (ms - last) / (end - last);
    ++turns;
    last = end;
  }
  return turns;
}

}  // namespace

void RunOnce(const Transfer& transfer) {
  OnEveryGpu([&](int gpu) {
    const auto& turn = transfer.turn[static_cast<std::size_t>(gpu)];
    if (turn) turn();
    Synchronize(gpu);
  });
}

SideBySide MeasureSideBySide(const Attention& attention, bool backward, const Transfer& transfer) {
  std::vector<Work> passes, turns;
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    const auto at = static_cast<std::size_t>(gpu);
    passes.push_back(attention.Passes(gpu, backward));
    if (transfer.turn[at]) turns.push_back({gpu, transfer.streams[at], 4, transfer.turn[at]});
  }
  // The same number on both GPUs, as collectives must have.
  const auto set_turns = [&](double ms, double of_one) {
    for (Work& work : turns) work.turns = std::clamp(static_cast<int>(std::ceil(ms / of_one)), 4, kMostTurns);
  };
  const auto slowest = [](const std::vector<std::vector<double>>& ends) {
    double ms = 0;
    for (const auto& of_work : ends) ms = std::max(ms, of_work.back());
    return ms;
  };
  const double turn_ms = slowest(Run(turns)) / 4, one_pass_ms = slowest(Run(passes)) / passes[0].turns;
  for (Work& work : passes) {
    const int fit = static_cast<int>(kMostTurns * turn_ms / (kLonger * one_pass_ms));
    work.turns = std::clamp(fit, 1, work.turns);
  }
  const double pass_ms = one_pass_ms * passes[0].turns;
  std::vector<double> alone, beside;
  std::array<std::vector<double>, kGpus> slower, rate;
  for (int sample = 0; sample < kSamples; ++sample) {
    set_turns(pass_ms / 2, turn_ms);
    alone.push_back(transfer.bytes * turns.front().turns / slowest(Run(turns)) * 1e-6);
    const auto passes_alone = Run(passes);
    set_turns(kLonger * pass_ms, turn_ms);
    std::vector<Work> both = passes;
    both.insert(both.end(), turns.begin(), turns.end());
    const auto ends = Run(both);
    double until = ends[0].back();
    for (std::size_t gpu = 0; gpu < kGpus; ++gpu) {
      slower[gpu].push_back(100 * (ends[gpu].back() / passes_alone[gpu].back() - 1));
      rate[gpu].push_back(attention.operations(backward) * passes[gpu].turns / passes_alone[gpu].back() *
                          1e-9);
      until = std::min(until, ends[gpu].back());
    }
    double least = 1e9;
    for (std::size_t w = kGpus; w < ends.size(); ++w) {
      const double ms = std::min(until, ends[w].back());
      least = std::min(least, transfer.bytes * TurnsUntil(ms, ends[w]) / ms * 1e-6);
    }
    beside.push_back(least);
  }
  return {SpreadOf(alone),
          SpreadOf(beside),
          {SpreadOf(slower[0]), SpreadOf(slower[1])},
          {SpreadOf(rate[0]), SpreadOf(rate[1])}};
}

void PrintSideBySideHeader(const char* first_columns, int count) {
  std::printf(
      "| %s | pass | alone, GB/s | beside attention, GB/s | attention slower, GPU 0, %% | GPU 1, %% | "
      "attention alone, "
      "TFLOP/s |\n|",
      first_columns);
  for (int column = 0; column < count + 6; ++column) std::printf(" --- |");
  std::printf("\n");
}

void PrintSideBySide(const std::string& first_cells, bool backward, const SideBySide& figures) {
  std::printf("| %s %s | %s | %s | %s | %s | %.0f, %.0f |\n", first_cells.c_str(),
              backward ? "backward" : "forward", ToText(figures.alone, 0).c_str(),
              ToText(figures.beside, 0).c_str(), ToText(figures.slower[0], 1).c_str(),
              ToText(figures.slower[1], 1).c_str(), figures.attention[0].median, figures.attention[1].median);
  std::fflush(stdout);
}

}  // namespace cppool::measure
