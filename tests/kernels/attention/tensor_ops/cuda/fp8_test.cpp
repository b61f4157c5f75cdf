// The casts to fp8 on a GPU beside the host's: the same bits.
#include <bit>
#include <cfloat>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "kernels/attention/fp8_ops.h"
#include "kernels/attention/problem/transposed.h"
#include "kernels/half.h"
#include "kernels/numerics/fp8.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"
#include "tests/kernels/attention/families/cuda/two_runtimes.h"

namespace cppool::kernels::test {
namespace {

using Bytes = std::vector<std::uint8_t>;

template <typename T>
Bytes BytesOf(const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  return {bytes, bytes + values.size() * sizeof(T)};
}

// Elements of a 16-bit type: all of them. Of fp32: random bits, NaN and infinities among them.
Bytes Elements(Dtype dtype) {
  if (dtype == Dtype::kFp32) {
    std::mt19937 random(3);
    std::vector<std::uint32_t> bits(1 << 18);
    for (std::uint32_t& each : bits) each = static_cast<std::uint32_t>(random());
    for (std::size_t i = 0; i < 16; ++i) bits[i * 100] = i % 2 ? 0x7f800000u : 0xffc00001u;
    return BytesOf(bits);
  }
  std::vector<std::uint16_t> bits(1 << 16);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  return BytesOf(bits);
}

// The first place where they differ.
std::string Difference(const Bytes& got, const Bytes& want) {
  if (got.size() != want.size()) return "sizes";
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != want[i])
      return "byte " + std::to_string(i) + ": " + std::to_string(got[i]) + ", on the host " +
             std::to_string(want[i]);
  }
  return "";
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Calls run(side, the tensor's address) for both sides, with the tensor aligned and not, and compares the
// bytes that it returns.
template <typename Run>
void ExpectSame(const Side& cuda, const Side& host, Dtype dtype, const Bytes& elements, Run run) {
  for (const std::size_t off : {std::size_t{0}, SizeOf(dtype)}) {
    Bytes shifted(off, 0);
    shifted.insert(shifted.end(), elements.begin(), elements.end());
    const auto on = [&](const Side& side) {
      const Buffer buffer = side.Upload(shifted);
      return run(side, TensorRef{buffer.at(off), dtype});
    };
    CAPTURE(off);
    CHECK(Difference(on(cuda), on(host)) == "");
  }
}

// Sequences of which this rank's chunks, of 40 tokens, end in a short block.
Layout Chunked(std::int64_t rows_wanted) {
  const std::int64_t sequences = (rows_wanted + 79) / 80;
  return RankLayout(QkvFormat::kSbhd, UniformSequences(sequences, 160), 2, 1);
}

}  // namespace

TEST_CASE("casts with a scale have the host's bits: every bf16 and fp16 value, and random fp32") {
  if (!HaveDevice()) return;
  const Side cuda = CudaSide(), host = HostSide();
  for (const Dtype from : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    const Bytes elements = Elements(from);
    const std::int64_t columns = GENERATE(64, 1), rows = static_cast<std::int64_t>(elements.size()) /
                                                         static_cast<std::int64_t>(SizeOf(from)) / columns;
    const Layout layout{{{0, 0, static_cast<std::int32_t>(rows), 0}}, rows, 1};
    for (const Dtype format : {Dtype::kE4M3, Dtype::kE5M2}) {
      for (const float scale : {1.0f, 3.7f, 0.013f, 0x1p-140f, 1e38f, FLT_MAX}) {
        CAPTURE(NameOf(from), NameOf(format), scale, columns);
        ExpectSame(cuda, host, from, elements, [&](const Side& side, TensorRef tensor) {
          const Buffer of_scale = side.Upload(std::vector<Fp8Scale>{{scale, 1 / scale}});
          const Buffer payload = side.Poisoned(static_cast<std::size_t>(rows * columns));
          const auto token_rows = side.ops().Rows(layout, side.stream());
          side.ops().fp8().Cast(*token_rows, columns, tensor, of_scale.get<Fp8Scale>(),
                                {payload.get(), format}, side.stream());
          return side.Download<std::uint8_t>(payload);
        });
      }
    }
  }
}

TEST_CASE("transposed payloads have the host's bits, whose tokens are where the products read them") {
  if (!HaveDevice()) return;
  const Side cuda = CudaSide(), host = HostSide();
  for (const std::int64_t rows : {1, 63, 700}) {
    const Layout layout = Chunked(rows);
    for (const int dim : {64, 128, 256}) {
      for (const int heads : {1, 3}) {
        CAPTURE(rows, dim, heads);
        std::mt19937 random(2);
        Bytes payload(static_cast<std::size_t>(layout.rows * heads * dim));
        for (std::uint8_t& each : payload) each = static_cast<std::uint8_t>(random());
        const auto on = [&](const Side& side) {
          const Buffer from = side.Upload(payload);
          const Buffer to = side.Poisoned(static_cast<std::size_t>(SlotsOf(layout) * heads * dim));
          const auto slots = side.ops().fp8().Slots(layout, side.stream());
          side.ops().fp8().Transpose(*slots, heads, dim, {from.get(), Dtype::kE4M3}, to.get<std::uint8_t>(),
                                     side.stream());
          return side.Download<std::uint8_t>(to);
        };
        CHECK(Difference(on(cuda), on(host)) == "");
      }
    }
  }
}

TEST_CASE("payloads are dequantized to the host's bits") {
  if (!HaveDevice()) return;
  const Side cuda = CudaSide(), host = HostSide();
  Bytes payload(4096);
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::uint8_t>(i * 41);
  const Layout layout{{{0, 0, 32, 0}}, 32, 1};
  for (const Dtype format : {Dtype::kE4M3, Dtype::kE5M2}) {
    for (const Dtype to : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      for (const float inverse : {0.0f, 1.0f, 0.0123f, 1e-40f, 1e36f}) {  // 0: none
        CAPTURE(NameOf(format), NameOf(to), inverse);
        ExpectSame(cuda, host, format, payload, [&](const Side& side, TensorRef tensor) {
          const Buffer of_scale = side.Upload(std::vector<float>{inverse});
          if (inverse != 0) tensor.scale = of_scale.get<float>();
          const Buffer values = side.Poisoned(payload.size() * SizeOf(to));
          const auto rows = side.ops().Rows(layout, side.stream());
          side.ops().fp8().Dequantize(*rows, 128, tensor, {values.get(), to}, side.stream());
          return side.Download<std::uint8_t>(values);
        });
      }
    }
  }
}

TEST_CASE("amaxes and scales have the host's bits") {
  if (!HaveDevice()) return;
  const Side cuda = CudaSide(), host = HostSide();
  for (const Dtype format : {Dtype::kE4M3, Dtype::kE5M2}) {
    for (const float amax : {0.0f, kInfinity, kNan, FLT_MAX, FLT_MIN, 1e-45f, 1e-37f, 448.0f, 57344.0f, 1.0f,
                             2.7f, 0.3f, 1e30f}) {
      CAPTURE(NameOf(format), amax);
      ExpectSame(cuda, host, Dtype::kFp32, BytesOf(std::vector<float>{amax}),
                 [&](const Side& side, TensorRef tensor) {
                   const Buffer scale = side.Poisoned(sizeof(Fp8Scale));
                   side.ops().fp8().MakeScale(format, static_cast<const float*>(tensor.data),
                                              scale.get<Fp8Scale>(), side.stream());
                   return side.Download<std::uint8_t>(scale);
                 });
    }
  }
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
    const Bytes all = Elements(dtype);
    for (const bool finite : {false, true}) {
      Bytes elements = all;
      if (finite && dtype == Dtype::kBf16) {  // without infinities
        for (std::size_t i = 0; i < elements.size(); i += 2) {
          if ((elements[i + 1] & 0x7f) == 0x7f && elements[i] == 0x80) elements[i] = 0x7f;
        }
      }
      const Layout layout = Chunked(400);
      const std::int64_t columns =
          static_cast<std::int64_t>(elements.size() / SizeOf(dtype)) / layout.rows / 8 * 8;
      CAPTURE(NameOf(dtype), finite, columns);
      ExpectSame(cuda, host, dtype, elements, [&](const Side& side, TensorRef tensor) {
        const Buffer amax = side.Upload(std::vector<float>{0.5f});
        const auto rows = side.ops().Rows(layout, side.stream());
        side.ops().fp8().Amax(*rows, columns, tensor, amax.get<float>(), side.stream());
        return side.Download<std::uint8_t>(amax);
      });
    }
  }
}

