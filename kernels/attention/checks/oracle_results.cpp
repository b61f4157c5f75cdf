#include "kernels/attention/checks/oracle_results.h"

#include <array>

#include "kernels/error.h"

namespace cppool::kernels {
namespace {

auto DoublesIn(MemoryList& list) {
  return [&list](const char* name, std::int64_t count, Buffer& to) {
    list.Add(name, static_cast<std::size_t>(count) * sizeof(double), to);
  };
}

}  // namespace

void OracleOutputs::ListPair(const AttentionSpec& spec, MemoryList& list) {
  const std::int64_t group = spec.heads / spec.kv_heads;
  const auto doubles = DoublesIn(list);
  doubles("oracle's out", spec.seqlen_q * group * spec.dim_v, out);
  doubles("oracle's lse", spec.seqlen_q * group, lse);
  if (!spec.training) return;
  doubles("oracle's dq", spec.seqlen_q * group * spec.dim_qk, dq);
  doubles("oracle's dk", spec.seqlen_kv * spec.dim_qk, dk);
  doubles("oracle's dv", spec.seqlen_kv * spec.dim_v, dv);
}

void OracleOutputs::List(const AttentionSpec& spec, const OracleSample& sample, MemoryList& list) {
  const auto doubles = DoublesIn(list);
  ListPair(spec, list);
  if (spec.training) {
    if (!sample.bias_units.empty()) {
      const BiasUnit& unit = sample.bias_units.front();
      doubles("oracle's dbias", unit.heads * unit.queries * spec.seqlen_kv, dbias);
    }
    if (spec.softmax == SoftmaxType::kLearnable)
      doubles("oracle's d_softmax_offset", spec.heads, d_softmax_offset);
  }
  if (spec.max_logit) doubles("oracle's max_logit", spec.heads, max_logit);
}

const Buffer& OracleOutputs::of(CheckedTensor kind) const {
  // In the order of the enumerators; the others are no results.
  const auto results = std::to_array({&out, &lse, &dq, &dk, &dv, &dbias, &d_softmax_offset, &max_logit});
  const auto index = static_cast<std::size_t>(kind);
  if (index >= results.size()) throw RuntimeError(CPPOOL_INTERNAL, "no such tensor");
  return *results[index];
}

void OracleResults::List(const AttentionSpec& spec, const OracleSample& sample, bool own, MemoryList& list) {
  if (spec.fp8) bounds.ListPair(spec, list);
  for (OracleOutputs* outputs : {&exact, &plain}) {
    if (own) {
      outputs->List(spec, sample, list);
    } else {
      outputs->ListPair(spec, list);
    }
  }
}

}  // namespace cppool::kernels
