#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/attention/problem/transposed.h"
#include "kernels/attention/tensor_ops/host/tensor_ops.h"
#include "kernels/attention/tensor_ops/host/token_rows.h"
#include "kernels/numerics/fp8.h"
#include "kernels/numerics/half.h"

namespace cppool::kernels::host {
namespace {

// As integers: NaN is larger than infinity, and left out.
float Largest(float most, const float magnitude) {
  const float size = std::abs(magnitude);
  return size > most ? size : most;
}

template <typename Function>
void Dispatch(Dtype dtype, Function&& function) {
  if (IsFp8(dtype)) return DispatchFp8(dtype, std::forward<Function>(function));
  DispatchDtype(dtype, std::forward<Function>(function));
}

// Calls visit(index of the first element, distance between elements, exponent's index, elements) for each
// block of a tile of rows and one head.
template <typename Visit>
void ForEachMxBlock(const HostTokenRows::Table& table, MxAxis axis, int heads, int dim, Visit&& visit) {
  const std::int64_t row_elements = std::int64_t{heads} * dim;
  for (std::size_t i = 0; i < table.tiles.size(); ++i) {
    const RowTile& tile = table.tiles[i];
    for (int head = 0; head < heads; ++head) {
      if (axis == MxAxis::kTokens) {
        for (int d = 0; d < dim; ++d) {
          visit((tile.row * heads + head) * dim + d, table.step * row_elements,
                (static_cast<std::int64_t>(i) * heads + head) * dim + d, static_cast<int>(tile.length));
        }
        continue;
      }
      for (std::int64_t t = 0; t < tile.length; ++t) {
        const std::int64_t vector = (tile.row + t * table.step) * heads + head;
        for (int d = 0; d < dim; d += kMxBlock)
          visit(vector * dim + d, std::int64_t{1}, (vector * dim + d) / kMxBlock, kMxBlock);
      }
    }
  }
}

class HostFp8Ops : public Fp8Ops {
 public:
  explicit HostFp8Ops(cppool_runtime* runtime) : runtime_(runtime) {}

