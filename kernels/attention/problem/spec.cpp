#include "kernels/attention/spec.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/numerics/philox.h"

namespace cppool::kernels {
namespace {

std::int32_t Clamp(std::int64_t distance) {
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(distance, -kOpen, kOpen));
}

bool HasOwnLengths(const AttentionSpec& spec) {
  return IsPadding(spec.mask) || spec.format == QkvFormat::kThd;
}

// Apart from the words behind tensors, which are InputTensor's numbers.
constexpr std::uint32_t kLengthWords = 0x4C454E00;

// The same on every rank and runtime: counters and integers only. A length is at least 1 and at most `most`.
std::vector<std::int64_t> DrawLengths(std::uint64_t seed, std::uint32_t side, std::int64_t batch,
                                      std::int64_t most) {
  std::vector<std::int64_t> lengths;
  std::vector<std::uint32_t> rank_words;
  for (std::int64_t b = 0; b < batch; ++b) {
    const PhiloxBlock words = InputWords(seed, kLengthWords + side, static_cast<std::uint32_t>(b), 0, 0, 0);
    lengths.push_back(1 + static_cast<std::int64_t>(std::uint64_t{words.word[0]} * most >> 32));
    rank_words.push_back(words.word[1]);
  }
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return rank_words[a] < rank_words[b]; });
  std::int64_t& longest = lengths[order[0]];
  longest = std::max(longest, most + 1 - longest);  // drawn evenly from the upper half
  if (batch >= 4) {
    lengths[order[1]] = 0;
    lengths[order[2]] = 1;
  }
  return lengths;
}

Sequences DrawSide(const AttentionSpec& spec, std::uint32_t side, std::int64_t seqlen, int world_size) {
  Sequences sequences = UniformSequences(spec.batch, seqlen);
  if (!HasOwnLengths(spec) || seqlen == 0) return sequences;
  sequences.length = DrawLengths(spec.seed, side, spec.batch, seqlen);
  if (spec.format != QkvFormat::kThd) return sequences;
  const std::int64_t unit = 2 * std::int64_t{world_size};
  for (std::size_t i = 0; i < sequences.room.size(); ++i) {
    sequences.room[i] = (sequences.length[i] + unit - 1) / unit * unit;
    if (!spec.pad_between_seqs) sequences.length[i] = sequences.room[i];
  }
  return sequences;
}

}  // namespace

bool Sequences::padded() const {
  return std::accumulate(length.begin(), length.end(), std::int64_t{0}) != rows;
}

Sequences UniformSequences(std::int64_t batch, std::int64_t length) {
  const std::vector<std::int64_t> same(static_cast<std::size_t>(batch), length);
  return {same, same, batch * length};
}

Band BandOf(const AttentionSpec& spec, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  const bool causal = IsCausal(spec.mask);
  std::int64_t left = spec.window_left;
  std::int64_t right = causal ? 0 : spec.window_right;
  if (!causal && left < 0 && right == 0) right = -1;  // (-1, 0) is how a causal mask is asked for elsewhere
  const bool top_left = spec.mask == AttnMaskType::kCausal || spec.mask == AttnMaskType::kPaddingCausal;
  const std::int64_t diagonal = top_left ? 0 : seqlen_kv - seqlen_q;
  left = std::min<std::int64_t>(left, 2 * std::int64_t{kOpen});  // no sum below overflows
  right = std::min<std::int64_t>(right, 2 * std::int64_t{kOpen});
  return {left < 0 ? -kOpen : Clamp(diagonal - left), right < 0 ? kOpen : Clamp(diagonal + right),
          Clamp(diagonal)};
}

std::vector<Band> BandsOf(const AttentionSpec& spec) {
  std::vector<Band> bands;
  bands.reserve(spec.queries.length.size());
  for (std::size_t i = 0; i < spec.queries.length.size(); ++i)
    bands.push_back(BandOf(spec, spec.queries.length[i], spec.keys.length[i]));
  return bands;
}

void DrawSequences(AttentionSpec& spec, int world_size) {
  spec.queries = DrawSide(spec, 0, spec.seqlen_q, world_size);
  spec.keys = spec.seqlen_q == spec.seqlen_kv ? spec.queries : DrawSide(spec, 1, spec.seqlen_kv, world_size);
}

std::vector<float> AlibiSlopes(int heads) {
  int power = 1;
  while (2 * power <= heads) power *= 2;
  std::vector<float> slopes;
  for (int h = 0; h < heads; ++h) {
    const double exponent = h < power ? -8.0 * (h + 1) / power : -8.0 * (2 * (h - power) + 1) / (2 * power);
    slopes.push_back(static_cast<float>(std::exp2(exponent)));
  }
  return slopes;
}

}  // namespace cppool::kernels
