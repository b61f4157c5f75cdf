// What the way through cppool/attention.h costs: cppool's own CUDA kernels as a table of C functions, cut
// into rectangular calls and merged, against the same kernels directly, by schedule.
//
//   adapter_cost [--world-size N] [--tokens PER_GPU] [--heads H] [--kv-heads G] [--dim D] [--check]
//
// Times are the slowest rank's medians over 10 iterations, in ms. "16-bit": parts come in the tensors' dtype;
// "fp32": in fp32. --check also prints each tensor's largest error over plain attention's, against fp64.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/families/table/family.h"
#include "kernels/attention/run.h"
#include "kernels/backend.h"
#include "kernels/error.h"

namespace {

using namespace cppool::kernels;

const AttentionFamily* own = nullptr;            // the family that the table passes calls on to
thread_local cppool_runtime* runtime = nullptr;  // this thread's rank's

// ----- cppool's own kernels as a table

struct Plan {
  KernelRequest request;
  Layout query, key;
  std::unique_ptr<AttentionKernel> kernel;
  std::unique_ptr<BlockPlan> plan;
};

// A side of a call as rows [rows, heads, dim].
Layout LayoutOf(const cppool_tensor& tensor) {
  const std::int64_t row = tensor.shape[2] * tensor.shape[3];
  Layout layout;
  layout.row_step = static_cast<std::int32_t>(tensor.strides[1] / row);
  const std::int64_t entry = tensor.strides[0] / row, length = tensor.shape[1];
  for (std::int64_t b = 0; b < tensor.shape[0]; ++b) {
    layout.segments.push_back(
        {static_cast<std::int32_t>(b), 0, static_cast<std::int32_t>(length), b * entry});
  }
  layout.rows = (tensor.shape[0] - 1) * entry + (length - 1) * layout.row_step + 1;
  return layout;
}

Dtype DtypeOf(const cppool_tensor& tensor) {
  return tensor.code == CPPOOL_DL_BFLOAT ? Dtype::kBf16 : tensor.bits == 16 ? Dtype::kFp16 : Dtype::kFp32;
}

KernelRequest RequestOf(const cppool_attention_call& c) {
  KernelRequest request;
  request.shape = {TensorDtypes(DtypeOf(*c.tensors->q)),
                   static_cast<int>(c.dim_qk),
                   static_cast<int>(c.dim_v),
                   static_cast<int>(c.heads),
                   static_cast<int>(c.kv_heads),
                   0,
                   0,
                   static_cast<int>(c.heads / c.kv_heads),
                   static_cast<float>(c.scale)};
  request.training = c.backward != 0;
  request.deterministic = c.deterministic != 0;
  return request;
}

cppool_status Supports(const cppool_attention_call* c, char* why, std::size_t size) {
  const cppool_attention_tensors& t = *c->tensors;
  for (const cppool_tensor* tensor : {t.q, t.k, t.v}) {
    if (tensor->strides[1] % (tensor->shape[2] * tensor->shape[3]) == 0) continue;
    std::snprintf(why, size, "rows with gaps");
    return CPPOOL_UNSUPPORTED;
  }
  const auto refusal = own->Refusal(RequestOf(*c));
  if (!refusal) return CPPOOL_OK;
  std::snprintf(why, size, "%s", refusal->c_str());
  return CPPOOL_UNSUPPORTED;
}

// Runs `function`; a RuntimeError becomes a status.
template <typename Function>
cppool_status StatusOf(char* why, std::size_t size, Function&& function) {
  try {
    function();
    return CPPOOL_OK;
  } catch (const RuntimeError& error) {
    std::snprintf(why, size, "%s", error.what());
    return error.status();
  }
}

cppool_status Prepare(const cppool_attention_call* c, void** out, std::size_t* workspace, char* why,
                      std::size_t size) {
  return StatusOf(why, size, [&] {
    auto plan = std::make_unique<Plan>();
    plan->request = RequestOf(*c);
    plan->query = LayoutOf(*c->tensors->q);
    plan->key = LayoutOf(*c->tensors->k);
    const std::int64_t diagonal = c->anchor == CPPOOL_BOTTOM_RIGHT ? c->seqlen_kv - c->seqlen_q : 0;
    const Band band{c->window_left < 0 ? -kOpen : static_cast<std::int32_t>(diagonal - c->window_left),
                    c->window_right < 0 ? kOpen : static_cast<std::int32_t>(diagonal + c->window_right)};
    plan->kernel = own->Open(runtime);
    plan->kernel->Load(plan->request);
    plan->plan =
        plan->kernel->Plan(plan->request, plan->query, plan->key,
                           std::vector<Band>(static_cast<std::size_t>(c->batch), band), runtime->stream);
    *workspace = own->WorkspaceBytes(plan->request, plan->query.rows, plan->key.rows);
    *out = plan.release();
  });
}

TensorRef Read(const cppool_tensor* tensor) { return {tensor->data, DtypeOf(*tensor)}; }
float* Floats(const cppool_tensor* tensor) { return static_cast<float*>(tensor->data); }

cppool_status Forward(void* opaque, const cppool_attention_tensors* t, void* workspace, cppool_stream stream,
                      char* why, std::size_t size) {
  return StatusOf(why, size, [&] {
    const Plan& plan = *static_cast<Plan*>(opaque);
    ForwardArgs args;
    args.plan = plan.plan.get();
    args.workspace = workspace;
    args.q = Read(t->q);
    args.k = Read(t->k);
    args.v = Read(t->v);
    args.lse = Floats(t->lse);
    args.last = DtypeOf(*t->out) != Dtype::kFp32;
    if (args.last) {
      args.out = {t->out->data, DtypeOf(*t->out)};
    } else {
      args.accumulator = Floats(t->out);
    }
    plan.kernel->Forward(plan.request.shape, args, stream);
  });
}

cppool_status Backward(void* opaque, const cppool_attention_tensors* t, void* workspace, cppool_stream stream,
                       char* why, std::size_t size) {
  return StatusOf(why, size, [&] {
    const Plan& plan = *static_cast<Plan*>(opaque);
    BackwardArgs args;
    args.plan = plan.plan.get();
    args.workspace = workspace;
    args.q = Read(t->q);
    args.k = Read(t->k);
    args.v = Read(t->v);
    args.dout = Read(t->dout);
    args.out = Read(t->out);
    args.lse = Floats(t->lse);
    args.delta = Floats(t->delta);
    const bool last = DtypeOf(*t->dq) != Dtype::kFp32;
    args.query = args.key = {true, true, last};
    if (last) {
      args.dq = {t->dq->data, DtypeOf(*t->dq)};
      args.dk = {t->dk->data, DtypeOf(*t->dk)};
      args.dv = {t->dv->data, DtypeOf(*t->dv)};
    } else {
      args.dq_accumulator = Floats(t->dq);
      args.dk_accumulator = Floats(t->dk);
      args.dv_accumulator = Floats(t->dv);
    }
    plan.kernel->Backward(plan.request.shape, args, stream);
  });
}

cppool_attention_kernel TableOf(std::uint32_t features) {
  return {CPPOOL_ATTENTION_ABI,
          sizeof(cppool_attention_kernel),
          "own",
          "1",
          "cuda",
          features,
          &Supports,
          &Prepare,
          &Forward,
          &Backward,
          [](void* plan) { delete static_cast<Plan*>(plan); }};
}

// ----- runs

class Report : public AttentionReport {
 public:
  Report(RankRuntime& rank, bool timed) : rank_(rank), last_(timed ? 10 : 1), next_(timed ? -2 : 0) {}
  bool NextIteration() override {
    if (next_ == last_) rank_.EndIterations();
    if (next_ >= last_) return false;
    rank_.BeginIteration(next_++);
    return true;
  }
  void Work(const std::string&, double) override {}
  void Check(CheckedTensor tensor, const std::string& against, const Verdict& verdict) override {
    if (!verdict.ok) wrong = std::string(NameOf(tensor)) + " against " + against;
    if (against == "oracle") ratios[NameOf(tensor)] = std::max(ratios[NameOf(tensor)], verdict.ratio);
  }
  std::map<std::string, double> ratios;
  std::string wrong;

