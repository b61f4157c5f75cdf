// How a case uses 8-bit floating point, in Transformer Engine's terms.
#pragma once

namespace cppool::kernels {

enum class ScalingMode {
  kDelayed,  // one scale per tensor, from a step before
  kCurrent,  // one scale per tensor, from its own amax
  kMxfp8,    // a power of two for each block of 32 (OCP microscaling formats, E8M0)
};

// What multiplies operands that are quantized with one scale for each tensor.
enum class Fp8Products {
  kAuto,    // kNative where the kernels have it and are faster so, else kBf16
  kNative,  // 8-bit tensor cores, in the passes that have them: today the forward pass
  kBf16,    // 16-bit ones, which hold the values of payloads exactly
};

// The 16-bit side is bf16.
struct Fp8Recipe {
  ScalingMode scaling_mode = ScalingMode::kDelayed;
  bool dpa = false;    // `fp8_dpa`: 16-bit tensors in and out, casts inside
  bool mha = false;    // `fp8_mha`: Q, K, V arrive as payload and scale, O leaves so; with `bwd` also dO and
                       // dQ, dK, dV
  bool bwd = false;    // `fp8_bwd`: the backward pass is fp8, too
  bool f16_o = false;  // `f16_O`: O that the backward pass gets is 16-bit
  Fp8Products products = Fp8Products::kAuto;
  bool operator==(const Fp8Recipe&) const = default;
};

// Whether scales are of blocks rather than of tensors.
constexpr bool InBlocks(const Fp8Recipe& recipe) { return recipe.scaling_mode == ScalingMode::kMxfp8; }

// What P is multiplied with before its cast. 448 puts P <= 1 into all of E4M3; in blocks it is a power of
// two, as in FlashAttention 3.
constexpr float PScale(const Fp8Recipe& recipe) { return InBlocks(recipe) ? 256 : 448; }

}  // namespace cppool::kernels
