#include "tests/kernels/attention/families/table/test_kernel.h"

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/half.h"
#include "kernels/numerics/fp8.h"
#include "kernels/numerics/half.h"

namespace cppool::test {
namespace {

using Fault = Behaviour::Fault;

Behaviour behaviour;
cppool_attention_kernel table;
std::atomic<int> calls{0};

struct InEach {
  ~InEach() {
    if (behaviour.in_each) behaviour.in_each();
  }
};

bool Is(Fault fault) { return behaviour.fault == fault; }

// Elements of one tensor by index, whatever its dtype.
class View {
 public:
  explicit View(const cppool_tensor* tensor) : t_(*tensor) {}
  std::int64_t At(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return a * t_.strides[0] + b * t_.strides[1] + c * t_.strides[2] + (t_.ndim > 3 ? d * t_.strides[3] : 0);
  }
  double Read(std::int64_t at) const {
    if (t_.bits == 8) {
      const std::uint8_t bits = static_cast<const std::uint8_t*>(t_.data)[at];
      const double value =
          t_.code == CPPOOL_DL_FLOAT8_E4M3 ? kernels::E4M3ToFloat(bits) : kernels::E5M2ToFloat(bits);
      return Is(Fault::kNoScale) ? value : value * *static_cast<const float*>(t_.scale->data);
    }
    if (t_.bits == 32) return static_cast<const float*>(t_.data)[at];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(t_.data)[at];
    return t_.code == CPPOOL_DL_BFLOAT ? kernels::BF16ToFloat(bits) : kernels::FP16ToFloat(bits);
  }
  void Write(std::int64_t at, double value) const {
    if (t_.bits == 32) {
      static_cast<float*>(t_.data)[at] = static_cast<float>(value);
    } else if (t_.bits == 8) {
      static_cast<std::uint8_t*>(t_.data)[at] =
          kernels::FloatToE4M3(static_cast<float>(value) /
                               (Is(Fault::kNoOutScale) ? 1 : *static_cast<const float*>(t_.scale->data)));
    } else {
      static_cast<std::uint16_t*>(t_.data)[at] =
          t_.code == CPPOOL_DL_BFLOAT ? kernels::BF16::FromDouble(value) : kernels::FP16::FromDouble(value);
    }
  }
  const cppool_tensor& tensor() const { return t_; }

 private:
  const cppool_tensor& t_;
};

struct Plan {
  cppool_attention_call call;
  std::uint32_t features;
  double Base() const { return features & CPPOOL_ATTENTION_LSE_BASE2 ? std::log(2.0) : 1; }
};

// One sequence of a call: its rows in the tensors, and what is added to its logits.
class Sequence {
 public:
  Sequence(const Plan& plan, const cppool_attention_tensors& t, std::int64_t index)
      : call_(plan.call), t_(t), entry(index), queries(plan.call.seqlen_q), keys(plan.call.seqlen_kv) {
    if (!t.cu_seqlens_q) return;
    entry = 0;
    const auto side = [&](const cppool_tensor* starts, const cppool_tensor* lengths, std::int64_t& first,
                          std::int64_t& count) {
      const auto* start = static_cast<const std::int32_t*>(starts->data) + index;
      first = start[0];
      count = lengths ? static_cast<const std::int32_t*>(lengths->data)[index] : start[1] - start[0];
    };
    side(t.cu_seqlens_q, t.seqlens_q, q, queries);
    side(t.cu_seqlens_kv, t.seqlens_kv, k, keys);
  }
  bool Sees(std::int64_t i, std::int64_t j) const {
    const std::int64_t diagonal = i + MaskDiagonal();
    return (call_.window_left < 0 || j >= diagonal - call_.window_left) &&
           (call_.window_right < 0 || j <= diagonal + call_.window_right);
  }
  double Added(std::int64_t head, std::int64_t i, std::int64_t j) const {
    if (t_.bias) {
      const cppool_tensor& bias = *t_.bias;
      const std::int64_t row = Is(Fault::kPackedBias) && bias.shape[2] > 1 ? bias.shape[3] : bias.strides[2];
      return View(&bias).Read(entry * bias.strides[0] + head * bias.strides[1] + i * row + j);
    }
    if (!t_.alibi_slopes) return 0;
    std::int64_t diagonal = call_.alibi_diagonal;
    if (Is(Fault::kAlibiOfCall)) diagonal = 0;
    if (Is(Fault::kAlibiOfMask)) diagonal = MaskDiagonal();
    return -static_cast<const float*>(t_.alibi_slopes->data)[head] *
           static_cast<double>(std::abs(j - i - diagonal));
  }

