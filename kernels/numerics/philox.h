// Random numbers for inputs, with the same bits on the host and in CUDA kernels: Philox4x32-10 of Salmon,
// Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and a conversion to values
// with integer operations and one rounding.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace cppool::kernels {

struct PhiloxBlock {
  std::uint32_t word[4];
};

// Ten rounds; the key is the low and the high half of `key`.
CPPOOL_HOST_DEVICE inline PhiloxBlock Philox4x32(PhiloxBlock counter, std::uint64_t key) {
  std::uint32_t low = static_cast<std::uint32_t>(key);
  std::uint32_t high = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter.word[0];
    const std::uint64_t product2 = std::uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<std::uint32_t>(product2 >> 32) ^ counter.word[1] ^ low,
                static_cast<std::uint32_t>(product2),
                static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ high,
                static_cast<std::uint32_t>(product0)}};
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return counter;
}

// The four random words for dims 4 * quad .. 4 * quad + 3 of one head of a token. quad < 2^16, head < 2^16.
CPPOOL_HOST_DEVICE inline PhiloxBlock InputWords(std::uint64_t seed, std::uint32_t tensor,
                                                 std::uint32_t sequence, std::uint32_t position,
                                                 std::uint32_t head, std::uint32_t quad) {
  return Philox4x32({{position, sequence, (head << 16) | quad, tensor}}, seed);
}

// The four random words for keys 4 * quad .. 4 * quad + 3 of one query's row of a bias. quad < 2^22, head <
// 2^10.
CPPOOL_HOST_DEVICE inline PhiloxBlock BiasWords(std::uint64_t seed, std::uint32_t tensor,
                                                std::uint32_t sequence, std::uint32_t query,
                                                std::uint32_t head, std::uint32_t quad) {
  return Philox4x32({{query, sequence, (head << 22) | quad, tensor}}, seed);
}

// The sum of a word's four bytes, centred, in units of 2^-8. Its distribution (Irwin-Hall) is close to a
// normal one, bounded by
// +-510/256, with variance 4 * (256^2 - 1) / 12 / 256^2, a standard deviation of 0.577. Exact in fp32.
CPPOOL_HOST_DEVICE inline float InputValue(std::uint32_t word) {
  const int sum = static_cast<int>((word & 0xFF) + (word >> 8 & 0xFF) + (word >> 16 & 0xFF) + (word >> 24));
  return static_cast<float>(sum - 510) * 0.00390625f;
}

// By what the inputs of a case in fp8 are multiplied, so that no scale can stand for another one: tensors,
// heads and blocks of 32 dims and tokens have amaxes of their own, and one element of each tensor, at the
// first token, is larger than all others. Powers of two: the product is exact.
CPPOOL_HOST_DEVICE inline float UnevenFactor(bool is_k, bool is_v, std::uint32_t sequence,
                                             std::uint32_t position, std::uint32_t head, std::uint32_t dim) {
  // At most 8 times as large as usual: a few elements would otherwise carry the RMS of all errors, and these
  // would be no statistics.
  if (sequence == 0 && position == 0 && head == 0 && dim == 0) return is_k ? 16.0f : is_v ? 2.0f : 8.0f;
  const float of_tensor = is_k ? 4.0f : is_v ? 0.25f : 1.0f;
  const float of_head = head % 2 == 0 ? 1.0f : 0.5f;
  const float of_block = (position / 32 + dim / 32) % 3 == 0 ? 1.0f : 0.5f;
  return of_tensor * of_head * of_block;
}

// The bits of an InputValue in bfloat16 (8 significant bits: rounded to nearest, ties to even) and in
// binary16 (11 significant bits: exact, and never subnormal).
CPPOOL_HOST_DEVICE inline std::uint16_t InputBf16(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

CPPOOL_HOST_DEVICE inline std::uint16_t InputFp16(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (bits == 0) return 0;
  const std::uint32_t magnitude = (bits & 0x7FFFFFFF) - (std::uint32_t{127 - 15} << 23);
  return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | magnitude >> 13);
}

}  // namespace cppool::kernels
