#include "kernels/attention/run.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/layout.h"
#include "kernels/attention/schedule.h"
#include "kernels/runtime.h"

namespace cppool::kernels {
namespace {

constexpr int kPoisonByte = 0xFF;  // NaN in every floating-point type

double VisiblePairs(const AttentionSpec& spec) {
  const Band band = BandOf(spec, spec.seqlen_q, spec.seqlen_kv);
  double pairs = 0;
  for (std::int64_t i = 0; i < spec.seqlen_q; ++i) {
    const std::int64_t begin = std::max<std::int64_t>(0, i + band.low);
    const std::int64_t end = std::min<std::int64_t>(spec.seqlen_kv, i + band.high + 1);
    pairs += static_cast<double>(std::max<std::int64_t>(0, end - begin));
  }
  return pairs * static_cast<double>(spec.batch);
}

double ForwardFlops(const AttentionSpec& spec) {
  return 2 * VisiblePairs(spec) * spec.heads * (spec.dim_qk + spec.dim_v);
}
double BackwardFlops(const AttentionSpec& spec) {
  return 2 * VisiblePairs(spec) * spec.heads * (3 * spec.dim_qk + 2 * spec.dim_v);
}

// The tensors of one side: a rank's tokens, or all of them.
struct TensorSet {
  std::int64_t rows_q = 0, rows_kv = 0;
  Buffer q, k, v, dout, out, lse, dq, dk, dv;

  TensorSet(cppool_runtime* rt, const AttentionSpec& spec, int world_size)
      : rows_q(spec.batch * spec.seqlen_q / world_size), rows_kv(spec.batch * spec.seqlen_kv / world_size) {
    const auto tensor = [&](std::int64_t rows, int heads, int dim, std::size_t element) {
      return Buffer(rt, static_cast<std::size_t>(rows) * heads * dim * element, rt->stream);
    };
    const std::size_t element = SizeOf(spec.dtype);
    q = tensor(rows_q, spec.heads, spec.dim_qk, element);
    k = tensor(rows_kv, spec.kv_heads, spec.dim_qk, element);
    v = tensor(rows_kv, spec.kv_heads, spec.dim_v, element);
    out = tensor(rows_q, spec.heads, spec.dim_v, element);
    lse = tensor(rows_q, spec.heads, 1, sizeof(float));
    if (spec.training) {
      dout = tensor(rows_q, spec.heads, spec.dim_v, element);
      dq = tensor(rows_q, spec.heads, spec.dim_qk, element);
      dk = tensor(rows_kv, spec.kv_heads, spec.dim_qk, element);
      dv = tensor(rows_kv, spec.kv_heads, spec.dim_v, element);
    }
  }

  AttentionTensors pointers() const {
    return {q.get(), k.get(), v.get(), dout.get(), out.get(), lse.get<float>(), dq.get(), dk.get(), dv.get()};
  }
  void Poison(cppool_runtime* rt) const {
    for (const Buffer* buffer : {&out, &lse, &dq, &dk, &dv}) {
      if (*buffer) Check(rt, rt->fill(rt, buffer->get(), kPoisonByte, buffer->bytes(), rt->stream));
    }
  }
};

// One output tensor: where it is, and how its rows look.
struct Output {
  CheckedTensor kind;
  const Buffer TensorSet::*buffer;
  bool of_queries;
  int heads;
  int dim;
  Dtype dtype;
};

std::vector<Output> Outputs(const AttentionSpec& spec) {
  std::vector<Output> outputs = {
      {CheckedTensor::kOut, &TensorSet::out, true, spec.heads, spec.dim_v, spec.dtype},
      {CheckedTensor::kLse, &TensorSet::lse, true, spec.heads, 1, Dtype::kFp32},
  };
  if (spec.training) {
    outputs.push_back({CheckedTensor::kDq, &TensorSet::dq, true, spec.heads, spec.dim_qk, spec.dtype});
    outputs.push_back({CheckedTensor::kDk, &TensorSet::dk, false, spec.kv_heads, spec.dim_qk, spec.dtype});
    outputs.push_back({CheckedTensor::kDv, &TensorSet::dv, false, spec.kv_heads, spec.dim_v, spec.dtype});
  }
  return outputs;
}

// What the oracle works out for one sequence and key/value head.
struct OracleOutputs {
  Buffer out, lse, dq, dk, dv;

