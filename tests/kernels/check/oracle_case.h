// Cases for the oracle: inputs from the generator, and its outputs as vectors.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/check/check_rank.h"

namespace cppool::kernels::test {

struct OracleCase {
  std::int64_t seqlen_q = 5;
  std::int64_t seqlen_kv = 7;
  int group = 1;
  int dim_qk = 8;
  int dim_v = 8;
  AttnMaskType mask = AttnMaskType::kNoMask;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  Dtype dtype = Dtype::kBf16;
  bool rounded = false;
  // The sequence within larger tensors: `step` sequences interleaved (sbhd), this one the last; one more key/value head than this one
  // on either side.
  std::int64_t step = 1;
};

inline std::ostream& operator<<(std::ostream& out, const OracleCase& c) {
  return out << "q " << c.seqlen_q << " kv " << c.seqlen_kv << " group " << c.group << " dims " << c.dim_qk
             << "/" << c.dim_v << " mask " << static_cast<int>(c.mask) << " window " << c.window_left << ","
             << c.window_right << " dtype " << static_cast<int>(c.dtype) << " rounded " << c.rounded
             << " step " << c.step;
}

struct OracleResult {
  std::vector<double> out, lse, dq, dk, dv;
};

inline constexpr int kKvHeads = 3;
inline constexpr int kKvHead = 1;

struct OracleInputs {
  Layout query, key;
  Buffer q, k, v, dout;
};

inline OracleInputs MakeInputs(const CheckRank& rank, const OracleCase& c) {
  OracleInputs inputs;
  inputs.query = GlobalLayout(c.step > 1 ? QkvFormat::kSbhd : QkvFormat::kBshd, c.step, c.seqlen_q);
  inputs.key = GlobalLayout(c.step > 1 ? QkvFormat::kSbhd : QkvFormat::kBshd, c.step, c.seqlen_kv);
  const auto make = [&](InputTensor tensor, const Layout& layout, int heads, int dim) {
    Buffer buffer = rank.Poisoned(static_cast<std::size_t>(layout.rows) * heads * dim * SizeOf(c.dtype));
    rank.kernels().Generate(tensor, 99, layout, heads, dim, c.dtype, buffer.get(), rank.stream());
    return buffer;
  };
  inputs.q = make(InputTensor::kQ, inputs.query, kKvHeads * c.group, c.dim_qk);
  inputs.k = make(InputTensor::kK, inputs.key, kKvHeads, c.dim_qk);
  inputs.v = make(InputTensor::kV, inputs.key, kKvHeads, c.dim_v);
  inputs.dout = make(InputTensor::kDout, inputs.query, kKvHeads * c.group, c.dim_v);
  return inputs;
}

inline OracleArgs MakeArgs(const OracleCase& c, const OracleInputs& inputs) {
  OracleArgs args;
  args.q = inputs.q.get();
  args.k = inputs.k.get();
  args.v = inputs.v.get();
  args.dout = inputs.dout.get();
  args.dtype = c.dtype;
  args.q_row = args.kv_row = c.step - 1;
  args.q_step = args.kv_step = c.step;
  args.seqlen_q = c.seqlen_q;
  args.seqlen_kv = c.seqlen_kv;
  args.heads = kKvHeads * c.group;
  args.head_begin = kKvHead * c.group;
  args.group = c.group;
  args.kv_heads = kKvHeads;
  args.kv_head = kKvHead;
  args.dim_qk = c.dim_qk;
  args.dim_v = c.dim_v;
  args.scale = 0.7;
  args.mask = c.mask;
  args.window_left = c.window_left;
  args.window_right = c.window_right;
  args.rounded = c.rounded;
  return args;
}

inline OracleResult RunOracle(const CheckRank& rank, const OracleCase& c, const OracleInputs& inputs) {
  const auto doubles = [&](std::int64_t count) {
    return rank.Poisoned(static_cast<std::size_t>(count) * sizeof(double));
  };
  const Buffer out = doubles(c.seqlen_q * c.group * c.dim_v);
  const Buffer lse = doubles(c.seqlen_q * c.group);
  const Buffer dq = doubles(c.seqlen_q * c.group * c.dim_qk);
  const Buffer dk = doubles(c.seqlen_kv * c.dim_qk);
  const Buffer dv = doubles(c.seqlen_kv * c.dim_v);
  OracleArgs args = MakeArgs(c, inputs);
  args.out = out.get<double>();
  args.lse = lse.get<double>();
  args.dq = dq.get<double>();
  args.dk = dk.get<double>();
  args.dv = dv.get<double>();
  rank.kernels().Oracle(args, rank.stream());
  return {rank.Download<double>(out), rank.Download<double>(lse), rank.Download<double>(dq),
          rank.Download<double>(dk), rank.Download<double>(dv)};
}

// All masks and windows on lengths that are equal, longer in q and longer in kv.
inline std::vector<OracleCase> MaskCases(const OracleCase& base, std::int64_t shorter, std::int64_t longer) {
  std::vector<OracleCase> cases;
  const std::int64_t windows[][2] = {{-1, -1}, {-1, 0}, {0, 0}, {3, -1}, {2, 4}, {-1, 2}, {3, 0}};
  for (const AttnMaskType mask :
       {AttnMaskType::kNoMask, AttnMaskType::kCausal, AttnMaskType::kCausalBottomRight}) {
    for (const auto& window : windows) {
      for (const auto& [q, kv] :
           {std::pair{longer, longer}, std::pair{shorter, longer}, std::pair{longer, shorter}}) {
        OracleCase c = base;
        c.seqlen_q = q;
        c.seqlen_kv = kv;
        c.mask = mask;
        c.window_left = window[0];
        c.window_right = window[1];
        cases.push_back(c);
      }
    }
  }
  return cases;
}

}  // namespace cppool::kernels::test
