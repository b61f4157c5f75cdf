// Digests of tensors in a rank's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/kernels/attention/checks/check_rank.h"

namespace cppool::kernels::test {

// The digest of the values from `offset` on.
inline std::uint64_t DigestOf(const CheckRank& rank, const std::vector<std::uint16_t>& values,
                              std::size_t offset = 0) {
  const Buffer buffer = rank.Upload(values);
  void* result = nullptr;
  Check(rank.rt(), rank.rt()->alloc_host(rank.rt(), sizeof(std::uint64_t), &result));
  rank.kernels().Digest(buffer.at(offset * 2), (values.size() - offset) * 2,
                        static_cast<std::uint64_t*>(result), rank.stream());
  rank.Synchronize();
  const std::uint64_t digest = *static_cast<std::uint64_t*>(result);
  rank.rt()->free_host(rank.rt(), result);
  return digest;
}

inline std::vector<std::uint16_t> SomeValues(std::size_t count) {
  std::vector<std::uint16_t> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(static_cast<std::uint16_t>(i * 40503 + 12345));
  return values;
}

}  // namespace cppool::kernels::test
