// The hash of a tensor's bits, the same on the host and in CUDA kernels: the sum, modulo 2^64, of a hash of
// each 8-byte word and its index, so that the words may be added in any order.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace cppool::kernels {

// The hash of word number `index`: the state of a SplitMix64 generator (Steele, Lea and Flood 2014) after
// index + 1 steps, plus the word, passed through the finalizer of SplitMix64. Words are little-endian; the
// last one is padded with zeros.
CPPOOL_HOST_DEVICE inline std::uint64_t DigestWord(std::uint64_t index, std::uint64_t word) {
  std::uint64_t hash = word + (index + 1) * 0x9E3779B97F4A7C15u;
  hash = (hash ^ hash >> 30) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ hash >> 27) * 0x94D049BB133111EBu;
  return hash ^ hash >> 31;
}

// The initial value of the sum. It depends on the size, so that a tensor with zeros appended has another
// digest.
CPPOOL_HOST_DEVICE inline std::uint64_t DigestStart(std::uint64_t bytes) { return DigestWord(~bytes, bytes); }

}  // namespace cppool::kernels