TEST_CASE("casts in blocks have the host's bits, along the dims and along the tokens") {
  if (!HaveDevice()) return;
  const Side cuda = CudaSide(), host = HostSide();
  constexpr int kHeads = 2;
  for (const Dtype from : {Dtype::kBf16, Dtype::kFp16}) {
    for (const bool chunked : {false, true}) {
      const std::int64_t count = 1 << 16;
      for (const int dim : {64, 32}) {
        const std::int64_t columns = kHeads * dim;
        const Layout layout =
            chunked ? Chunked(count / columns / 2)
                    : Layout{{{0, 0, static_cast<std::int32_t>(count / columns), 0}}, count / columns, 1};
        const std::vector<std::int64_t> chunks(chunked ? layout.segments.size() : 1,
                                               chunked ? 40 : count / columns);
        Bytes elements = Elements(from);
        elements.resize(static_cast<std::size_t>(layout.rows * columns) * SizeOf(from));
        if (chunked) {  // neighbours of different sizes
          std::mt19937 random(5);
          for (std::uint8_t& byte : elements) byte = static_cast<std::uint8_t>(random());
        }
        for (const MxAxis axis : {MxAxis::kDim, MxAxis::kTokens}) {
          CAPTURE(NameOf(from), chunked, dim, static_cast<int>(axis));
          ExpectSame(cuda, host, from, elements, [&](const Side& side, TensorRef tensor) {
            const auto blocks = side.ops().fp8().Blocks(layout, chunks, side.stream());
            const auto elements_here = static_cast<std::size_t>(layout.rows * columns);
            const Buffer payload = side.Poisoned(elements_here), exponents = side.Poisoned(elements_here),
                         values = side.Poisoned(elements_here * 2);
            const MxTensor to{payload.get<std::uint8_t>(), exponents.get<std::uint8_t>()};
            side.ops().fp8().CastBlocks(*blocks, axis, kHeads, dim, tensor, to, side.stream());
            side.ops().fp8().DequantizeBlocks(*blocks, axis, kHeads, dim, to, {values.get(), Dtype::kBf16},
                                              side.stream());
            Bytes all = side.Download<std::uint8_t>(payload);
            for (const Buffer* more : {&exponents, &values}) {
              const Bytes bytes = side.Download<std::uint8_t>(*more);
              all.insert(all.end(), bytes.begin(), bytes.end());
            }
            return all;
          });
        }
      }
    }
  }
}

