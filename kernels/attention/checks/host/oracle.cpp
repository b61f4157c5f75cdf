// Attention and its gradients in fp64 by the textbook formulas, one query row at a time. k and v are kept in both row and column
// order, so that all loops access contiguous memory and are vectorized.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/numerics/half.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels {
namespace {

// y[0, n) += factor * x[0, n)
void AddScaled(double factor, const double* x, double* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

void LoadValues(Dtype dtype, const void* data, std::int64_t begin, std::int64_t count, double* to) {
  DispatchAnyDtype(dtype, [&](auto type) {
    const auto* from = static_cast<const typename decltype(type)::Bits*>(data) + begin;
    for (std::int64_t i = 0; i < count; ++i) to[i] = decltype(type)::ToFloat(from[i]);
  });
}

void LoadRow(const TensorRef& tensor, std::int64_t row, int heads, int head, int dim, double* to) {
  LoadValues(tensor.dtype, tensor.data, (row * heads + head) * dim, dim, to);
}

class RowOracle {
 public:
  explicit RowOracle(const OracleArgs& args)
      : args_(args),
        mask_{args.mask, args.window_left, args.window_right, args.seqlen_q, args.seqlen_kv},
        n_(args.seqlen_kv),
        k_(n_ * args.dim_qk),
        v_(n_ * args.dim_v),
        k_columns_(k_.size()),
        v_columns_(args.dout.data ? v_.size() : 0),
        q_(args.dim_qk),
        dout_(args.dim_v),
        out_(args.dim_v),
        dq_(args.dim_qk),
        p_(n_),
        bias_(args.bias.data ? n_ : 0),
        ds_(args.dout.data ? n_ : 0) {
    for (std::int64_t j = 0; j < n_; ++j) {
      const std::int64_t row = args.kv_row + j * args.kv_step;
      LoadRow(args.k, row, args.kv_heads, args.kv_head, args.dim_qk, &k_[j * args.dim_qk]);
      LoadRow(args.v, row, args.kv_heads, args.kv_head, args.dim_v, &v_[j * args.dim_v]);
      for (int d = 0; d < args.dim_qk; ++d) k_columns_[d * n_ + j] = k_[j * args.dim_qk + d];
      for (int d = 0; d < args.dim_v && args.dout.data; ++d) v_columns_[d * n_ + j] = v_[j * args.dim_v + d];
    }
    if (args.dk) std::fill_n(args.dk, n_ * args.dim_qk, 0.0);
    if (args.dv) std::fill_n(args.dv, n_ * args.dim_v, 0.0);
  }

  void Run() {
    for (int h = 0; h < args_.group; ++h) {
      for (std::int64_t i = 0; i < args_.seqlen_q; ++i) {
        Forward(i, h);
        if (args_.dout.data) Backward(i, h);
      }
    }
    if (args_.rounded && args_.dk) RoundAll(args_.dk, n_ * args_.dim_qk);
    if (args_.rounded && args_.dv) RoundAll(args_.dv, n_ * args_.dim_v);
  }

 private:
  void RoundAll(double* values, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) values[i] = RoundTo(args_.stored, values[i]);
  }

  // Adds the bias to the scaled logits p of the row's keys.
  void AddBias(std::int64_t i, int h, std::int64_t begin, std::int64_t count, double* p) {
    if (!args_.bias.data && !args_.alibi_slopes) return;
    if (args_.bias.data) {
      LoadValues(args_.bias.dtype, args_.bias.data,
                 h * args_.bias_head_step + i * args_.bias_query_step + begin, count, bias_.data());
      AddScaled(1, bias_.data(), p, count);
    }
    if (args_.alibi_slopes) {
      const double slope = args_.alibi_slopes[h];
      for (std::int64_t j = 0; j < count; ++j) p[j] -= slope * mask_.Distance(i, begin + j);
    }
    if (args_.rounded) RoundAll(p, count);
  }

  // Computes the row's probabilities into p_[keys_.begin, keys_.end), and the probability of the offset into p_offset_.
  void Forward(std::int64_t i, int h) {
    const std::int64_t row = args_.q_row + i * args_.q_step;
    LoadRow(args_.q, row, args_.heads, args_.head_begin + h, args_.dim_qk, q_.data());
    keys_ = mask_.Keys(i);
    const std::int64_t begin = keys_.begin;
    const std::int64_t count = keys_.end - keys_.begin;
    double* p = p_.data() + begin;
    std::fill_n(p, count, 0.0);
    for (int d = 0; d < args_.dim_qk; ++d) AddScaled(q_[d], k_columns_.data() + d * n_ + begin, p, count);
    for (std::int64_t j = 0; j < count; ++j) p[j] *= args_.scale;
    if (args_.rounded) RoundAll(p, count);
    AddBias(i, h, begin, count, p);

    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    double sum = 0;
    double largest = -kInfinity;
    for (std::int64_t j = 0; j < count; ++j) largest = std::max(largest, p[j]);
    if (args_.max_logit) args_.max_logit[h] = std::max(args_.max_logit[h], largest);
    // A bias of -inf masks a key; if all keys are masked, `largest` is -inf and the sum is 0.
    const double shift = largest == -kInfinity ? 0 : largest;
    for (std::int64_t j = 0; j < count; ++j) {
      p[j] = std::exp(p[j] - shift);
      sum += p[j];
    }
    const double lse = largest + std::log(sum);  // -inf if the row sees no key
    // With a softmax offset the probabilities of the keys sum to exp(lse) / (exp(lse) + exp(offset)).
    double keys_share = 1;
    p_offset_ = 0;
    if (args_.softmax_offset) {
      keys_share = 1 / (1 + std::exp(args_.softmax_offset[h] - lse));
      p_offset_ = 1 / (1 + std::exp(lse - args_.softmax_offset[h]));
    }
    for (std::int64_t j = 0; j < count && sum > 0; ++j) p[j] = p[j] / sum * keys_share;
    if (args_.rounded) {
      RoundAll(p, count);
      RoundAll(&p_offset_, 1);
    }
    if (args_.lse) args_.lse[i * args_.group + h] = lse;
    if (!args_.out) return;
    std::fill(out_.begin(), out_.end(), 0.0);
    for (std::int64_t j = 0; j < count; ++j)
      AddScaled(p[j], &v_[(begin + j) * args_.dim_v], out_.data(), args_.dim_v);
    if (args_.rounded) RoundAll(out_.data(), args_.dim_v);
    std::copy(out_.begin(), out_.end(), args_.out + (i * args_.group + h) * args_.dim_v);
  }

  // The gradient of the softmax is dS = P * (dP - sum(P * dP)). The offset acts like one more key whose value is 0, so its dP is 0.
  void Backward(std::int64_t i, int h) {
    const std::int64_t row = args_.q_row + i * args_.q_step;
    LoadRow(args_.dout, row, args_.heads, args_.head_begin + h, args_.dim_v, dout_.data());
    const std::int64_t begin = keys_.begin;
    const std::int64_t count = keys_.end - keys_.begin;
    const double* p = p_.data() + begin;
    double* ds = ds_.data() + begin;
    std::fill_n(ds, count, 0.0);
    for (int d = 0; d < args_.dim_v; ++d) AddScaled(dout_[d], v_columns_.data() + d * n_ + begin, ds, count);
    if (args_.rounded) RoundAll(ds, count);
    double sum = 0;
    for (std::int64_t j = 0; j < count; ++j) sum += p[j] * ds[j];
    for (std::int64_t j = 0; j < count; ++j) ds[j] = p[j] * (ds[j] - sum);
    double ds_offset = p_offset_ * (0 - sum);
    if (args_.rounded) {
      RoundAll(ds, count);
      RoundAll(&ds_offset, 1);
    }
    if (args_.d_softmax_offset) args_.d_softmax_offset[h] += ds_offset;
    if (args_.dbias) {
      AddScaled(1, ds, args_.dbias + h * args_.dbias_head_step + i * args_.dbias_query_step + begin, count);
    }

    if (args_.dv) {
      for (std::int64_t j = 0; j < count; ++j)
        AddScaled(p[j], dout_.data(), args_.dv + (begin + j) * args_.dim_v, args_.dim_v);
    }
    if (args_.dk) {
      for (std::int64_t j = 0; j < count; ++j) {
        AddScaled(args_.scale * ds[j], q_.data(), args_.dk + (begin + j) * args_.dim_qk, args_.dim_qk);
      }
    }
    if (!args_.dq) return;
    std::fill(dq_.begin(), dq_.end(), 0.0);
    for (std::int64_t j = 0; j < count; ++j) {
      AddScaled(args_.scale * ds[j], &k_[(begin + j) * args_.dim_qk], dq_.data(), args_.dim_qk);
    }
    if (args_.rounded) RoundAll(dq_.data(), args_.dim_qk);
    std::copy(dq_.begin(), dq_.end(), args_.dq + (i * args_.group + h) * args_.dim_qk);
  }

  const OracleArgs& args_;
  const OracleMask mask_;
  const std::int64_t n_;
  std::vector<double> k_, v_;                  // [seqlen_kv, dim]
  std::vector<double> k_columns_, v_columns_;  // [dim, seqlen_kv]
  std::vector<double> q_, dout_, out_, dq_;    // one row: [dim]
  std::vector<double> p_, bias_, ds_;          // one row: [seqlen_kv]
  double p_offset_ = 0;
  KeyRange keys_{0, 0};
};

}  // namespace

std::size_t HostOracleWorkspace(const OracleShape& shape) {
  const std::int64_t columns = 2 * (shape.dim_qk + shape.dim_v) + 3;
  return static_cast<std::size_t>(shape.seqlen_kv * columns + 2 * (shape.dim_qk + shape.dim_v)) *
         sizeof(double);
}

void HostOracle(const OracleArgs& args) { RowOracle(args).Run(); }

}  // namespace cppool::kernels
