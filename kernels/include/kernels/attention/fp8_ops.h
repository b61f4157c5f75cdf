// Quantization of tensors: what schedules do with 8-bit payloads and their scales (kernels/numerics/fp8.h has
// the formats).
//
// Pointers, threads and errors as in attention_kernel.h. A tensor is [rows, columns]; rows without a token
// are neither read nor written. Every result but the sums of Delta has the same bits on every runtime. No
// call allocates or waits.
#pragma once

#include <cppool/runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/layout.h"
#include "kernels/attention/tensor.h"

namespace cppool::kernels {

class TokenRows;

// A tensor's scale in device memory. Stored: value * scale; read: stored * inverse.
struct Fp8Scale {
  float scale;
  float inverse;  // 1 / scale, to nearest: what TensorRef::scale points to
};

// The axis along which 32 elements share an E8M0 scale.
enum class MxAxis { kDim, kTokens };

// The tokens of a layout in blocks of at most 32: those of each chunk of a sequence, from the chunk's
// beginning on. The last block of a chunk may be shorter. So no block crosses a sequence or a rank, and the
// payloads of a token are the same bits on whichever rank it is, and without CP. `chunk[sequence]`: the
// length of its chunks, which begin at multiples of it.
std::vector<Segment> MxBlocks(const Layout& layout, const std::vector<std::int64_t>& chunk);
// Returns the lengths of the chunks when `world_size` ranks share the sequences.
std::vector<std::int64_t> MxChunks(const Sequences& sequences, int world_size);
// Bytes of E8M0 for [rows, heads, dim].
std::int64_t MxExponents(MxAxis axis, std::int64_t rows, std::int64_t blocks, int heads, int dim);

// A tensor [rows, heads, dim] quantized in blocks. The exponent of an element: along the dims [row][head][dim
// / 32], along the tokens [block][head][dim].
struct MxTensor {
  std::uint8_t* payload = nullptr;    // E4M3, as the tensor
  std::uint8_t* exponents = nullptr;  // E8M0
};

class Fp8Ops {
 public:
  virtual ~Fp8Ops() = default;

  // *amax = the largest of *amax and the magnitudes of the rows' elements. NaN does not count, infinity does.
  virtual void Amax(const TokenRows& rows, std::int64_t columns, TensorRef from, float* amax,
                    cppool_stream) = 0;
  // Makes the scale of `format` for this amax: CurrentScale of fp8.h.
  virtual void MakeScale(Dtype format, const float* amax, Fp8Scale* to, cppool_stream) = 0;
  // payload = cast of from * scale->scale, in one fp32 product.
  virtual void Cast(const TokenRows& rows, std::int64_t columns, TensorRef from, const Fp8Scale* scale,
                    TensorOut payload, cppool_stream) = 0;
  // to, of a 16-bit type, = stored values times payload.scale, in fp32, rounded once. Without a scale the
  // stored values themselves: exact in bf16.
  virtual void Dequantize(const TokenRows& rows, std::int64_t columns, TensorRef payload, TensorOut to,
                          cppool_stream) = 0;
  // As TensorOps::Delta, of payloads with scales and 16-bit tensors; the sum is multiplied with the scales.
  virtual void Delta(const TokenRows& rows, int heads, int dim, TensorRef out, TensorRef dout, float* delta,
                     cppool_stream) = 0;

  // The blocks of a layout, as rows for the two calls below. As TensorOps::Rows.
  virtual std::unique_ptr<TokenRows> Blocks(const Layout& layout, const std::vector<std::int64_t>& chunk,
                                            cppool_stream) = 0;
  // Blocks of `from` [rows, heads, dim]: E8M0Of the amax, then the cast.
  virtual void CastBlocks(const TokenRows& blocks, MxAxis axis, int heads, int dim, TensorRef from,
                          const MxTensor& to, cppool_stream) = 0;
  // to, bf16, = payload times the power of two: exact but below 2^-126, where bf16 has fewer digits.
  virtual void DequantizeBlocks(const TokenRows& blocks, MxAxis axis, int heads, int dim,
                                const MxTensor& from, TensorOut to, cppool_stream) = 0;

  // The slots of a layout's tokens (problem/transposed.h), as rows for Transpose. As TensorOps::Rows.
  virtual std::unique_ptr<TokenRows> Slots(const Layout& layout, cppool_stream) = 0;
  // to, [heads][dim][slots] = the bytes of a payload [rows, heads, dim]; 0 in slots of no token. dim is a
  // multiple of 64.
  virtual void Transpose(const TokenRows& slots, int heads, int dim, TensorRef payload, std::uint8_t* to,
                         cppool_stream) = 0;
};

}  // namespace cppool::kernels
