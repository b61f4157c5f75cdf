// Attention written down as its definition, in fp64, token by token: what the kernels are compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/attention/attention_kernels.h"
#include "kernels/attention/layout.h"

namespace cppool::test {

struct NaiveResult {
  std::vector<double> out;  // [rows_q, heads, dim_v]
  std::vector<double> lse;  // [rows_q, heads]
  std::vector<double> dq, dk, dv;
};

struct Token {
  std::int32_t sequence;
  std::int32_t position;
};

// The token of each row; sequence -1 for a row that no segment has.
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

// q, k, v and dout as numbers, [rows, heads, dim].
inline NaiveResult NaiveAttention(const kernels::KernelShape& shape, const kernels::Layout& query,
                                  const kernels::Layout& key, const std::vector<kernels::Band>& bands,
                                  const std::vector<double>& q, const std::vector<double>& k,
                                  const std::vector<double>& v, const std::vector<double>& dout) {
  const std::vector<Token> queries = TokensOf(query), keys = TokensOf(key);
  const auto n_q = queries.size(), n_k = keys.size();
  const auto heads = static_cast<std::size_t>(shape.heads),
             kv_heads = static_cast<std::size_t>(shape.kv_heads);
  const auto dim = static_cast<std::size_t>(shape.dim_qk), dim_v = static_cast<std::size_t>(shape.dim_v);
  const double scale = shape.scale;
  NaiveResult result;
  result.out.assign(n_q * heads * dim_v, 0);
  result.lse.assign(n_q * heads, -std::numeric_limits<double>::infinity());
  result.dq.assign(q.size(), 0);
  result.dk.assign(k.size(), 0);
  result.dv.assign(v.size(), 0);
  for (std::size_t h = 0; h < heads; ++h) {
    const auto kv =
        static_cast<std::size_t>((shape.head0 + static_cast<int>(h)) / shape.group - shape.kv_head0);
    for (std::size_t i = 0; i < n_q; ++i) {
      const double* qi = &q[(i * heads + h) * dim];
      const double* di = &dout[(i * heads + h) * dim_v];
      double* oi = &result.out[(i * heads + h) * dim_v];
      std::vector<std::size_t> seen;
      std::vector<double> logit;
      for (std::size_t j = 0; j < n_k; ++j) {
        if (!Sees(queries[i], keys[j], bands)) continue;
        double sum = 0;
        for (std::size_t d = 0; d < dim; ++d) sum += qi[d] * k[(j * kv_heads + kv) * dim + d];
        seen.push_back(j);
        logit.push_back(sum * scale);
      }
      if (seen.empty()) continue;
      double top = logit[0];
      for (const double x : logit) top = std::max(top, x);
      double total = 0;
      for (const double x : logit) total += std::exp(x - top);
      const double lse = top + std::log(total);
      result.lse[i * heads + h] = lse;
      double delta = 0;
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const double p = std::exp(logit[s] - lse);
        for (std::size_t d = 0; d < dim_v; ++d) oi[d] += p * v[(seen[s] * kv_heads + kv) * dim_v + d];
      }
      for (std::size_t d = 0; d < dim_v; ++d) delta += oi[d] * di[d];
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const double p = std::exp(logit[s] - lse);
        const std::size_t row = seen[s] * kv_heads + kv;
        double dp = 0;
        for (std::size_t d = 0; d < dim_v; ++d) dp += di[d] * v[row * dim_v + d];
        const double ds = p * (dp - delta) * scale;
        for (std::size_t d = 0; d < dim; ++d) {
          result.dq[(i * heads + h) * dim + d] += ds * k[row * dim + d];
          result.dk[row * dim + d] += ds * qi[d];
        }
        for (std::size_t d = 0; d < dim_v; ++d) result.dv[row * dim_v + d] += p * di[d];
      }
    }
  }
  return result;
}

}  // namespace cppool::test