  OracleOutputs(cppool_runtime* rt, const AttentionSpec& spec) {
    const std::size_t group = spec.heads / spec.kv_heads;
    const auto doubles = [&](std::size_t count) { return Buffer(rt, count * sizeof(double), rt->stream); };
    out = doubles(spec.seqlen_q * group * spec.dim_v);
    lse = doubles(spec.seqlen_q * group);
    if (spec.training) {
      dq = doubles(spec.seqlen_q * group * spec.dim_qk);
      dk = doubles(spec.seqlen_kv * spec.dim_qk);
      dv = doubles(spec.seqlen_kv * spec.dim_v);
    }
  }
  const Buffer& of(CheckedTensor kind) const {
    switch (kind) {
      case CheckedTensor::kOut:
        return out;
      case CheckedTensor::kLse:
        return lse;
      case CheckedTensor::kDq:
        return dq;
      case CheckedTensor::kDk:
        return dk;
      case CheckedTensor::kDv:
        return dv;
    }
    throw RuntimeError(CPPOOL_INTERNAL, "no such tensor");
  }
};

// Errors of several comparisons as one.
void Add(CompareStats& sum, const CompareStats& part) {
  sum.max_abs_err = std::max(sum.max_abs_err, part.max_abs_err);
  sum.max_abs_ref = std::max(sum.max_abs_ref, part.max_abs_ref);
  sum.max_excess = std::max(sum.max_excess, part.max_excess);
  sum.sum_sq_err += part.sum_sq_err;
  sum.sum_sq_ref += part.sum_sq_ref;
  sum.mismatches += part.mismatches;
  sum.count += part.count;
}

// Page-locked results that comparisons write in stream order.
class StatsArray {
 public:
  StatsArray(cppool_runtime* rt, std::size_t count) : rt_(rt) {
    void* memory = nullptr;
    Check(rt, rt->alloc_host(rt, count * sizeof(CompareStats), &memory));
    stats_ = static_cast<CompareStats*>(memory);
    for (std::size_t i = 0; i < count; ++i) {
      stats_[i] = {};
      stats_[i].mismatches = 1;  // a comparison that never ran must not hold
    }
  }
  ~StatsArray() { rt_->free_host(rt_, stats_); }
  StatsArray(const StatsArray&) = delete;
  StatsArray& operator=(const StatsArray&) = delete;
  CompareStats* next() { return &stats_[used_++]; }

 private:
  cppool_runtime* rt_;
  CompareStats* stats_ = nullptr;
  std::size_t used_ = 0;
};

class AttentionRun {
 public:
  AttentionRun(cppool_runtime* rt, const AttentionSpec& spec, AttentionReport& report)
      : rt_(rt),
        spec_(spec),
        report_(report),
        attention_(MakeAttentionKernels(rt)),
        check_(MakeCheckKernels(rt)) {}

  void Run(bool checks) {
    if (checks) check_->Load();
    auto schedule = MakeSchedule(rt_, *attention_, spec_);
    // Everything that a check needs is loaded before the first collective too: see Load().
    std::unique_ptr<Schedule> reference;
    if (checks) reference = MakeNoCpSchedule(rt_, *attention_, spec_);

    TensorSet local(rt_, spec_, rt_->world_size);
    const Layout local_q = LocalLayout(spec_.seqlen_q), local_kv = LocalLayout(spec_.seqlen_kv);
    {
      const Stage stage(rt_, rt_->stream, "inputs");
      Generate(local, local_q, local_kv);
    }
    Iterate(*schedule, local);
    Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));
    schedule.reset();
    if (checks) Judge(*reference, local, local_q, local_kv);
  }

 private:
  Layout LocalLayout(std::int64_t seqlen) const {
    return RankLayout(spec_.format, spec_.batch, seqlen, rt_->world_size, rt_->rank);
  }