 private:
  RankRuntime& rank_;
  int last_, next_;
};

struct Outcome {
  std::map<std::string, double> ms;  // by stage, of the slowest rank
  std::map<std::string, double> ratios;
  std::string wrong;
};

class World {
 public:
  explicit World(int size) : backend_(CreateCudaBackend(size)), ranks_(static_cast<std::size_t>(size)) {
    OnEveryRank([&](std::size_t r) { ranks_[r] = backend_->OpenRank(static_cast<int>(r)); });
  }
  ~World() {
    OnEveryRank([&](std::size_t r) { ranks_[r].reset(); });
  }

  Outcome Run(const AttentionFamily& family, const AttentionSpec& spec, bool checks) {
    Outcome outcome;
    std::mutex mutex;
    std::latch begun(static_cast<std::ptrdiff_t>(ranks_.size()));
    OnEveryRank([&](std::size_t r) {
      RankRuntime& rank = *ranks_[r];
      Report report(rank, !checks);
      rank.BeginCase();
      begun.arrive_and_wait();
      runtime = rank.seam();
      RunAttention(rank.seam(), family, spec, checks, report);
      const StageTimes times = rank.EndCase();
      const std::lock_guard lock(mutex);
      for (const auto& [stage, ms] : times) outcome.ms[stage] = std::max(outcome.ms[stage], ms);
      for (const auto& [tensor, ratio] : report.ratios)
        outcome.ratios[tensor] = std::max(outcome.ratios[tensor], ratio);
      if (!report.wrong.empty()) outcome.wrong = report.wrong;
    });
    return outcome;
  }