TEST_CASE("delta of payloads agrees with the host's") {
  if (!HaveDevice()) return;
  const Side cuda = CudaSide(), host = HostSide();
  constexpr int kHeads = 3;
  const Layout layout = Chunked(100);
  const int dim = GENERATE(64, 20);
  std::mt19937 random(9);
  std::uniform_int_distribution<int> byte(0, 255);
  Bytes out(static_cast<std::size_t>(layout.rows * kHeads * dim)), dout(out.size());
  for (std::uint8_t& each : out) each = static_cast<std::uint8_t>(byte(random) & 0xf7);   // no NaN
  for (std::uint8_t& each : dout) each = static_cast<std::uint8_t>(byte(random) & 0xbf);  // nor infinity
  const auto delta = [&](const Side& side) {
    const Buffer of_out = side.Upload(out), of_dout = side.Upload(dout),
                 scales = side.Upload(std::vector<float>{0.01f, 3.0f}),
                 result = side.Poisoned(static_cast<std::size_t>(layout.rows * kHeads) * sizeof(float));
    const auto rows = side.ops().Rows(layout, side.stream());
    side.ops().fp8().Delta(*rows, kHeads, dim, {of_out.get(), Dtype::kE4M3, scales.get<float>()},
                           {of_dout.get(), Dtype::kE5M2, scales.get<float>() + 1}, result.get<float>(),
                           side.stream());
    side.Wait();
    return side.Download<float>(result);
  };
  const std::vector<float> got = delta(cuda), want = delta(host);
  double largest = 0;
  for (const float x : want) largest = std::isnan(x) ? largest : std::max(largest, std::abs(double{x}));
  int wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool same =
        std::isnan(want[i]) ? std::isnan(got[i]) : std::abs(double{got[i]} - want[i]) <= 1e-5 * largest;
    wrong += same ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(largest > 0);
}

}  // namespace cppool::kernels::test