  void Amax(const TokenRows& rows, std::int64_t columns, TensorRef from, float* amax,
            cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(rows)] {
      DispatchDtype(from.dtype, [&](auto type) {
        const auto* in = static_cast<const typename decltype(type)::Bits*>(from.data);
        float most = *amax;
        ForEachRow(table, [&](std::int64_t row) {
          for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i)
            most = Largest(most, decltype(type)::ToFloat(in[i]));
        });
        *amax = most;
      });
    });
  }

  void MakeScale(Dtype format, const float* amax, Fp8Scale* to, cppool_stream stream) override {
    const float most = format == Dtype::kE4M3 ? kE4M3Max : kE5M2Max;
    Enqueue(runtime_, stream, [=] {
      to->scale = CurrentScale(most, *amax);
      to->inverse = 1 / to->scale;
    });
  }

  void Cast(const TokenRows& rows, std::int64_t columns, TensorRef from, const Fp8Scale* scale,
            TensorOut payload, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(rows)] {
      DispatchFp8(payload.dtype, [&](auto format) {
        DispatchDtype(from.dtype, [&](auto type) {
          const auto* in = static_cast<const typename decltype(type)::Bits*>(from.data);
          auto* out = static_cast<std::uint8_t*>(payload.data);
          ForEachRow(table, [&, factor = scale->scale](std::int64_t row) {
            for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i)
              out[i] = decltype(format)::FromFloat(decltype(type)::ToFloat(in[i]) * factor);
          });
        });
      });
    });
  }

  void Dequantize(const TokenRows& rows, std::int64_t columns, TensorRef payload, TensorOut to,
                  cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(rows)] {
      DispatchFp8(payload.dtype, [&](auto format) {
        DispatchDtype(to.dtype, [&](auto type) {
          const auto* in = static_cast<const std::uint8_t*>(payload.data);
          auto* out = static_cast<typename decltype(type)::Bits*>(to.data);
          ForEachRow(table, [&, inverse = payload.scale ? *payload.scale : 1.0f](std::int64_t row) {
            for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i)
              out[i] = decltype(type)::FromFloat(decltype(format)::ToFloat(in[i]) * inverse);
          });
        });
      });
    });
  }

  void Delta(const TokenRows& rows, int heads, int dim, TensorRef out, TensorRef dout, float* delta,
             cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(rows)] {
      Dispatch(out.dtype, [&](auto of_out) {
        Dispatch(dout.dtype, [&](auto of_dout) {
          const auto* a = static_cast<const typename decltype(of_out)::Bits*>(out.data);
          const auto* b = static_cast<const typename decltype(of_dout)::Bits*>(dout.data);
          const float a_scale = out.scale ? *out.scale : 1, b_scale = dout.scale ? *dout.scale : 1;
          ForEachRow(table, [&](std::int64_t row) {
            for (std::int64_t vector = row * heads; vector < (row + 1) * heads; ++vector) {
              float sum = 0;
              for (std::int64_t i = vector * dim; i < (vector + 1) * dim; ++i)
                sum += decltype(of_out)::ToFloat(a[i]) * decltype(of_dout)::ToFloat(b[i]);
              delta[vector] = sum * a_scale * b_scale;
            }
          });
        });
      });
    });
  }

  std::unique_ptr<TokenRows> Blocks(const Layout& layout, const std::vector<std::int64_t>& chunk,
                                    cppool_stream stream) override {
    std::vector<RowTile> tiles;
    for (const Segment& block : MxBlocks(layout, chunk)) tiles.push_back({block.row, block.length});
    return std::make_unique<HostTokenRows>(runtime_, stream, std::move(tiles), layout.row_step);
  }

  void CastBlocks(const TokenRows& blocks, MxAxis axis, int heads, int dim, TensorRef from,
                  const MxTensor& to, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(blocks)] {
      DispatchDtype(from.dtype, [&](auto type) {
        const auto* in = static_cast<const typename decltype(type)::Bits*>(from.data);
        ForEachMxBlock(table, axis, heads, dim,
                       [&](std::int64_t first, std::int64_t step, std::int64_t exponent, int count) {
                         float most = 0;
                         for (int i = 0; i < count; ++i)
                           most = Largest(most, decltype(type)::ToFloat(in[first + i * step]));
                         const std::uint8_t e = E8M0Of(most);
                         to.exponents[exponent] = e;
                         for (int i = 0; i < count; ++i) {
                           to.payload[first + i * step] =
                               FloatToE4M3(decltype(type)::ToFloat(in[first + i * step]) * E8M0Reciprocal(e));
                         }
                       });
      });
    });
  }

  void DequantizeBlocks(const TokenRows& blocks, MxAxis axis, int heads, int dim, const MxTensor& from,
                        TensorOut to, cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(blocks)] {
      auto* out = static_cast<std::uint16_t*>(to.data);
      ForEachMxBlock(table, axis, heads, dim,
                     [&](std::int64_t first, std::int64_t step, std::int64_t exponent, int count) {
                       const float power = E8M0ToFloat(from.exponents[exponent]);
                       for (int i = 0; i < count; ++i) {
                         const std::int64_t at = first + i * step;
                         out[at] = FloatToBF16(E4M3ToFloat(from.payload[at]) * power);
                       }
                     });
    });
  }

  std::unique_ptr<TokenRows> Slots(const Layout& layout, cppool_stream stream) override {
    return std::make_unique<HostTokenRows>(runtime_, stream, SlotTilesOf(layout), layout.row_step);
  }

  void Transpose(const TokenRows& slots, int heads, int dim, TensorRef payload, std::uint8_t* to,
                 cppool_stream stream) override {
    Enqueue(runtime_, stream, [=, &table = TableOf(slots)] {
      const auto* from = static_cast<const std::uint8_t*>(payload.data);
      const std::int64_t columns = std::int64_t{heads} * dim;
      const auto all = static_cast<std::int64_t>(table.tiles.size()) * kSlotTile;
      for (std::int64_t slot = 0; slot < all; ++slot) {
        const RowTile& tile = table.tiles[static_cast<std::size_t>(slot / kSlotTile)];
        const std::int64_t token = slot % kSlotTile / 16 * 16 + TokenOfSlot(static_cast<int>(slot % 16));
        for (std::int64_t column = 0; column < columns; ++column) {
          to[column * all + slot] = token < tile.length
                                        ? from[(tile.row + token * table.step) * columns + column]
                                        : std::uint8_t{0};
        }
      }
    });
  }

 private:
  cppool_runtime* runtime_;
};

}  // namespace

std::unique_ptr<Fp8Ops> MakeFp8Ops(cppool_runtime* runtime) { return std::make_unique<HostFp8Ops>(runtime); }

}  // namespace cppool::kernels::host
