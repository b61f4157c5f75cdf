// Cases for the oracle: inputs from the generator, outputs as vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "tests/kernels/attention/checks/check_rank.h"

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
  bool bias = false;  // a bias tensor that is larger than the sequence
  bool bias_heads = true, bias_queries = true;
  bool alibi = false;
  bool offset = false;
  // The sequence is the last of `step` interleaved sequences (sbhd), and its key/value head is the second of
  // three.
  std::int64_t step = 1;
};

inline std::ostream& operator<<(std::ostream& out, const OracleCase& c) {
  return out << "q " << c.seqlen_q << " kv " << c.seqlen_kv << " group " << c.group << " dims " << c.dim_qk
             << "/" << c.dim_v << " mask " << static_cast<int>(c.mask) << " window " << c.window_left << ","
             << c.window_right << " dtype " << static_cast<int>(c.dtype) << " rounded " << c.rounded
             << " step " << c.step << " bias " << c.bias << c.bias_heads << c.bias_queries << " alibi "
             << c.alibi << " offset " << c.offset;
}

struct OracleResult {
  std::vector<double> out, lse, dq, dk, dv;
  std::vector<double> dbias;  // shape of the bias, for the group's heads
  std::vector<double> d_offset, max_logit;
};
inline constexpr double kSumStart = 0.25;  // initial value of dbias and d_offset, to which the oracle adds

inline constexpr int kKvHeads = 3;
inline constexpr int kKvHead = 1;

struct OracleInputs {
  Layout query, key;
  Buffer q, k, v, dout, bias, slopes, offset;
};

// The bias: [heads or 1, seqlen_q + 2 or 1, seqlen_kv + 3].
inline std::int64_t BiasPitch(const OracleCase& c) { return c.seqlen_kv + 3; }
inline std::int64_t BiasRows(const OracleCase& c) { return c.bias_queries ? c.seqlen_q + 2 : 1; }
inline std::int64_t BiasHeadStep(const OracleCase& c) {
  return c.bias_heads ? BiasRows(c) * BiasPitch(c) : 0;
}
inline std::int64_t BiasQueryStep(const OracleCase& c) { return c.bias_queries ? BiasPitch(c) : 0; }
inline std::int64_t BiasAt(const OracleCase& c, std::int64_t head, std::int64_t i, std::int64_t j) {
  return head * BiasHeadStep(c) + i * BiasQueryStep(c) + j;
}

// `step` sequences of `length` tokens, interleaved.
inline Layout Interleaved(std::int64_t step, std::int64_t length) {
  Layout layout;
  for (std::int64_t s = 0; s < step; ++s)
    layout.segments.push_back({static_cast<std::int32_t>(s), 0, static_cast<std::int32_t>(length), s});
  layout.rows = step * length;
  layout.row_step = static_cast<std::int32_t>(step);
  return layout;
}

inline OracleInputs MakeInputs(const CheckRank& rank, const OracleCase& c) {
  OracleInputs inputs;
  inputs.query = Interleaved(c.step, c.seqlen_q);
  inputs.key = Interleaved(c.step, c.seqlen_kv);
  const auto make = [&](InputTensor tensor, const Layout& layout, int heads, int dim) {
    Buffer buffer = rank.Poisoned(static_cast<std::size_t>(layout.rows) * heads * dim * SizeOf(c.dtype));
    rank.kernels().Generate(tensor, 99, layout, heads, dim, c.dtype, buffer.get(), rank.stream());
    return buffer;
  };
  inputs.q = make(InputTensor::kQ, inputs.query, kKvHeads * c.group, c.dim_qk);
  inputs.k = make(InputTensor::kK, inputs.key, kKvHeads, c.dim_qk);
  inputs.v = make(InputTensor::kV, inputs.key, kKvHeads, c.dim_v);
  inputs.dout = make(InputTensor::kDout, inputs.query, kKvHeads * c.group, c.dim_v);
  const int heads = kKvHeads * c.group;
  if (c.bias) {
    const int bias_heads = c.bias_heads ? heads : 1;
    inputs.bias = rank.Poisoned(bias_heads * BiasRows(c) * BiasPitch(c) * SizeOf(c.dtype));
    rank.kernels().GenerateBias(5, 1, bias_heads, BiasRows(c), BiasPitch(c), c.dtype, inputs.bias.get(),
                                rank.stream());
  }
  if (c.alibi) {
    std::vector<float> slopes;
    for (int h = 0; h < heads; ++h) slopes.push_back(0.3f / static_cast<float>(h + 1));
    inputs.slopes = rank.Upload(slopes);
  }
  if (c.offset) {
    const Layout one{{{0, 0, 1, 0}}, 1, 1};
    inputs.offset = rank.Poisoned(heads * sizeof(float));
    rank.kernels().Generate(InputTensor::kSoftmaxOffset, 99, one, heads, 1, Dtype::kFp32, inputs.offset.get(),
                            rank.stream());
  }
  return inputs;
}

