// Comparison of the records in a run's record, member by member: one that is added is a compile error here.
#pragma once

#include <tuple>

#include <cppool/run_options.h>

namespace cppool {

inline auto MembersOf(const Sampling& sampling) {
  const auto& [precision, limit, most] = sampling;
  return std::tie(precision, limit, most);
}
inline auto MembersOf(const Fault& fault) {
  const auto& [kind, rank, stage, count] = fault;
  return std::tie(kind, rank, stage, count);
}
inline auto MembersOf(const RunOptions& run) {
  const auto& [case_name, deadline, warmup, repeat, sampling, checks, perturb, dump, inputs, kernels, fault,
               load, waits, profile, progress, trace, digests, python, fresh, own_group, verdict] = run;
  return std::tie(case_name, deadline, warmup, repeat, sampling, checks, perturb, dump, inputs, kernels,
                  fault, load, waits, profile, progress, trace, digests, python, fresh, own_group, verdict);
}

inline bool operator==(const Sampling& a, const Sampling& b) { return MembersOf(a) == MembersOf(b); }
inline bool operator==(const Fault& a, const Fault& b) { return MembersOf(a) == MembersOf(b); }
inline bool operator==(const RunOptions& a, const RunOptions& b) { return MembersOf(a) == MembersOf(b); }

}  // namespace cppool