 private:
  std::int64_t MaskDiagonal() const { return call_.anchor == CPPOOL_BOTTOM_RIGHT ? keys - queries : 0; }

  const cppool_attention_call& call_;
  const cppool_attention_tensors& t_;

 public:
  std::int64_t entry;  // of the tensors' first dimension
  std::int64_t queries, keys;
  std::int64_t q = 0, k = 0;  // first rows
};

// What fp8 makes of P (E4M3) and dS (E5M2), where a call is in fp8.
double CastP(const cppool_attention_call& call, double p) {
  if (call.p_scale == 0 || Is(Fault::kPStays)) return p;
  return kernels::E4M3ToFloat(kernels::FloatToE4M3(static_cast<float>(p * call.p_scale))) / call.p_scale;
}
double CastDs(const cppool_attention_tensors& t, double ds) {
  const auto* scale = t.ds_scale ? static_cast<const float*>(t.ds_scale->data) : nullptr;
  if (!scale) return ds;
  return kernels::E5M2ToFloat(kernels::FloatToE5M2(static_cast<float>(ds) * *scale)) / *scale;
}

bool Readable(const cppool_tensor* tensor) {
  if (tensor->bits == 8) return tensor->code == CPPOOL_DL_FLOAT8_E4M3 && tensor->scale;
  return (tensor->bits == 16 && (tensor->code == CPPOOL_DL_BFLOAT || tensor->code == CPPOOL_DL_FLOAT)) ||
         (tensor->bits == 32 && tensor->code == CPPOOL_DL_FLOAT);
}

cppool_status Supports(const cppool_attention_call* call, char* why, std::size_t size) {
  const InEach in_each;
  std::string reason;
  const cppool_attention_tensors& t = *call->tensors;
  if (!Readable(t.q) || !Readable(t.out)) reason = "no such dtype";
  if (t.out->bits == 32 && !(table.features & CPPOOL_ATTENTION_FP32_RESULTS)) reason = "no fp32 results";
  const bool fp8_out = call->p_scale != 0 && !call->backward && (table.features & CPPOOL_ATTENTION_FP8_OUT);
  if ((t.out->bits == 8) != fp8_out) reason = "out is to be in another dtype";
  if ((table.features & CPPOOL_ATTENTION_LSE_HEADS_FIRST) && t.lse->strides[2] != 1)
    reason = "lse is not packed";
  const auto unasked = [&](const cppool_tensor* tensor, std::uint32_t feature) {
    if (tensor && !(table.features & feature)) reason = "it was not to be asked for that";
  };
  unasked(t.bias, CPPOOL_ATTENTION_BIAS);
  unasked(t.dbias, CPPOOL_ATTENTION_BIAS);
  unasked(t.alibi_slopes, CPPOOL_ATTENTION_ALIBI);
  unasked(t.max_logit, CPPOOL_ATTENTION_MAX_LOGIT);
  unasked(t.cu_seqlens_q, CPPOOL_ATTENTION_VARLEN);
  if (call->p_scale != 0) unasked(t.q, CPPOOL_ATTENTION_FP8);
  if (call->p_scale != 0 && call->backward && (!t.dout->scale || !t.ds_scale || !t.amax_ds))
    reason = "fp8 of a backward pass is not whole";
  if (!t.bias != !t.dbias && call->backward) reason = "bias and dbias come together";
  if (reason.empty() && behaviour.refuse) reason = behaviour.refuse(*call);
  if (reason.empty()) return CPPOOL_OK;
  std::snprintf(why, size, "%s", reason.c_str());
  return CPPOOL_UNSUPPORTED;
}

cppool_status Prepare(const cppool_attention_call* call, void** plan, std::size_t* workspace_bytes, char* why,
                      std::size_t size) {
  const InEach in_each;
  if (behaviour.refuse_in_prepare) {
    std::snprintf(why, size, "not on this device");
    return CPPOOL_UNSUPPORTED;
  }
  *workspace_bytes = behaviour.workspace_bytes;
  auto* made = new Plan{*call, table.features};
  made->call.tensors = nullptr;
  *plan = made;
  return CPPOOL_OK;
}

// k [entries, rows, heads, dim], or what it was when the address was first seen.
std::vector<double> KeysOf(const View& k) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, std::int64_t>, std::vector<double>> kept;
  const std::int64_t* const shape = k.tensor().shape;
  std::vector<double> keys;
  for (std::int64_t b = 0; b < shape[0]; ++b)
    for (std::int64_t j = 0; j < shape[1]; ++j)
      for (std::int64_t h = 0; h < shape[2]; ++h)
        for (std::int64_t d = 0; d < shape[3]; ++d) {
          const bool packed = Is(Fault::kPacked);
          keys.push_back(
              k.Read(packed ? ((b * shape[1] + j) * shape[2] + h) * shape[3] + d : k.At(b, j, h, d)));
        }
  if (!Is(Fault::kKeepsInputs)) return keys;
  const std::lock_guard lock(mutex);
  return kept.emplace(std::pair(k.tensor().data, static_cast<std::int64_t>(keys.size())), keys).first->second;
}

// Where element (row, kv head) of k begins in KeysOf.
std::size_t KeyAt(const Plan& plan, const cppool_attention_tensors& t, const Sequence& s, std::int64_t j,
                  std::int64_t kv) {
  return static_cast<std::size_t>(((s.entry * t.k->shape[1] + s.k + j) * plan.call.kv_heads + kv) *
                                  plan.call.dim_qk);
}

// The logits of one query head's row, over all keys; not seen: -inf.
struct RowOfLogits {
  double lse, most;  // of these keys
};
RowOfLogits Logits(const Plan& plan, const cppool_attention_tensors& t, const Sequence& s,
                   const std::vector<double>& k, std::int64_t h, std::int64_t i,
                   std::vector<double>& logits) {
  const cppool_attention_call& c = plan.call;
  const View q(t.q);
  double most = -std::numeric_limits<double>::infinity();
  logits.assign(static_cast<std::size_t>(s.keys), most);
  for (std::int64_t j = 0; j < s.keys; ++j) {
    if (!s.Sees(i, j)) continue;
    double sum = 0;
    const double* key = k.data() + KeyAt(plan, t, s, j, h / (c.heads / c.kv_heads));
    for (std::int64_t d = 0; d < c.dim_qk; ++d) sum += q.Read(q.At(s.entry, s.q + i, h, d)) * key[d];
    most = std::max(most, logits[static_cast<std::size_t>(j)] = c.scale * sum + s.Added(h, i, j));
  }
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - most);
  return {most + std::log(sum), most};
}