inline OracleArgs MakeArgs(const OracleCase& c, const OracleInputs& inputs) {
  OracleArgs args;
  args.q = {inputs.q.get(), c.dtype};
  args.k = {inputs.k.get(), c.dtype};
  args.v = {inputs.v.get(), c.dtype};
  args.dout = {inputs.dout.get(), c.dtype};
  args.stored = c.dtype;
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
  if (c.bias) {
    args.bias = {inputs.bias.at(static_cast<std::size_t>(BiasAt(c, args.head_begin, 0, 0)) * SizeOf(c.dtype)),
                 c.dtype};
    args.bias_head_step = BiasHeadStep(c);
    args.bias_query_step = BiasQueryStep(c);
  }
  if (c.alibi) args.alibi_slopes = inputs.slopes.get<float>() + args.head_begin;
  if (c.offset) args.softmax_offset = inputs.offset.get<float>() + args.head_begin;
  return args;
}

inline OracleResult RunOracle(const CheckRank& rank, const OracleCase& c, const OracleInputs& inputs,
                              int calls = 1) {
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
  const std::int64_t bias_count = c.bias ? (c.bias_heads ? c.group : 1) * BiasRows(c) * BiasPitch(c) : 0;
  const auto filled = [&](std::int64_t count, double value) {
    Buffer buffer = doubles(count);
    if (count) rank.kernels().FillValues(buffer.get<double>(), value, count, rank.stream());
    return buffer;
  };
  const Buffer dbias = filled(bias_count, kSumStart);
  const Buffer d_offset = filled(c.offset ? c.group : 0, kSumStart);
  const Buffer max_logit = filled(c.group, -std::numeric_limits<double>::infinity());
  args.dbias = c.bias ? dbias.get<double>() : nullptr;
  args.dbias_head_step = BiasHeadStep(c);
  args.dbias_query_step = BiasQueryStep(c);
  args.d_softmax_offset = c.offset ? d_offset.get<double>() : nullptr;
  args.max_logit = max_logit.get<double>();
  for (int call = 0; call < calls; ++call) rank.kernels().Oracle(args, rank.stream());
  return {rank.Download<double>(out),      rank.Download<double>(lse),      rank.Download<double>(dq),
          rank.Download<double>(dk),       rank.Download<double>(dv),       rank.Download<double>(dbias),
          rank.Download<double>(d_offset), rank.Download<double>(max_logit)};
}

inline constexpr AttnMaskType kMasks[] = {
    AttnMaskType::kNoMask,  AttnMaskType::kCausal,        AttnMaskType::kCausalBottomRight,
    AttnMaskType::kPadding, AttnMaskType::kPaddingCausal, AttnMaskType::kPaddingCausalBottomRight};

// All masks and windows on lengths that are equal, longer in q and longer in kv.
inline std::vector<OracleCase> MaskCases(const OracleCase& base, std::int64_t shorter, std::int64_t longer) {
  std::vector<OracleCase> cases;
  const std::int64_t windows[][2] = {{-1, -1}, {-1, 0}, {0, 0}, {3, -1}, {2, 4}, {-1, 2}, {3, 0}};
  for (const AttnMaskType mask : kMasks) {
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

// Every kind of bias and an offset, alone and together, with every mask, with and without a window.
inline std::vector<OracleCase> FeatureCases(const OracleCase& base, std::int64_t shorter,
                                            std::int64_t longer) {
  struct Feature {
    bool bias, heads, queries, alibi, offset;
  };
  std::vector<OracleCase> cases;
  for (const Feature& feature :
       {Feature{true, true, true, false, false}, Feature{true, false, true, false, true},
        Feature{true, true, false, false, false}, Feature{true, false, false, false, false},
        Feature{false, false, false, true, false}, Feature{false, false, false, true, true},
        Feature{false, false, false, false, true}}) {
    for (const AttnMaskType mask : kMasks) {
      for (const std::int64_t left : {std::int64_t{-1}, shorter / 2}) {
        for (const auto& [q, kv] :
             {std::pair{longer, longer}, std::pair{shorter, longer}, std::pair{longer, shorter}}) {
          OracleCase c = base;
          c.seqlen_q = q;
          c.seqlen_kv = kv;
          c.mask = mask;
          c.window_left = left;
          c.bias = feature.bias;
          c.bias_heads = feature.heads;
          c.bias_queries = feature.queries;
          c.alibi = feature.alibi;
          c.offset = feature.offset;
          cases.push_back(c);
        }
      }
    }
  }
  return cases;
}

}  // namespace cppool::kernels::test
