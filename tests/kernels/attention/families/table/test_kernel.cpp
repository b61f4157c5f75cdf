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

namespace cppool::test {
namespace {

using Fault = Behaviour::Fault;

Behaviour behaviour;
cppool_attention_kernel table;
std::atomic<int> calls{0};

bool Is(Fault fault) { return behaviour.fault == fault; }

// Elements of one tensor by index, whatever its dtype.
class View {
 public:
  explicit View(const cppool_tensor* tensor) : t_(*tensor) {}
  std::int64_t At(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d = 0) const {
    return a * t_.strides[0] + b * t_.strides[1] + c * t_.strides[2] + (t_.ndim > 3 ? d * t_.strides[3] : 0);
  }
  double Read(std::int64_t at) const {
    if (t_.bits == 32) return static_cast<const float*>(t_.data)[at];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(t_.data)[at];
    return t_.code == CPPOOL_DL_BFLOAT ? kernels::BF16ToFloat(bits) : kernels::FP16ToFloat(bits);
  }
  void Write(std::int64_t at, double value) const {
    if (t_.bits == 32) {
      static_cast<float*>(t_.data)[at] = static_cast<float>(value);
    } else {
      static_cast<std::uint16_t*>(t_.data)[at] =
          t_.code == CPPOOL_DL_BFLOAT ? kernels::DoubleToBF16(value) : kernels::DoubleToFP16(value);
    }
  }
  const cppool_tensor& tensor() const { return t_; }

 private:
  const cppool_tensor& t_;
};

struct Plan {
  cppool_attention_call call;
  std::uint32_t features;
  bool Sees(std::int64_t i, std::int64_t j) const {
    const std::int64_t diagonal =
        i + (call.anchor == CPPOOL_BOTTOM_RIGHT ? call.seqlen_kv - call.seqlen_q : 0);
    return (call.window_left < 0 || j >= diagonal - call.window_left) &&
           (call.window_right < 0 || j <= diagonal + call.window_right);
  }
  double Base() const { return features & CPPOOL_ATTENTION_LSE_BASE2 ? std::log(2.0) : 1; }
};

bool Readable(const cppool_tensor* tensor) {
  return (tensor->bits == 16 && (tensor->code == CPPOOL_DL_BFLOAT || tensor->code == CPPOOL_DL_FLOAT)) ||
         (tensor->bits == 32 && tensor->code == CPPOOL_DL_FLOAT);
}

cppool_status Supports(const cppool_attention_call* call, char* why, std::size_t size) {
  std::string reason;
  const cppool_attention_tensors& t = *call->tensors;
  if (!Readable(t.q) || !Readable(t.out)) reason = "no such dtype";
  if (t.out->bits == 32 && !(table.features & CPPOOL_ATTENTION_FP32_RESULTS)) reason = "no fp32 results";
  if ((table.features & CPPOOL_ATTENTION_LSE_HEADS_FIRST) && t.lse->strides[2] != 1)
    reason = "lse is not packed";
  if (reason.empty() && behaviour.refuse) reason = behaviour.refuse(*call);
  if (reason.empty()) return CPPOOL_OK;
  std::snprintf(why, size, "%s", reason.c_str());
  return CPPOOL_UNSUPPORTED;
}

cppool_status Prepare(const cppool_attention_call* call, void** plan, std::size_t* workspace_bytes, char* why,
                      std::size_t size) {
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

// k, or what it was when the address was first seen.
std::vector<double> KeysOf(const Plan& plan, const View& k) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, std::int64_t>, std::vector<double>> kept;
  const cppool_attention_call& c = plan.call;
  std::vector<double> keys;
  for (std::int64_t b = 0; b < c.batch; ++b)
    for (std::int64_t j = 0; j < c.seqlen_kv; ++j)
      for (std::int64_t h = 0; h < c.kv_heads; ++h)
        for (std::int64_t d = 0; d < c.dim_qk; ++d) {
          const bool packed = Is(Fault::kPacked);
          keys.push_back(
              k.Read(packed ? ((b * c.seqlen_kv + j) * c.kv_heads + h) * c.dim_qk + d : k.At(b, j, h, d)));
        }
  if (!Is(Fault::kKeepsInputs)) return keys;
  const std::lock_guard lock(mutex);
  return kept.emplace(std::pair(k.tensor().data, static_cast<std::int64_t>(keys.size())), keys).first->second;
}

// P of one query head's row, over all keys; not seen: 0. Returns the lse of these keys.
double Logits(const Plan& plan, const View& q, const std::vector<double>& k, std::int64_t b, std::int64_t h,
              std::int64_t i, std::vector<double>& logits) {
  const cppool_attention_call& c = plan.call;
  const std::int64_t kv = h / (c.heads / c.kv_heads);
  double most = -std::numeric_limits<double>::infinity();
  for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
    double& logit = logits[static_cast<std::size_t>(j)];
    logit = -std::numeric_limits<double>::infinity();
    if (!plan.Sees(i, j)) continue;
    double sum = 0;
    const double* key = k.data() + ((b * c.seqlen_kv + j) * c.kv_heads + kv) * c.dim_qk;
    for (std::int64_t d = 0; d < c.dim_qk; ++d) sum += q.Read(q.At(b, i, h, d)) * key[d];
    logit = c.scale * sum;
    most = std::max(most, logit);
  }
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - most);
  return most + std::log(sum);
}