// Writes where it must not, but only among the gaps of a trial: the memory of this process stays whole.
void Misbehave(const Plan& plan, const cppool_attention_tensors* t, void* workspace) {
  const cppool_attention_call& c = plan.call;
  if (t->q->strides[1] == c.heads * c.dim_qk) return;
  const auto last = [](const View& view) {
    const std::int64_t* const shape = view.tensor().shape;
    return view.At(shape[0] - 1, shape[1] - 1, shape[2] - 1, shape[3] - 1);
  };
  if (Is(Fault::kWritesBehind)) View(t->out).Write(last(View(t->out)) + 1, 1);
  if (Is(Fault::kWritesBehindBias) && t->dbias) View(t->dbias).Write(last(View(t->dbias)) + 1, 1);
  if (Is(Fault::kWritesBiasGap) && t->dbias) View(t->dbias).Write(t->dbias->shape[3], 1);
  if (Is(Fault::kWritesOtherRows) && t->seqlens_q) {
    const View out(t->out);
    out.Write(out.At(0, static_cast<std::int32_t*>(t->seqlens_q->data)[0], 0), 1);
  }
  if (Is(Fault::kWritesBefore) && t->dq) View(t->dq).Write(-1, 1);
  if (Is(Fault::kWritesGap)) View(t->out).Write(c.heads * c.dim_v, 1);
  if (Is(Fault::kWritesInput)) View(t->k).Write(0, 1);
  if (Is(Fault::kWritesWorkspace)) static_cast<char*>(workspace)[behaviour.workspace_bytes] = 1;
}

// What the results are multiplied with: 1, unless the kernel is to be wrong.
double Factor() {
  if (Is(Fault::kDrifts)) return 1 + 4e-3 * (calls % 7);
  return 1;
}

