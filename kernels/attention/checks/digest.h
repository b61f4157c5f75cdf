// The hash of a tensor's bits, the same on the host and in CUDA kernels: the sum of one hash per 8-byte word and
// its place, modulo 2^64, so that the order of the words' additions does not matter.
#pragma once

#include <cstdint>

#include "kernels/numerics/host_device.h"

namespace cppool::kernels {

// What word `index` adds: the state of a SplitMix64 generator (Steele, Lea and Flood 2014) at that place, moved
// by the word, and finished as there. Words are little-endian; the last one is filled up with zeros.
CPPOOL_HOST_DEVICE inline std::uint64_t DigestWord(std::uint64_t index, std::uint64_t word) {
  std::uint64_t hash = word + (index + 1) * 0x9E3779B97F4A7C15u;
  hash = (hash ^ hash >> 30) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ hash >> 27) * 0x94D049BB133111EBu;
  return hash ^ hash >> 31;
}

// What the sum starts from: tells a tensor from itself with zeros behind it.
CPPOOL_HOST_DEVICE inline std::uint64_t DigestStart(std::uint64_t bytes) { return DigestWord(~bytes, bytes); }

}  // namespace cppool::kernels