// Writes where it must not, but only among the gaps of a trial: the memory of this process stays whole.
void Misbehave(const Plan& plan, const cppool_attention_tensors* t, void* workspace) {
  const cppool_attention_call& c = plan.call;
  if (t->q->strides[1] == c.heads * c.dim_qk) return;
  if (Is(Fault::kWritesBehind)) {
    const View out(t->out);
    out.Write(out.At(c.batch - 1, c.seqlen_q - 1, c.heads - 1, c.dim_v - 1) + 1, 1);
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
  const Plan& plan = *static_cast<Plan*>(opaque);
  const cppool_attention_call& c = plan.call;
  ++calls;
  if (Is(Fault::kThrows)) throw std::runtime_error("out of ideas");
  if (Is(Fault::kFails)) {
    std::snprintf(why, size, "cannot today");
    return CPPOOL_CUDA;
  }
  const View q(t->q), v(t->v), out(t->out), lse(t->lse);
  const std::vector<double> k = KeysOf(plan, View(t->k));
  std::vector<double> logits(static_cast<std::size_t>(c.seqlen_kv));
  const double factor = Factor();
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t h = 0; h < c.heads; ++h) {
      const std::int64_t kv = h / (c.heads / c.kv_heads);
      for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
        const double row = Logits(plan, q, k, b, h, i, logits);
        lse.Write(lse.At(b, h, i), row / plan.Base());
        for (std::int64_t d = 0; d < c.dim_v; ++d) {
          double sum = 0;
          for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
            const double p = std::exp(logits[static_cast<std::size_t>(j)] - row);
            if (p != 0) sum += p * v.Read(v.At(b, j, kv, d));
          }
          out.Write(out.At(b, i, h, d), sum * factor);
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
  const Plan& plan = *static_cast<Plan*>(opaque);
  const cppool_attention_call& c = plan.call;
  ++calls;
  if (Is(Fault::kFailsBackward)) {
    std::snprintf(why, size, "cannot today");
    return CPPOOL_INTERNAL;
  }
  const View q(t->q), v(t->v), out(t->out), lse(t->lse), dout(t->dout), delta(t->delta), dq(t->dq), dk(t->dk),
      dv(t->dv);
  const std::vector<double> k = KeysOf(plan, View(t->k));
  const std::int64_t group = c.heads / c.kv_heads;
  const double factor = Is(Fault::kKeepsWorkspace) ? *static_cast<float*>(workspace) : 1.0f;
  std::vector<double> logits(static_cast<std::size_t>(c.seqlen_kv));
  for (std::int64_t b = 0; b < c.batch; ++b) {
    for (std::int64_t kv = 0; kv < c.kv_heads; ++kv) {
      std::vector<double> dk_sum(static_cast<std::size_t>(c.seqlen_kv * c.dim_qk)),
          dv_sum(static_cast<std::size_t>(c.seqlen_kv * c.dim_v));
      for (std::int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
          const double here = Logits(plan, q, k, b, h, i, logits);
          const double row = Is(Fault::kOwnLse) ? here : lse.Read(lse.At(b, h, i)) * plan.Base();
          double own_delta = 0;
          for (std::int64_t d = 0; d < c.dim_v; ++d)
            own_delta += out.Read(out.At(b, i, h, d)) * dout.Read(dout.At(b, i, h, d));
          const double given = delta.Read(delta.At(b, h, i));
          // Both must be there and agree, but for the rounding of fp32.
          if (!(std::abs(own_delta - given) <= 1e-3 * (1 + std::abs(given)))) {
            std::snprintf(why, size, "delta %g is not dot(out, dout), %g", given, own_delta);
            return CPPOOL_INTERNAL;
          }
          std::vector<double> dq_sum(static_cast<std::size_t>(c.dim_qk));
          for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
            const double p = std::exp(logits[static_cast<std::size_t>(j)] - row);
            if (p == 0) continue;
            double dp = 0;
            for (std::int64_t d = 0; d < c.dim_v; ++d) {
              const double g = dout.Read(dout.At(b, i, h, d));
              dp += g * v.Read(v.At(b, j, kv, d));
              dv_sum[static_cast<std::size_t>(j * c.dim_v + d)] += p * g;
            }
            const double ds = c.scale * p * (dp - own_delta);
            for (std::int64_t d = 0; d < c.dim_qk; ++d) {
              dq_sum[static_cast<std::size_t>(d)] +=
                  ds * k[static_cast<std::size_t>(((b * c.seqlen_kv + j) * c.kv_heads + kv) * c.dim_qk + d)];
              dk_sum[static_cast<std::size_t>(j * c.dim_qk + d)] += ds * q.Read(q.At(b, i, h, d));
            }
          }
          for (std::int64_t d = 0; d < c.dim_qk; ++d)
            dq.Write(dq.At(b, i, h, d), dq_sum[static_cast<std::size_t>(d)] * factor);
        }
      }
      for (std::int64_t j = 0; j < c.seqlen_kv; ++j) {
        for (std::int64_t d = 0; d < c.dim_qk; ++d)
          dk.Write(dk.At(b, j, kv, d), dk_sum[static_cast<std::size_t>(j * c.dim_qk + d)]);
        for (std::int64_t d = 0; d < c.dim_v; ++d)
          dv.Write(dv.At(b, j, kv, d), dv_sum[static_cast<std::size_t>(j * c.dim_v + d)]);
      }
    }
  }
  Misbehave(plan, t, workspace);
  return CPPOOL_OK;
}

void Destroy(void* plan) { delete static_cast<Plan*>(plan); }

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