  void Generate(const TensorSet& t, const Layout& queries, const Layout& keys) {
    const auto generate = [&](InputTensor tensor, const Layout& layout, int heads, int dim,
                              const Buffer& to) {
      check_->Generate(tensor, spec_.seed, layout, heads, dim, spec_.dtype, to.get(), rt_->stream);
    };
    generate(InputTensor::kQ, queries, spec_.heads, spec_.dim_qk, t.q);
    generate(InputTensor::kK, keys, spec_.kv_heads, spec_.dim_qk, t.k);
    generate(InputTensor::kV, keys, spec_.kv_heads, spec_.dim_v, t.v);
    if (spec_.training) generate(InputTensor::kDout, queries, spec_.heads, spec_.dim_v, t.dout);
  }

  void Iterate(Schedule& schedule, const TensorSet& local) {
    report_.Work("forward", ForwardFlops(spec_) / rt_->world_size);
    if (spec_.training) report_.Work("backward", BackwardFlops(spec_) / rt_->world_size);
    const Group world = GetGroup(rt_, CPPOOL_WORLD);
    Buffer barrier(rt_, sizeof(float), rt_->stream);
    Check(rt_, rt_->fill(rt_, barrier.get(), 0, barrier.bytes(), rt_->stream));
    while (report_.NextIteration()) {
      local.Poison(rt_);
      if (world.size > 1) {
        // So that no rank's time holds another's late start.
        Check(rt_, rt_->all_reduce(rt_, barrier.get(), barrier.get(), 1, CPPOOL_FLOAT32, CPPOOL_SUM,
                                   world.comm, rt_->stream));
      }
      schedule.Forward(local.pointers());
      if (spec_.training) schedule.Backward(local.pointers());
    }
  }

  void Judge(Schedule& reference, const TensorSet& local, const Layout& local_q, const Layout& local_kv) {
    const Layout global_q = GlobalLayout(spec_.format, spec_.batch, spec_.seqlen_q);
    const Layout global_kv = GlobalLayout(spec_.format, spec_.batch, spec_.seqlen_kv);
    TensorSet global(rt_, spec_, 1);
    {
      const Stage stage(rt_, rt_->stream, "reference/inputs");
      Generate(global, global_q, global_kv);
      global.Poison(rt_);
    }
    reference.Forward(global.pointers());
    if (spec_.training) reference.Backward(global.pointers());

    const Stage stage(rt_, rt_->stream, "checks");
    const std::vector<Output> outputs = Outputs(spec_);
    const std::vector<Pair> pairs = SampledPairs();
    StatsArray results(rt_, outputs.size() * (1 + 2 * pairs.size()));

    const std::int64_t* map_q = Upload(RowMap(local_q, global_q));
    const std::int64_t* map_kv =
        spec_.seqlen_kv == spec_.seqlen_q ? map_q : Upload(RowMap(local_kv, global_kv));
    std::vector<CompareStats*> no_cp;
    for (const Output& output : outputs) {
      CompareArgs args;
      args.a = (local.*output.buffer).get();
      args.b = (global.*output.buffer).get();
      args.a_dtype = args.b_dtype = output.dtype;
      args.a_stride = args.b_stride = args.columns = std::int64_t{output.heads} * output.dim;
      args.b_rows = output.of_queries ? map_q : map_kv;
      args.rows = output.of_queries ? local.rows_q : local.rows_kv;
      args.relative = ToleranceNoCp(output.kind, spec_.dtype, gqa()).relative;
      no_cp.push_back(results.next());
      check_->Compare(args, no_cp.back(), rt_->stream);
    }

    struct PairResult {
      CompareStats *ours, *plain;
    };
    std::vector<std::vector<PairResult>> against_oracle(outputs.size());
    const OracleOutputs exact(rt_, spec_), plain(rt_, spec_);
    for (const Pair& pair : pairs) {
      RunOracle(global, pair, false, exact);
      RunOracle(global, pair, true, plain);
      const Rows rows_q = RowsOf(local_q, pair.sequence), rows_kv = RowsOf(local_kv, pair.sequence);
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        PairResult result{results.next(), results.next()};
        CompareWithOracle(outputs[i], local, outputs[i].of_queries ? rows_q : rows_kv, pair, exact,
                          result.ours);
        ComparePlain(outputs[i], plain, exact, result.plain);
        against_oracle[i].push_back(result);
      }
    }
    Check(rt_, rt_->stream_synchronize(rt_, rt_->stream));

