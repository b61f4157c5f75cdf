// Attention and its gradients in fp64 by the textbook formulas, one query row at a time. k and v are kept in
// both row and column order, so that all loops access contiguous memory and are vectorized.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/numerics/fp8.h"
#include "kernels/numerics/half.h"
#include "kernels/numerics/rounding.h"

namespace cppool::kernels {
namespace {

// y[0, n) += factor * x[0, n)
void AddScaled(double factor, const double* x, double* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

void LoadValues(Dtype dtype, const void* data, std::int64_t begin, std::int64_t count, double* to) {
  const auto load = [&](auto type) {
    const auto* from = static_cast<const typename decltype(type)::Bits*>(data) + begin;
    for (std::int64_t i = 0; i < count; ++i) to[i] = decltype(type)::ToFloat(from[i]);
  };
  if (IsFp8(dtype)) {
    DispatchFp8(dtype, load);
  } else {
    DispatchAnyDtype(dtype, load);
  }
}

void LoadRow(const TensorRef& tensor, std::int64_t row, int heads, int head, int dim, double* to) {
  LoadValues(tensor.dtype, tensor.data, (row * heads + head) * dim, dim, to);
  if (!tensor.scale) return;
  for (int d = 0; d < dim; ++d) to[d] *= *tensor.scale;
}

double Norm(const double* x, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return std::sqrt(sum);
}

// Half a unit in the last place of a normal value, relative, and of the subnormals.
constexpr double kE4M3Relative = 0x1p-4, kE4M3Smallest = 0x1p-10;
constexpr double kE5M2Relative = 0x1p-3, kE5M2Smallest = 0x1p-17;
constexpr double kFp32Slack = 0x1p-18;  // sums and exp in fp32

double Cast(Dtype format, double value, double scale) { return RoundTo(format, value * scale) / scale; }

// E4M3 in blocks of 32 positions, `step` apart, with the smallest power of two that they fit with.
void CastBlocks(std::int64_t begin, std::int64_t count, std::int64_t step, double* values) {
  for (std::int64_t i = 0, end = 0; i < count; i = end) {
    double most = 0;
    for (end = i; end < count && (end == i || (begin + end) % kMxBlock != 0); ++end)
      most = std::max(most, std::abs(values[end * step]));
    if (most == 0) continue;
    const double power = std::exp2(std::ceil(std::log2(most / kE4M3Max)));
    for (std::int64_t j = i; j < end; ++j) values[j * step] = Cast(Dtype::kE4M3, values[j * step], 1 / power);
  }
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
        ds_(args.dout.data ? n_ : 0),
        fp8_(args.fp8 ? &*args.fp8 : nullptr),
        rounded_16_(args.rounded && !(fp8_ && fp8_->p_scale != 0)),
        casts_(args.rounded && fp8_ && fp8_->p_scale != 0),
        weights_(fp8_ ? n_ : 0) {
    if (fp8_ && args.dout.data) PrepareFp8();
    for (std::int64_t j = 0; j < n_; ++j) {
      const std::int64_t row = args.kv_row + j * args.kv_step;
      LoadRow(args.k, row, args.kv_heads, args.kv_head, args.dim_qk, &k_[j * args.dim_qk]);
      LoadRow(args.v, row, args.kv_heads, args.kv_head, args.dim_v, &v_[j * args.dim_v]);
      for (int d = 0; d < args.dim_qk; ++d) k_columns_[d * n_ + j] = k_[j * args.dim_qk + d];
      for (int d = 0; d < args.dim_v && args.dout.data; ++d) v_columns_[d * n_ + j] = v_[j * args.dim_v + d];
    }
    if (args.dk) std::fill_n(args.dk, n_ * args.dim_qk, 0.0);
    if (args.dv) std::fill_n(args.dv, n_ * args.dim_v, 0.0);
    // Without queries, too, where there is no dout.
    if (fp8_ && fp8_->dk_bound) std::fill_n(fp8_->dk_bound, n_ * args.dim_qk, 0.0);
    if (fp8_ && fp8_->dv_bound) std::fill_n(fp8_->dv_bound, n_ * args.dim_v, 0.0);
    for (std::int64_t j = 0; j < n_ && !v_norms_.empty(); ++j)
      v_norms_[j] = Norm(&v_[j * args.dim_v], args.dim_v);
  }

  void Run() {
    for (int h = 0; h < args_.group; ++h) {
      for (std::int64_t i = 0; i < args_.seqlen_q; ++i) {
        Forward(i, h);
        if (args_.dout.data) Backward(i, h);
      }
      if (casts_ && fp8_->ds_blocks) FlushBlock();
    }
    if (args_.dk) FinishGradient(args_.dk, n_ * args_.dim_qk);
    if (args_.dv) FinishGradient(args_.dv, n_ * args_.dim_v);
    if (fp8_) FinishBounds();
  }

 private:
  void RoundAll(double* values, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) values[i] = RoundTo(args_.stored, values[i]);
  }

  // A result of a plain attention, as it is stored.
  void Store(Dtype format, double scale, double* values, std::int64_t count) const {
    if (!args_.rounded) return;
    RoundAll(values, count);
    if (scale == 0) return;
    for (std::int64_t i = 0; i < count; ++i) values[i] = Cast(format, values[i], scale);
    RoundAll(values, count);
  }
  void FinishGradient(double* values, std::int64_t count) const {
    Store(Dtype::kE5M2, fp8_ ? fp8_->gradient_scale : 0, values, count);
  }

  void PrepareFp8() {
    const auto load_keys = [&](const TensorRef& tensor, std::vector<double>& to) {
      to.resize(k_.size());
      for (std::int64_t j = 0; j < n_; ++j)
        LoadRow(tensor, args_.kv_row + j * args_.kv_step, args_.kv_heads, args_.kv_head, args_.dim_qk,
                &to[j * args_.dim_qk]);
    };
    if (fp8_->k_of_dq.data) load_keys(fp8_->k_of_dq, k_of_dq_);
    q_of_dk_.resize(q_.size());
    dout_of_dv_.resize(dout_.size());
    if (casts_ && fp8_->ds_blocks) {
      block_ds_.resize(kMxBlock * n_);
      block_q_.resize(kMxBlock * q_.size());
    }
    if (fp8_->dq_bound || fp8_->dk_bound) v_norms_.resize(n_);
    if (fp8_->dk_bound) {
      largest_ds_.resize(n_);
      sum_q_.resize(k_.size());
    }
  }

  // What is added to a bound by the rounding of the result, and by its cast if it has a scale.
  void FinishBound(const double* values, std::int64_t count, double relative, double smallest, double scale,
                   double* bound) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const double size = std::abs(values[i]);
      bound[i] += 0x1p-7 * (size + bound[i]);  // bf16, twice
      if (scale != 0) bound[i] += relative * (size + bound[i]) + smallest / scale;
      if (size > 0 || bound[i] > 0) bound[i] += 1e-30;  // below bf16's normal values
    }
  }
  void FinishBounds() {
    if (fp8_->dk_bound) {
      for (std::int64_t j = 0; j < n_ && fp8_->ds_blocks; ++j) {
        const double underflow = kE4M3Smallest * 2 / kE4M3Max * largest_ds_[j];
        for (int d = 0; d < args_.dim_qk; ++d)
          fp8_->dk_bound[j * args_.dim_qk + d] += args_.scale * underflow * sum_q_[j * args_.dim_qk + d];
      }
      FinishBound(args_.dk, n_ * args_.dim_qk, kE5M2Relative, kE5M2Smallest, fp8_->gradient_scale,
                  fp8_->dk_bound);
    }
    if (fp8_->dv_bound)
      FinishBound(args_.dv, n_ * args_.dim_v, kE5M2Relative, kE5M2Smallest, fp8_->gradient_scale,
                  fp8_->dv_bound);
  }

