#include "kernels/attention/run.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/attention/checks/fp8_verify.h"
#include "kernels/attention/checks/kernel_trial.h"
#include "kernels/attention/checks/verify.h"
#include "kernels/attention/run/stored_tensors.h"
#include "kernels/attention/schedule.h"
#include "kernels/attention/tensors/tensor_set.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

AttentionSpec WithWorld(AttentionSpec spec, int world_size) {
  spec.mx_world_size = world_size;
  return spec;
}
AttentionSpec WithLaunches(AttentionSpec spec, Launches launches) {
  spec.launches = launches;
  return spec;
}

class AttentionRun {
 public:
  AttentionRun(cppool_runtime* rt, const AttentionFamily& family, const AttentionSpec& spec,
               AttentionReport& report)
      : rt_(rt),
        spec_(WithLaunches(WithWorld(spec, rt->world_size), LaunchesOf(rt, family, spec))),
        report_(report),
        attention_(rt, family),
        check_(MakeCheckKernels(rt)),
        world_(GetGroup(rt, CPPOOL_WORLD)),
        barrier_(rt, sizeof(float), rt->stream) {
    Check(rt_, rt_->fill(rt_, barrier_.get(), 0, barrier_.bytes(), rt_->stream));
  }

  void Run(bool checks, TensorSource* source, TensorSink* sink) {
    if (checks || spec_.deterministic) check_->Load();
    const bool trials = checks && attention_.attention->takes_trials();
    if (trials) attention_.attention->AllowTrials();
    if (rt_->world_size > 1) report_.Moves(TransfersOf(rt_, spec_), spec_.launches);
    auto schedule = MakeSchedule(rt_, attention_, spec_);
    // Everything that a check needs is loaded before the first collective too: see Load().
    std::unique_ptr<Schedule> reference;
    if (checks) reference = MakeNoCpSchedule(rt_, attention_, spec_);

    if (sink && rt_->rank == 0) sink->Begin();
    TensorSet local(rt_, spec_, rt_->world_size);
    const RankTokens tokens(spec_, rt_->world_size, rt_->rank);
    {
      const Stage stage(rt_, rt_->stream, "inputs");
      local.Fill(*check_, spec_, tokens, source);
    }
    schedule->Prepare(local.pointers());
    SayWork();
    if (!report_.NextIteration()) return;  // another rank cannot begin: no rank communicates
    do {
      RunOnce(*schedule, local);
    } while (report_.NextIteration());
    std::vector<std::uint64_t> digests;
    if (checks || spec_.deterministic) digests = Digests(local);
    if (spec_.deterministic) RunAgain(*schedule, local, digests, checks);
    std::string finding;
    if (trials) finding = RunTrials(*schedule, local);
    Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
    if (!spec_.fp8) schedule.reset();  // in fp8 what it quantized is checked
    if (checks) {
      Judge(*reference, schedule.get(), local, tokens, source, sink);
      // What the main stream saw right after the run is still there: nothing was under way on another stream,
      // which the checks, milliseconds later, would not have noticed. With a deterministic case the rerun's
      // bits are those too.
      CheckDigests(local, digests, "later", false);
    }
    if (sink) {
      local.Save(tokens, *sink);
      if (spec_.fp8) SaveStored(rt_, *attention_.ops, spec_, local, schedule->Fp8(), *sink);
      Barrier();
      Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
      if (rt_->rank == 0) sink->End();
    }
    if (!finding.empty()) throw RuntimeError(CPPOOL_MISMATCH, finding);
  }

 private:
  void SayWork() const {
    const double pairs =
        static_cast<double>(CountPairs(GlobalLayout(spec_.format, spec_.queries),
                                       GlobalLayout(spec_.format, spec_.keys), BandsOf(spec_))) *
        spec_.heads / rt_->world_size;
    report_.Work("forward", 2 * pairs * (spec_.dim_qk + spec_.dim_v));
    if (spec_.training) report_.Work("backward", 2 * pairs * (3 * spec_.dim_qk + 2 * spec_.dim_v));
  }

  void Barrier() {
    if (world_.size > 1) {
      Check(rt_, rt_->all_reduce(rt_, barrier_.get(), barrier_.get(), 1, CPPOOL_FLOAT32, CPPOOL_SUM,
                                 world_.comm, rt_->stream));
    }
  }