    for (std::size_t i = 0; i < outputs.size(); ++i) {
      report_.Check(outputs[i].kind, "no_cp", JudgeNoCp(outputs[i].kind, spec_.dtype, gqa(), *no_cp[i]));
      CompareStats ours, rounded;
      for (const PairResult& result : against_oracle[i]) {
        Add(ours, *result.ours);
        Add(rounded, *result.plain);
      }
      report_.Check(outputs[i].kind, "oracle", JudgeOracle(outputs[i].kind, spec_.dtype, ours, rounded));
    }
  }

  struct Pair {
    int sequence;
    int kv_head;
  };
  // All (sequence, key/value head) pairs where that is cheap, else a sample that the seed picks: the same on
  // every rank.
  std::vector<Pair> SampledPairs() const {
    const bool host = std::strcmp(rt_->backend, "host") == 0;
    const double budget_flops = host ? 4e8 : 1e11;
    const std::int64_t most = host ? 256 : 16;
    const std::int64_t group = spec_.heads / spec_.kv_heads;
    const double flops =
        12.0 * static_cast<double>(spec_.seqlen_q) * spec_.seqlen_kv * (spec_.dim_qk + spec_.dim_v) * group;
    const std::int64_t all = spec_.batch * spec_.kv_heads;
    const std::int64_t count =
        std::clamp<std::int64_t>(static_cast<std::int64_t>(budget_flops / flops), 1, std::min(all, most));
    std::vector<Pair> pairs;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t index = static_cast<std::int64_t>((spec_.seed + i * all / count) % all);
      pairs.push_back({static_cast<int>(index / spec_.kv_heads), static_cast<int>(index % spec_.kv_heads)});
    }
    return pairs;
  }

  void RunOracle(const TensorSet& global, const Pair& pair, bool rounded, const OracleOutputs& to) {
    const bool bshd = spec_.format == QkvFormat::kBshd;
    OracleArgs args;
    args.q = global.q.get();
    args.k = global.k.get();
    args.v = global.v.get();
    args.dout = spec_.training ? global.dout.get() : nullptr;
    args.dtype = spec_.dtype;
    args.q_row = bshd ? pair.sequence * spec_.seqlen_q : pair.sequence;
    args.kv_row = bshd ? pair.sequence * spec_.seqlen_kv : pair.sequence;
    args.q_step = args.kv_step = bshd ? 1 : spec_.batch;
    args.seqlen_q = spec_.seqlen_q;
    args.seqlen_kv = spec_.seqlen_kv;
    args.heads = spec_.heads;
    args.kv_heads = spec_.kv_heads;
    args.kv_head = pair.kv_head;
    args.group = spec_.heads / spec_.kv_heads;
    args.head_begin = pair.kv_head * args.group;
    args.dim_qk = spec_.dim_qk;
    args.dim_v = spec_.dim_v;
    args.scale = spec_.scale;
    args.mask = spec_.mask;
    args.window_left = spec_.window_left;
    args.window_right = spec_.window_right;
    args.rounded = rounded;
    args.out = to.out.get<double>();
    args.lse = to.lse.get<double>();
    args.dq = to.dq.get<double>();
    args.dk = to.dk.get<double>();
    args.dv = to.dv.get<double>();
    check_->Oracle(args, rt_->stream);
  }

  // Where this rank's tokens of one sequence are, and their positions: device arrays of `count`.
  struct Rows {
    const std::int64_t* rows;
    const std::int64_t* positions;
    std::int64_t count;
  };
  Rows RowsOf(const Layout& layout, int sequence) {
    const auto key = std::make_pair(&layout, sequence);
    if (const auto known = rows_.find(key); known != rows_.end()) return known->second;
    std::vector<std::int64_t> rows, positions;
    for (const Segment& segment : layout.segments) {
      if (segment.sequence != sequence) continue;
      for (std::int64_t i = 0; i < segment.length; ++i) {
        rows.push_back(segment.row + i * layout.row_step);
        positions.push_back(segment.position + i);
      }
    }
    const auto count = static_cast<std::int64_t>(rows.size());
    return rows_[key] = {Upload(std::move(rows)), Upload(std::move(positions)), count};
  }

  void CompareWithOracle(const Output& output, const TensorSet& local, const Rows& rows, const Pair& pair,
                         const OracleOutputs& exact, CompareStats* result) {
    const int group = output.of_queries ? spec_.heads / spec_.kv_heads : 1;
    CompareArgs args;
    args.a = (local.*output.buffer).get();
    args.a_dtype = output.dtype;
    args.a_rows = rows.rows;
    args.a_stride = std::int64_t{output.heads} * output.dim;
    args.a_offset = std::int64_t{pair.kv_head} * group * output.dim;
    args.b = exact.of(output.kind).get();
    args.b_dtype = Dtype::kFp64;
    args.b_rows = rows.positions;
    args.b_stride = args.columns = std::int64_t{group} * output.dim;
    args.rows = rows.count;
    check_->Compare(args, result, rt_->stream);
  }

  void ComparePlain(const Output& output, const OracleOutputs& plain, const OracleOutputs& exact,
                    CompareStats* result) {
    CompareArgs args;
    args.a = plain.of(output.kind).get();
    args.b = exact.of(output.kind).get();
    args.a_dtype = args.b_dtype = Dtype::kFp64;
    args.rows = output.of_queries ? spec_.seqlen_q : spec_.seqlen_kv;
    args.columns = static_cast<std::int64_t>(exact.of(output.kind).bytes() / sizeof(double)) / args.rows;
    args.a_stride = args.b_stride = args.columns;
    check_->Compare(args, result, rt_->stream);
  }

  // A table in device memory; both copies live as long as the run.
  const std::int64_t* Upload(std::vector<std::int64_t> table) {
    tables_.push_back(std::move(table));
    const auto& host = tables_.back();
    buffers_.emplace_back(rt_, host.size() * sizeof(std::int64_t), rt_->stream);
    if (!host.empty()) {
      Check(rt_, rt_->copy(rt_, buffers_.back().get(), host.data(), buffers_.back().bytes(), rt_->stream));
    }
    return buffers_.back().get<std::int64_t>();
  }

  bool gqa() const { return spec_.heads != spec_.kv_heads; }

  cppool_runtime* rt_;
  const AttentionSpec& spec_;
  AttentionReport& report_;
  std::deque<std::vector<std::int64_t>> tables_;
  std::deque<Buffer> buffers_;
  std::map<std::pair<const Layout*, int>, Rows> rows_;
  std::unique_ptr<AttentionKernels> attention_;
  std::unique_ptr<CheckKernels> check_;
};

}  // namespace