cppool_status Forward(void* opaque, const cppool_attention_tensors* t, void* workspace, cppool_stream,
                      char* why, std::size_t size) {
  const InEach in_each;
  const Plan& plan = *static_cast<Plan*>(opaque);
  const cppool_attention_call& c = plan.call;
  ++calls;
  if (Is(Fault::kThrows)) throw std::runtime_error("out of ideas");
  if (Is(Fault::kFails)) {
    std::snprintf(why, size, "cannot today");
    return CPPOOL_CUDA;
  }
  const View v(t->v), out(t->out), lse(t->lse);
  const std::vector<double> k = KeysOf(View(t->k));
  std::vector<double> logits;
  const double factor = Factor();
  double most = -std::numeric_limits<double>::infinity();  // of all rows
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const Sequence s(plan, *t, b);
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t kv = h / (c.heads / c.kv_heads);
      for (std::int64_t i = 0; i < s.queries; ++i) {
        const RowOfLogits row = Logits(plan, *t, s, k, h, i, logits);
        const double off = Is(Fault::kLseOfPayloads) ? 1 + 0x1p-12 : 1;
        lse.Write(lse.At(s.entry, h, s.q + i), row.lse * off / plan.Base());
        most = std::max(most, row.most);
        if (t->max_logit) {
          const View to(t->max_logit);
          to.Write(to.At(s.entry, h, s.q + i), Is(Fault::kKeepsMaximum) ? most : row.most);
        }
        for (std::int64_t d = 0; d < c.dim_v; ++d) {
          double sum = 0;
          for (std::int64_t j = 0; j < s.keys; ++j) {
            const double p = CastP(c, std::exp(logits[static_cast<std::size_t>(j)] - row.most));
            if (p != 0) sum += p * v.Read(v.At(s.entry, s.k + j, kv, d));
          }
          out.Write(out.At(s.entry, s.q + i, h, d), sum * std::exp(row.most - row.lse) * factor);
        }
      }
    }
  }
  if (Is(Fault::kKeepsWorkspace)) *static_cast<float*>(workspace) = 1;
  Misbehave(plan, t, workspace);
  return CPPOOL_OK;
}