  void RunOnce(Schedule& schedule, const TensorSet& local) {
    local.PoisonOutputs();
    Barrier();  // so that no rank's time holds another's late start
    schedule.Forward(local.pointers());
    if (spec_.training) schedule.Backward(local.pointers());
  }

  // Runs once more after the iterations, and expects the same bits.
  void RunAgain(Schedule& schedule, const TensorSet& local, const std::vector<std::uint64_t>& first,
                bool checks) {
    std::uint64_t all = 0;
    for (const std::uint64_t digest : first) all = (all ^ digest) * 0x9E3779B97F4A7C15u + 1;
    report_.Digest(all);
    if (!checks) return;
    RunOnce(schedule, local);
    CheckDigests(local, first, "rerun", true);
  }

  void CheckDigests(const TensorSet& local, const std::vector<std::uint64_t>& first, const char* against,
                    bool also_equal) {
    const std::vector<std::uint64_t> second = Digests(local);
    for (std::size_t i = 0; i < first.size(); ++i) {
      if (also_equal || first[i] != second[i])
        report_.Check(KindOf(local.outputs()[i]), against, JudgeRerun(first[i], second[i]));
    }
  }

  // Under each trial the results are what they were, as near as two right ones are. Returns what trials have
  // found. The results of the iterations are there again afterwards.
  std::string RunTrials(Schedule& schedule, const TensorSet& local) {
    const auto& outputs = local.outputs();
    std::vector<Buffer> kept;
    for (const TensorSet::Tensor& tensor : outputs) {
      kept.emplace_back(rt_, tensor.data.bytes(), rt_->stream);
      Check(rt_, rt_->copy(rt_, kept.back().get(), tensor.data.get(), tensor.data.bytes(), rt_->stream));
    }
    KernelTrial trial(rt_, *check_);
    for (const KernelTrial::Kind kind : KernelTrial::kAll) {
      const Stage stage(rt_, rt_->stream, std::string("trial/") + KernelTrial::NameOf(kind));
      trial.Begin(kind);
      attention_.attention->SetTrial(&trial);
      RunOnce(schedule, local);
      attention_.attention->SetTrial(nullptr);
      Results<CompareStats> results(rt_, outputs.size(), {});
      std::vector<const CompareStats*> stats;
      for (std::size_t i = 0; i < outputs.size(); ++i) stats.push_back(Compare(outputs[i], kept[i], results));
      Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
      bool same = true;
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const CheckedTensor tensor = KindOf(outputs[i]);
        const Verdict verdict = JudgeNoCp(tensor, JudgedDtype(tensor, spec_.dtypes), gqa(), *stats[i], {});
        report_.Check(tensor, KernelTrial::NameOf(kind), verdict);
        same = same && verdict.ok;
      }
      if (!same) trial.ResultsDiffer();
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      Check(rt_, rt_->copy(rt_, outputs[i].data.get(), kept[i].get(), kept[i].bytes(), rt_->stream));
    }
    return trial.finding();
  }

  static CheckedTensor KindOf(const TensorSet::Tensor& tensor) {
    return std::get<CheckedTensor>(tensor.info.kind);
  }
  bool gqa() const { return spec_.heads != spec_.kv_heads; }

  const CompareStats* Compare(const TensorSet::Tensor& tensor, const Buffer& kept,
                              Results<CompareStats>& results) {
    CompareArgs args;
    args.a = {tensor.data.get(), tensor.info.dtype};
    args.b = {kept.get(), tensor.info.dtype};
    args.rows = tensor.rows;
    args.columns = args.a_stride = args.b_stride = tensor.info.columns;
    args.relative = ToleranceNoCp(KindOf(tensor), JudgedDtype(KindOf(tensor), spec_.dtypes), gqa()).relative;
    CompareStats* const result = results.Next();
    check_->Compare(args, result, rt_->stream);
    return result;
  }

  std::vector<std::uint64_t> Digests(const TensorSet& local) {
    Results<std::uint64_t> results(rt_, local.outputs().size(), 0);
    std::vector<std::uint64_t*> at;
    for (const TensorSet::Tensor& tensor : local.outputs()) {
      at.push_back(results.Next());
      check_->Digest(tensor.data.get(), tensor.data.bytes(), at.back(), rt_->stream);
    }
    Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
    std::vector<std::uint64_t> digests;
    for (const std::uint64_t* digest : at) digests.push_back(*digest);
    return digests;
  }

  // `schedule` is NULL but in fp8.
  void Judge(Schedule& reference, const Schedule* schedule, const TensorSet& local, const RankTokens& tokens,
             TensorSource* source, TensorSink* sink) {
    TensorSet global(rt_, spec_, 1);
    {
      const Stage stage(rt_, rt_->stream, "reference/inputs");
      global.Fill(*check_, spec_, RankTokens(spec_, 1, 0), source);
      global.PoisonOutputs();
    }
    AttentionTensors tensors = global.pointers();
    Fp8Step step, reference_step;
    Buffer delta;
    if (schedule) {
      step = schedule->Fp8();
      // In fp8 both runs have the same delta: it sums the errors of a row of out, which are judged with out,
      // and where the terms of dS cancel, gradients are little else.
      if (spec_.training) {
        const Stage stage(rt_, rt_->stream, "reference/delta");
        delta = GatherDelta(rt_, spec_, *check_, step);
        tensors.delta = delta.get<float>();
      }
    }
    reference.Prepare(tensors);
    reference.Forward(tensors);
    if (spec_.training) reference.Backward(tensors);
    {
      const Stage stage(rt_, rt_->stream, "checks");
      Verifier verifier(rt_, spec_, *check_, tokens, local, global, report_, sink);
      std::optional<Fp8Verifier> fp8;
      if (schedule) {
        reference_step = reference.Fp8();
        fp8.emplace(rt_, spec_, *check_, local, global, step, reference_step, delta.get<float>(), report_);
        fp8->CheckBits();
        verifier.UseQuantized(fp8->problem(), attention_.family.capabilities(RequestOf(spec_)).fp8_sum_keys);
      }
      verifier.AgainstOracle();
      verifier.AgainstNoCp();
    }
    if (sink) global.SaveReference(*sink);
  }

  cppool_runtime* rt_;
  const AttentionSpec spec_;
  AttentionReport& report_;
  RankKernels attention_;
  std::unique_ptr<CheckKernels> check_;
  Group world_;
  Buffer barrier_;
};

}  // namespace