 private:
  // What one of them throws ends the program: the others may wait for it.
  void OnEveryRank(const std::function<void(std::size_t)>& work) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      threads.emplace_back([&, r] {
        try {
          work(r);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "adapter_cost: rank %zu: %s\n", r, error.what());
          std::_Exit(1);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  std::unique_ptr<Backend> backend_;
  std::vector<std::unique_ptr<RankRuntime>> ranks_;
};

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::int64_t> options = {
      {"--world-size", 1}, {"--tokens", 32768}, {"--heads", 16}, {"--kv-heads", 16}, {"--dim", 128}};
  bool check = false;
  for (int i = 1; i < argc; ++i) {
    const auto option = options.find(argv[i]);
    if (std::string_view(argv[i]) == "--check") {
      check = true;
    } else if (option != options.end() && i + 1 < argc) {
      option->second = std::atoll(argv[++i]);
    } else {
      std::fprintf(stderr, "adapter_cost: unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  const int size = static_cast<int>(options["--world-size"]);
  World world(size);
  const cppool_attention_kernel half = TableOf(0), full = TableOf(CPPOOL_ATTENTION_FP32_RESULTS);
  const table::TableFamily by_half(half), by_full(full);
  std::printf("%-10s %-9s %9s %9s %7s %9s %7s\n", "schedule", "pass", "direct", "16-bit", "", "fp32", "");
  for (const auto& [comm, name] :
       {std::pair(CpCommType::kP2p, "p2p"), std::pair(CpCommType::kAllGather, "all_gather"),
        std::pair(CpCommType::kA2a, "a2a")}) {
    AttentionSpec spec;
    spec.batch = 1;
    spec.seqlen_q = spec.seqlen_kv = options["--tokens"] * size;
    spec.heads = static_cast<int>(options["--heads"]);
    spec.kv_heads = static_cast<int>(options["--kv-heads"]);
    spec.dim_qk = spec.dim_v = static_cast<int>(options["--dim"]);
    spec.comm = comm;
    spec.scale = 0.0883883476;
    DrawSequences(spec, size);
    own = ChooseFamily("cuda", RequestOf(spec)).family;
    if (!own) {
      std::fprintf(stderr, "adapter_cost: no kernel for this shape\n");
      return 1;
    }
    const Outcome direct = world.Run(*own, spec, false), sixteen = world.Run(by_half, spec, false),
                  fp32 = world.Run(by_full, spec, false);
    for (const char* pass : {"forward", "backward"}) {
      const double base = direct.ms.at(pass), a = sixteen.ms.at(pass), b = fp32.ms.at(pass);
      std::printf("%-10s %-9s %9.3f %9.3f %+6.1f%% %9.3f %+6.1f%%\n", name, pass, base, a,
                  100 * (a / base - 1), b, 100 * (b / base - 1));
    }
    std::fflush(stdout);
    if (!check) continue;
    for (const auto& [family, what] : {std::pair<const AttentionFamily*, const char*>(own, "direct"),
                                       std::pair<const AttentionFamily*, const char*>(&by_half, "16-bit"),
                                       std::pair<const AttentionFamily*, const char*>(&by_full, "fp32")}) {
      const Outcome outcome = world.Run(*family, spec, true);
      std::printf("  error over plain attention's, %s:", what);
      for (const auto& [tensor, ratio] : outcome.ratios) std::printf(" %s %.2f", tensor.c_str(), ratio);
      std::printf("%s%s\n", outcome.wrong.empty() ? "" : "; WRONG: ", outcome.wrong.c_str());
      std::fflush(stdout);
    }
  }
  return 0;
}