cppool_status Backward(void* opaque, const cppool_attention_tensors* t, void* workspace, cppool_stream,
                       char* why, std::size_t size) {
  const InEach in_each;
  const Plan& plan = *static_cast<Plan*>(opaque);
  const cppool_attention_call& c = plan.call;
  ++calls;
  if (Is(Fault::kFailsBackward)) {
    std::snprintf(why, size, "cannot today");
    return CPPOOL_INTERNAL;
  }
  const View q(t->q), v(t->v), out(t->out), lse(t->lse), dout(t->dout), delta(t->delta), dq(t->dq), dk(t->dk),
      dv(t->dv);
  const std::vector<double> k = KeysOf(View(t->k));
  const std::int64_t group = c.heads / c.kv_heads;
  const double factor = Is(Fault::kKeepsWorkspace) ? *static_cast<float*>(workspace) : 1.0f;
  std::vector<double> logits;
  double amax_ds = 0;
  // The sums of dbias, packed; bias_at returns an element's index.
  std::vector<double> bias_sum;
  const auto bias_at = [&](std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    const std::int64_t* const shape = t->dbias->shape;
    return static_cast<std::size_t>(
        ((b % shape[0] * shape[1] + h % shape[1]) * shape[2] + i % shape[2]) * shape[3] + j);
  };
  if (t->dbias)
    bias_sum.resize(1 + bias_at(t->dbias->shape[0] - 1, t->dbias->shape[1] - 1, t->dbias->shape[2] - 1,
                                t->dbias->shape[3] - 1));
  for (std::int64_t b = 0; b < c.batch; ++b) {
    const Sequence s(plan, *t, b);
    for (std::int64_t kv = 0; kv < c.kv_heads; ++kv) {
      std::vector<double> dk_sum(static_cast<std::size_t>(s.keys * c.dim_qk)),
          dv_sum(static_cast<std::size_t>(s.keys * c.dim_v));
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        for (std::int64_t i = 0; i < s.queries; ++i) {
          const double here = Logits(plan, *t, s, k, h, i, logits).lse;
          const double row = Is(Fault::kOwnLse) ? here : lse.Read(lse.At(s.entry, h, s.q + i)) * plan.Base();
          double own_delta = 0;
          for (std::int64_t d = 0; d < c.dim_v; ++d)
            own_delta +=
                out.Read(out.At(s.entry, s.q + i, h, d)) * dout.Read(dout.At(s.entry, s.q + i, h, d));
          const double given = delta.Read(delta.At(s.entry, h, s.q + i));
          // Both must be there and agree, but for the rounding of fp32; in a case with fp8 `out` is rounded
          // once more.
          const bool fp8 = (plan.features & CPPOOL_ATTENTION_FP8) != 0;
          if (!(std::abs(own_delta - given) <= (fp8 ? 0.1 : 1e-3) * (1 + std::abs(given)))) {
            std::snprintf(why, size, "delta %g is not dot(out, dout), %g", given, own_delta);
            return CPPOOL_INTERNAL;
          }
          if (fp8) own_delta = given;
          std::vector<double> dq_sum(static_cast<std::size_t>(c.dim_qk));
          for (std::int64_t j = 0; j < s.keys; ++j) {
            const double p = std::exp(logits[static_cast<std::size_t>(j)] - row);
            if (p == 0) continue;
            double dp = 0;
            for (std::int64_t d = 0; d < c.dim_v; ++d) {
              const double g = dout.Read(dout.At(s.entry, s.q + i, h, d));
              dp += g * v.Read(v.At(s.entry, s.k + j, kv, d));
              dv_sum[static_cast<std::size_t>(j * c.dim_v + d)] += CastP(c, p) * g;
            }
            double ds = p * (dp - own_delta);
            if (t->dbias) bias_sum[bias_at(b, h, i, j)] += ds;
            amax_ds = std::max(amax_ds, std::abs(ds));
            ds = CastDs(*t, ds);
            const double* key = k.data() + KeyAt(plan, *t, s, j, kv);
            for (std::int64_t d = 0; d < c.dim_qk; ++d) {
              dq_sum[static_cast<std::size_t>(d)] += c.scale * ds * key[d];
              dk_sum[static_cast<std::size_t>(j * c.dim_qk + d)] +=
                  c.scale * ds * q.Read(q.At(s.entry, s.q + i, h, d));
            }
          }
          for (std::int64_t d = 0; d < c.dim_qk; ++d)
            dq.Write(dq.At(s.entry, s.q + i, h, d), dq_sum[static_cast<std::size_t>(d)] * factor);
        }
      }
      for (std::int64_t j = 0; j < s.keys; ++j) {
        for (std::int64_t d = 0; d < c.dim_qk; ++d)
          dk.Write(dk.At(s.entry, s.k + j, kv, d), dk_sum[static_cast<std::size_t>(j * c.dim_qk + d)]);
        for (std::int64_t d = 0; d < c.dim_v; ++d)
          dv.Write(dv.At(s.entry, s.k + j, kv, d), dv_sum[static_cast<std::size_t>(j * c.dim_v + d)]);
      }
    }
  }
  if (t->amax_ds) *static_cast<float*>(t->amax_ds->data) = static_cast<float>(amax_ds);
  if (t->dbias) {
    const View dbias(t->dbias);
    const std::int64_t* const shape = t->dbias->shape;
    for (std::int64_t b = 0; b < shape[0]; ++b)
      for (std::int64_t h = 0; h < shape[1]; ++h)
        for (std::int64_t i = 0; i < shape[2]; ++i)
          for (std::int64_t j = 0; j < shape[3]; ++j)
            dbias.Write(dbias.At(b, h, i, j), bias_sum[bias_at(b, h, i, j)]);
  }
  Misbehave(plan, t, workspace);
  return CPPOOL_OK;
}

void Destroy(void* plan) {
  const InEach in_each;
  delete static_cast<Plan*>(plan);
}

}  // namespace

const cppool_attention_kernel& TestKernel(std::uint32_t features, Behaviour wanted, bool backward) {
  behaviour = std::move(wanted);
  calls = 0;
  table = {CPPOOL_ATTENTION_ABI,
           sizeof(table),
           "planted",
           "1",
           "host",
           features,
           &Supports,
           &Prepare,
           &Forward,
           backward ? &Backward : nullptr,
           &Destroy};
  return table;
}

int TestKernelCalls() { return calls; }

}  // namespace cppool::test