void RunAttention(cppool_runtime* runtime, const AttentionSpec& spec, bool checks, AttentionReport& report) {
  AttentionRun run(runtime, spec, report);
  run.Run(checks);
}

double AttentionBytes(const AttentionSpec& spec, int world_size) {
  const double element = SizeOf(spec.dtype);
  const auto tensors = [&](double world) {
    const double q = static_cast<double>(spec.batch) * spec.seqlen_q / world * spec.heads;
    const double kv = static_cast<double>(spec.batch) * spec.seqlen_kv / world * spec.kv_heads;
    const double inputs = element * (q * spec.dim_qk + kv * (spec.dim_qk + spec.dim_v));
    return inputs + q * spec.dim_v * element + 4 * q +
           (spec.training ? inputs + q * spec.dim_v * element : 0);
  };
  const double group = static_cast<double>(spec.heads) / spec.kv_heads;
  const double dims = spec.dim_qk + spec.dim_v;
  const double oracle = 2 * 8.0 * (spec.seqlen_q * group * (dims + 1) + spec.seqlen_kv * dims);
  // The oracle's own workspace is bounded; row tables and work lists are small beside the tokens they
  // describe.
  const double workspace = std::min(1.6e9, 8.0 * 8.0 * static_cast<double>(spec.seqlen_q) * spec.seqlen_kv +
                                               16.0 * 8.0 * spec.seqlen_kv * dims);
  const double tables = 64.0 * static_cast<double>(spec.batch) * (spec.seqlen_q + spec.seqlen_kv) + 1e6;
  AttentionSpec reference = spec;
  reference.comm = CpCommType::kP2p;
  return tensors(world_size) + std::max(ScheduleBytes(spec, world_size), tensors(1) + oracle + workspace) +
         ScheduleBytes(reference, 1) + tables;
}

}  // namespace cppool::kernels