  // The cast of P, and the sums of |v| that it may move out by.
  void BoundOut(const double* p, std::int64_t begin, std::int64_t count, double underflow,
                double* bound) const {
    std::fill_n(bound, args_.dim_v, 0.0);
    for (std::int64_t j = 0; j < count; ++j) {
      const double most = (kE4M3Relative + kFp32Slack) * p[j] + underflow;
      for (int d = 0; d < args_.dim_v; ++d) bound[d] += most * std::abs(v_[(begin + j) * args_.dim_v + d]);
    }
    FinishBound(out_.data(), args_.dim_v, kE4M3Relative, kE4M3Smallest, fp8_->out_scale, bound);
  }

  // Adds the bounds of a row's dS, before it is cast, to those of its gradients.
  void BoundGradients(std::int64_t i, int h, std::int64_t begin, std::int64_t count, double delta) {
    const double* p = p_.data() + begin;
    const double* ds = ds_.data() + begin;
    const double relative = fp8_->ds_blocks ? kE4M3Relative : kE5M2Relative;
    const double dout_norm = Norm(dout_.data(), args_.dim_v);
    double largest = 0;
    for (std::int64_t j = 0; j < count; ++j) largest = std::max(largest, std::abs(ds[j]));
    const double smallest =
        fp8_->ds_blocks ? kE4M3Smallest * 2 / kE4M3Max * largest : kE5M2Smallest / fp8_->ds_scale;
    double* dq = fp8_->dq_bound ? fp8_->dq_bound + (i * args_.group + h) * args_.dim_qk : nullptr;
    if (dq) std::fill_n(dq, args_.dim_qk, 0.0);
    const double* k = k_of_dq_.empty() ? k_.data() : k_of_dq_.data();
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t key = begin + j;
      const double cast =
          relative * std::abs(ds[j]) + kFp32Slack * p[j] * (dout_norm * v_norms_[key] + std::abs(delta));
      for (int d = 0; dq && d < args_.dim_qk; ++d)
        dq[d] += args_.scale * (cast + smallest) * std::abs(k[key * args_.dim_qk + d]);
      if (fp8_->dk_bound) {
        const double most = cast + (fp8_->ds_blocks ? 0 : smallest);
        largest_ds_[key] = std::max(largest_ds_[key], std::abs(ds[j]));
        for (int d = 0; d < args_.dim_qk; ++d) {
          const double size = std::abs(q_of_dk_[d]);
          fp8_->dk_bound[key * args_.dim_qk + d] += args_.scale * most * size;
          sum_q_[key * args_.dim_qk + d] += size;
        }
      }
      if (fp8_->dv_bound) {
        const double most = (kE4M3Relative + kFp32Slack) * p[j] + kE4M3Smallest / fp8_->p_scale;
        for (int d = 0; d < args_.dim_v; ++d)
          fp8_->dv_bound[key * args_.dim_v + d] += most * std::abs(dout_of_dv_[d]);
      }
    }
  }

  // dk of the rows since the last call: dS cast in blocks along them.
  void FlushBlock() {
    if (block_rows_ == 0) return;
    for (std::int64_t j = 0; j < n_; ++j) {
      CastBlocks(0, block_rows_, n_, &block_ds_[j]);
      for (std::int64_t i = 0; i < block_rows_ && args_.dk; ++i) {
        AddScaled(args_.scale * block_ds_[i * n_ + j], &block_q_[i * args_.dim_qk],
                  args_.dk + j * args_.dim_qk, args_.dim_qk);
      }
    }
    block_rows_ = 0;
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
    if (rounded_16_) RoundAll(p, count);
  }

  // Computes the row's probabilities into p_[keys_.begin, keys_.end), and the probability of the offset into
  // p_offset_.
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
    if (rounded_16_) RoundAll(p, count);
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
    double lse = largest + std::log(sum);  // -inf if the row sees no key
    if (fp8_ && fp8_->lse && sum > 0) {
      double& shift_of_lse = fp8_->lse_shift[i * args_.group + h];
      if (!args_.rounded) shift_of_lse = fp8_->lse[i * args_.group + h] - lse;
      lse += shift_of_lse;
      sum = std::exp(lse - shift);
    }
    // With a softmax offset the probabilities of the keys sum to exp(lse) / (exp(lse) + exp(offset)).
    double keys_share = 1;
    p_offset_ = 0;
    if (args_.softmax_offset) {
      keys_share = 1 / (1 + std::exp(args_.softmax_offset[h] - lse));
      p_offset_ = 1 / (1 + std::exp(lse - args_.softmax_offset[h]));
    }
    if (casts_ && sum > 0) {
      for (std::int64_t j = 0; j < count; ++j)
        weights_[j] = Cast(Dtype::kE4M3, p[j], fp8_->p_scale) / sum * keys_share;
    }
    for (std::int64_t j = 0; j < count && sum > 0; ++j) p[j] = p[j] / sum * keys_share;
    if (rounded_16_) {
      RoundAll(p, count);
      RoundAll(&p_offset_, 1);
    }
    if (args_.lse) args_.lse[i * args_.group + h] = lse;
    if (!args_.out) return;
    std::fill(out_.begin(), out_.end(), 0.0);
    const double* weights = casts_ && sum > 0 ? weights_.data() : p;
    for (std::int64_t j = 0; j < count; ++j)
      AddScaled(weights[j], &v_[(begin + j) * args_.dim_v], out_.data(), args_.dim_v);
    if (fp8_ && fp8_->out_bound) {
      BoundOut(p, begin, count, sum > 0 ? kE4M3Smallest / fp8_->p_scale / sum * keys_share : 0,
               fp8_->out_bound + (i * args_.group + h) * args_.dim_v);
    }
    Store(Dtype::kE4M3, fp8_ ? fp8_->out_scale : 0, out_.data(), args_.dim_v);
    std::copy(out_.begin(), out_.end(), args_.out + (i * args_.group + h) * args_.dim_v);
  }

  // The gradient of the softmax is dS = P * (dP - sum(P * dP)). The offset acts like one more key whose value
  // is 0, so its dP is 0.
  void Backward(std::int64_t i, int h) {
    const std::int64_t row = args_.q_row + i * args_.q_step;
    LoadRow(args_.dout, row, args_.heads, args_.head_begin + h, args_.dim_v, dout_.data());
    const std::int64_t begin = keys_.begin;
    const std::int64_t count = keys_.end - keys_.begin;
    const double* p = p_.data() + begin;
    double* ds = ds_.data() + begin;
    std::fill_n(ds, count, 0.0);
    for (int d = 0; d < args_.dim_v; ++d) AddScaled(dout_[d], v_columns_.data() + d * n_ + begin, ds, count);
    if (rounded_16_) RoundAll(ds, count);
    double sum = 0;
    for (std::int64_t j = 0; j < count; ++j) sum += p[j] * ds[j];
    if (fp8_ && fp8_->delta) sum = fp8_->delta[row * args_.heads + args_.head_begin + h];
    for (std::int64_t j = 0; j < count; ++j) ds[j] = p[j] * (ds[j] - sum);
    double ds_offset = p_offset_ * (0 - sum);
    if (rounded_16_) {
      RoundAll(ds, count);
      RoundAll(&ds_offset, 1);
    }
    if (args_.d_softmax_offset) args_.d_softmax_offset[h] += ds_offset;
    if (args_.dbias) {
      AddScaled(1, ds, args_.dbias + h * args_.dbias_head_step + i * args_.dbias_query_step + begin, count);
    }

    const double* q = q_.data();
    const double* k = k_.data();
    const double* dout = dout_.data();
    bool dk_later = false;
    if (fp8_) {
      const auto load = [&](const TensorRef& other, const std::vector<double>& same, int dim,
                            std::vector<double>& to) {
        if (other.data) {
          LoadRow(other, row, args_.heads, args_.head_begin + h, dim, to.data());
        } else {
          to = same;
        }
        return to.data();
      };
      q = load(fp8_->q_of_dk, q_, args_.dim_qk, q_of_dk_);
      dout = load(fp8_->dout_of_dv, dout_, args_.dim_v, dout_of_dv_);
      if (!k_of_dq_.empty()) k = k_of_dq_.data();
      if (fp8_->dq_bound || fp8_->dk_bound || fp8_->dv_bound) BoundGradients(i, h, begin, count, sum);
      if (casts_) {
        p = CastGradients(i, begin, count);
        dk_later = fp8_->ds_blocks;
      }
    }
    if (args_.dv) {
      for (std::int64_t j = 0; j < count; ++j)
        AddScaled(p[j], dout, args_.dv + (begin + j) * args_.dim_v, args_.dim_v);
    }
    if (args_.dk && !dk_later) {
      for (std::int64_t j = 0; j < count; ++j) {
        AddScaled(args_.scale * ds[j], q, args_.dk + (begin + j) * args_.dim_qk, args_.dim_qk);
      }
    }
    if (!args_.dq) return;
    std::fill(dq_.begin(), dq_.end(), 0.0);
    for (std::int64_t j = 0; j < count; ++j) {
      AddScaled(args_.scale * ds[j], k + (begin + j) * args_.dim_qk, dq_.data(), args_.dim_qk);
    }
    if (fp8_ && fp8_->dq_bound) {
      FinishBound(dq_.data(), args_.dim_qk, kE5M2Relative, kE5M2Smallest, fp8_->gradient_scale,
                  fp8_->dq_bound + (i * args_.group + h) * args_.dim_qk);
    }
    FinishGradient(dq_.data(), args_.dim_qk);
    std::copy(dq_.begin(), dq_.end(), args_.dq + (i * args_.group + h) * args_.dim_qk);
  }

  // Casts the row's dS as dq gets it, keeps it for dk where its blocks lie along the queries, and returns P
  // as dv gets it.
  const double* CastGradients(std::int64_t i, std::int64_t begin, std::int64_t count) {
    double* ds = ds_.data() + begin;
    for (std::int64_t j = 0; j < count; ++j) weights_[j] = Cast(Dtype::kE4M3, p_[begin + j], fp8_->p_scale);
    if (fp8_->ds_blocks) {
      if (i % kMxBlock == 0) FlushBlock();
      std::fill_n(&block_ds_[block_rows_ * n_], n_, 0.0);
      std::copy_n(ds, count, &block_ds_[block_rows_ * n_ + begin]);
      std::copy(q_of_dk_.begin(), q_of_dk_.end(), &block_q_[block_rows_ * args_.dim_qk]);
      ++block_rows_;
      CastBlocks(begin, count, 1, ds);
    } else if (fp8_->ds_scale != 0) {
      for (std::int64_t j = 0; j < count; ++j) ds[j] = Cast(Dtype::kE5M2, ds[j], fp8_->ds_scale);
    }
    return weights_.data();
  }

  const OracleArgs& args_;
  const OracleMask mask_;
  const std::int64_t n_;
  std::vector<double> k_, v_;                  // [seqlen_kv, dim]
  std::vector<double> k_columns_, v_columns_;  // [dim, seqlen_kv]
  std::vector<double> q_, dout_, out_, dq_;    // one row: [dim]
  std::vector<double> p_, bias_, ds_;          // one row: [seqlen_kv]
  const OracleFp8* fp8_;
  const bool rounded_16_;        // plain attention in a 16-bit dtype
  const bool casts_;             // plain attention in fp8
  std::vector<double> weights_;  // P after its cast
  std::vector<double> k_of_dq_, q_of_dk_, dout_of_dv_;
  std::vector<double> v_norms_, largest_ds_, sum_q_;  // for bounds
  std::vector<double> block_ds_, block_q_;            // rows whose dS waits for the end of its block
  std::int64_t block_rows_ = 0;
  double p_offset_ = 0;
  KeyRange keys_{0, 0};
};

}  // namespace

void HostOracle(const OracleArgs& args) { RowOracle(args).Run(); }

}  // namespace cppool::kernels