void RunAttention(cppool_runtime* runtime, const AttentionFamily& family, const AttentionSpec& spec,
                  bool checks, AttentionReport& report, TensorSource* source, TensorSink* sink) {
  AttentionRun run(runtime, family, spec, report);
  run.Run(checks, source, sink);
}

double AttentionBytes(const AttentionFamily& family, const AttentionSpec& asked, int world_size, bool host) {
  if (asked.launches == Launches::kAuto) {
    const auto bytes = [&](Launches launches) {
      return AttentionBytes(family, WithLaunches(asked, launches), world_size, host);
    };
    const bool one = !WhyNotOneLaunch(family, asked);
    return std::max(bytes(Launches::kSteps), one ? bytes(Launches::kOne) : 0);
  }
  const AttentionSpec spec = WithWorld(asked, world_size);
  // The rows that comparisons read, by number, and single values.
  const double tables = 64.0 * static_cast<double>(spec.batch) * (spec.seqlen_q + spec.seqlen_kv) + 1e6;
  // Trials keep the results, and hold what a call reads and writes once more.
  const double trials = family.AskBlocks()
                            ? 2 * TensorSet::Bytes(spec, world_size) +
                                  (spec.comm == CpCommType::kAllGather ? TensorSet::Bytes(spec, 1) : 0)
                            : 0;
  const double schedule = ScheduleMemory(family, spec, world_size).total();
  const double judging = TensorSet::Bytes(spec, 1) + OracleBytes(spec, host, world_size);
  // The reference's schedule is made with the other one, its tensors when that one is gone: in fp8 it stays.
  const double both =
      spec.fp8 ? schedule + judging + Fp8Verifier::Bytes(spec, world_size) : std::max(schedule, judging);
  const double on_host = host && spec.fp8 ? Fp8Verifier::HostBytes(spec, world_size) : 0;
  return TensorSet::Bytes(spec, world_size) + NoCpMemory(family, spec).total() + both + tables + trials +
         on_host;
}

}  // namespace cppool::kernels
