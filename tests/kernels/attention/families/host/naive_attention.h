// Attention by its definition, in fp64, token by token. The kernels are compared with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/layout.h"

namespace cppool::test {

struct Token {
  std::int32_t sequence;
  std::int32_t position;
};

// The token of each row; sequence -1 for a row that belongs to no segment.
inline std::vector<Token> TokensOf(const kernels::Layout& layout) {
  std::vector<Token> tokens(static_cast<std::size_t>(layout.rows), Token{-1, -1});
  for (const kernels::Segment& s : layout.segments) {
    for (std::int32_t i = 0; i < s.length; ++i) {
      tokens[static_cast<std::size_t>(s.row + std::int64_t{i} * layout.row_step)] = {s.sequence,
                                                                                     s.position + i};
    }
  }
  return tokens;
}

inline bool Sees(const Token& query, const Token& key, const std::vector<kernels::Band>& bands) {
  if (query.sequence < 0 || query.sequence != key.sequence) return false;
  const kernels::Band band = bands[static_cast<std::size_t>(query.sequence)];
  const std::int32_t distance = key.position - query.position;
  return band.low <= distance && distance <= band.high;
}

// Tensors as doubles, [rows, heads, dim]. Rows without a token are not read.
struct NaiveProblem {
  kernels::KernelShape shape;
  kernels::Layout query, key;
  std::vector<kernels::Band> bands;
  std::vector<double> q, k, v, dout;
  // Added to the scaled logit of a pair; empty: nothing.
  std::function<double(std::size_t head, const Token& query, const Token& key)> bias;
  std::vector<double>
      offset;  // [heads]: a logit without a value, in the denominator of every row. Empty: none
};

struct NaiveResult {
  std::vector<double> out;  // [rows_q, heads, dim_v]
  std::vector<double> lse;  // [rows_q, heads], over keys alone
  std::vector<double> dq, dk, dv;
  std::vector<double> max_logit;      // [heads]
  std::vector<double> d_logit;        // [heads, rows_q, rows_kv]: of the scaled and biased logits
  std::vector<double> d_offset;       // [heads]
  std::vector<double> d_offset_size;  // [heads]: sum of the absolute values of its terms
};

inline NaiveResult NaiveAttention(const NaiveProblem& problem) {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  const kernels::KernelShape& shape = problem.shape;
  const std::vector<Token> queries = TokensOf(problem.query), keys = TokensOf(problem.key);
  const auto n_q = queries.size(), n_k = keys.size();
  const auto heads = static_cast<std::size_t>(shape.heads),
             kv_heads = static_cast<std::size_t>(shape.kv_heads);
  const auto dim = static_cast<std::size_t>(shape.dim_qk), dim_v = static_cast<std::size_t>(shape.dim_v);
  const double scale = shape.scale;
  NaiveResult result;
  result.out.assign(n_q * heads * dim_v, 0);
  result.lse.assign(n_q * heads, kMinusInfinity);
  result.dq.assign(problem.q.size(), 0);
  result.dk.assign(problem.k.size(), 0);
  result.dv.assign(problem.v.size(), 0);
  result.max_logit.assign(heads, kMinusInfinity);
  result.d_logit.assign(heads * n_q * n_k, 0);
  result.d_offset.assign(heads, 0);
  result.d_offset_size.assign(heads, 0);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto kv =
        static_cast<std::size_t>((shape.head0 + static_cast<int>(h)) / shape.group - shape.kv_head0);
    for (std::size_t i = 0; i < n_q; ++i) {
      const double* qi = &problem.q[(i * heads + h) * dim];
      const double* di = &problem.dout[(i * heads + h) * dim_v];
      double* oi = &result.out[(i * heads + h) * dim_v];
      std::vector<std::size_t> seen;
      std::vector<double> logit;
      for (std::size_t j = 0; j < n_k; ++j) {
        if (!Sees(queries[i], keys[j], problem.bands)) continue;
        double sum = 0;
        for (std::size_t d = 0; d < dim; ++d) sum += qi[d] * problem.k[(j * kv_heads + kv) * dim + d];
        seen.push_back(j);
        logit.push_back(sum * scale + (problem.bias ? problem.bias(h, queries[i], keys[j]) : 0));
      }
      if (seen.empty()) continue;
      const double top = *std::max_element(logit.begin(), logit.end());
      result.max_logit[h] = std::max(result.max_logit[h], top);
      double total = 0;
      for (const double x : logit) total += std::exp(x - top);
      result.lse[i * heads + h] = top + std::log(total);
      if (!problem.offset.empty()) total += std::exp(problem.offset[h] - top);
      const double denominator = top + std::log(total);
      double delta = 0;
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const double p = std::exp(logit[s] - denominator);
        for (std::size_t d = 0; d < dim_v; ++d) oi[d] += p * problem.v[(seen[s] * kv_heads + kv) * dim_v + d];
      }
      for (std::size_t d = 0; d < dim_v; ++d) delta += oi[d] * di[d];
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const double p = std::exp(logit[s] - denominator);
        const std::size_t row = seen[s] * kv_heads + kv;
        double dp = 0;
        for (std::size_t d = 0; d < dim_v; ++d) dp += di[d] * problem.v[row * dim_v + d];
        const double ds = p * (dp - delta);
        result.d_logit[(h * n_q + i) * n_k + seen[s]] = ds;
        for (std::size_t d = 0; d < dim; ++d) {
          result.dq[(i * heads + h) * dim + d] += ds * scale * problem.k[row * dim + d];
          result.dk[row * dim + d] += ds * scale * qi[d];
        }
        for (std::size_t d = 0; d < dim_v; ++d) result.dv[row * dim_v + d] += p * di[d];
      }
      if (!problem.offset.empty()) {  // acts like a key whose value is zero, so its dP is zero
        const double term = std::exp(problem.offset[h] - denominator) * (0 - delta);
        result.d_offset[h] += term;
        result.d_offset_size[h] += std::abs(term);
      }
    }
  }
  return result;
}

}  // namespace cppool::test
