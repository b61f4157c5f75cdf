// When a result is right: what CompareStats have to say against the two references of a case. All tolerances
// are here and in judge.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/check_kernels.h"
#include "kernels/attention/spec.h"

namespace cppool::kernels {

// The last ones are no results, but checked in fp8: quantized inputs, and rowsum(dO * O).
enum class CheckedTensor {
  kOut,
  kLse,
  kDq,
  kDk,
  kDv,
  kDbias,
  kDsoftmaxOffset,
  kMaxLogit,
  kQ,
  kK,
  kV,
  kDout,
  kDelta
};

const char* NameOf(CheckedTensor tensor);  // "out", "lse", "dq", ..., "d_softmax_offset"

// The dtype whose rounding decides how far a right result may be off: the tensor's own, and that of `out` for
// what is fp32 itself.
Dtype JudgedDtype(CheckedTensor tensor, const TensorDtypes& dtypes);

// Against the same kernel without CP: |a - b| <= absolute + relative * |b| everywhere, and RMS(a - b) <= rms
// * RMS(b) over all of it. Transformer Engine's tolerances alone let an all-zero dq pass, whose elements are
// smaller than `absolute`; the RMS does not. Where terms cancel (few keys in sight) or are large (a large
// scale), two right results differ by more: by no more, then, than twice a plain attention's error in the
// same dtype.
struct NoCpTolerance {
  double absolute;
  double relative;  // goes into CompareArgs::relative
  double rms;       // of lse and max_logit: infinity, their `absolute` is small enough
};
NoCpTolerance ToleranceNoCp(CheckedTensor tensor, Dtype dtype,
                            bool gqa);  // gqa: fewer key/value heads than query heads

// The element of a tensor that is furthest off.
struct WorstElement {
  std::vector<std::pair<const char*, std::int64_t>> index;  // {{"sequence", 0}, {"token", 17}, ...}
  double got = 0, wanted = 0;
};

struct Verdict {
  double max_abs_err = 0;
  double rel_err = 0;    // RMS of the difference over RMS of the reference; 0 when both are 0
  double tolerance = 0;  // of the absolute error
  bool ok = false;
  std::uint64_t mismatches = 0;  // positions where NaN or infinity differ; they take no part in the errors
  // Against the oracle: our largest error over plain attention's, or over the floor where that is larger.
  // Elsewhere 0.
  double ratio = 0;
  // JudgeBlock of the worst block; 0: not judged by blocks.
  double block_ratio = 0;
  std::string block = {};  // which one, and by how much it fails; empty: none does
  // Of a check that does not hold, where it is of elements:
  std::optional<WorstElement> worst = {};
  std::optional<std::uint64_t> bad = {};  // elements that are further off than they may be
  std::string where = {};  // what these share, in words: "head 3, tokens 0 to 63 of sequence 0"
};

// What the noise of a gradient depends on where its exact terms cancel. Where a large scale leaves each query
// one key, dq and dk are nothing else, and no check tells them from zeros: at the default inputs from a scale
// of 32 on.
struct GradientTerms {
  // dbias: how many (sequence, head) pairs one element is the sum of; d_softmax_offset: how many queries,
  // each with the square of its term's error, in units of that of a query that sees one key: 1 / keys^3,
  // since the offset's weight is about 1 / keys and the output, whose rounding it is, 1 / sqrt(keys).
  double summed = 1;
  double scale = 0.125;  // of the logits
  double sharpness = 1;  // the scale over the usual one, 1 / sqrt(head dimension)
  // dq and dk, where their terms do not cancel, are about this times as large as out and dv of the same
  // block; dbias: as the sum of a query's squared probabilities.
  double of_values = 0;
  bool of_payloads = false;  // logits may be products of 8-bit tensor cores
};

// A comparison of no elements never holds: a caller with nothing to compare should not ask.
//
// `plain`: a plain attention in the same dtype (OracleArgs::rounded) against the exact result; of no elements
// where that is not known.
Verdict JudgeNoCp(CheckedTensor tensor, Dtype dtype, bool gqa, const CompareStats& stats,
                  const CompareStats& plain, const GradientTerms& terms = {});

// Against the exact oracle, with FlashAttention's criterion: our largest error is at most a factor of that of
// a plain attention in the same dtype, plus a small floor; and so is the RMS of the errors, since a few large
// ones of early rows would hide many. All stats have the exact result as their `b`; `plain_here` is of the
// elements that `ours` has, `plain` of all.
Verdict JudgeOracle(CheckedTensor tensor, Dtype dtype, const CompareStats& ours, const CompareStats& plain,
                    const CompareStats& plain_here, const GradientTerms& terms = {});

// Blocks: kBlockRows rows of one head, or fewer. The limits above are those of a tensor's largest elements,
// and the outputs of the last queries and the gradients of the last keys may be far below. Returns the RMS of
// the block's error over its limit, or the largest error over its limit, whichever is more: at most 1 in a
// right result.
//
// A limit is 8 roundings of the block's elements; with `plain`, of plain attention in the same block, also 4
// times its error. For lse a quarter of it, and a few roundings in fp32. Where the terms of dq and dk cancel,
// their roundings remain: then `values`, the block of out or dv that has the same probabilities, says how
// large the terms are (dbias: sums of squared probabilities). NULL: of other tensors.
double JudgeBlock(CheckedTensor tensor, Dtype dtype, const BlockStats& block, const BlockStats* plain,
                  const BlockStats* values, const GradientTerms& terms);
// Limits a block of what is cast to fp8: against the oracle 1.5 times plain's RMS and 3 times its largest
// error, and a floor; without CP (`plain` NULL) 0.2 and 0.4 of the block's elements. Where the terms of dq
// and dk cancel, the noise of fp32 remains: `values` as above.
double JudgeBlockFp8(const BlockStats& block, const BlockStats* plain, const BlockStats* values,
                     const GradientTerms& terms);

// fp8: out, and dq, dk, dv of a backward pass in fp8. Every element is within the bound of its casts
// (CompareStats::max_of_bound). From kFp8Samples elements on the errors are statistics, too, and like those
// of plain fp8 attention (OracleFp8): their RMS at most 1.25 times as large, and at least 0.7 times (less
// means that a cast was left out); the largest at most 3 times; and the result neither too large nor too
// small altogether, by 2 % more than plain's (truncation for rounding, or a scale that is a little off).
inline constexpr std::uint64_t kFp8Samples = 65536;
// Where the statistics above do not apply.
struct Fp8Terms {
  // dq or dk: differences of equal fp32 sums where each query sees one key. A tensor whose reference is all
  // below that noise has the bound, and no error above the noise.
  bool cancel = false;
  // out that is not cast itself, with a schedule that casts P for two keys at a time: the larger one is 1 and
  // exact, in plain attention only the largest of a row. The RMS is then at least 0.25 times plain's.
  bool two_keys = false;
};
Verdict JudgeFp8(const CompareStats& ours, const CompareStats& plain_here, const Fp8Terms& terms = {});
// Against the same kernels without CP, whose backward pass has the same delta: twice the largest bound, and
// from kFp8Samples elements on an RMS of twice the relative error of plain fp8 attention, since two right
// results round independently. `ours`, `plain_here`, `plain`: as in JudgeOracle. Where `ours` has not all
// elements of `stats`, at least half of the largest element is allowed for each.
Verdict JudgeFp8NoCp(const CompareStats& stats, const CompareStats& ours, const CompareStats& plain_here,
                     const CompareStats& plain);
// Quantized values: `wrong` of `count` differ from those that the inputs give, or their scale does.
Verdict JudgeBits(std::uint64_t wrong, std::uint64_t count, double largest_error);

// Rows without a token, compared with zeros (one row of them, with a b_stride of 0): every element is 0 and
// nothing else.
Verdict JudgePadding(const CompareStats& against_zeros);

// A second run of the same: its digest is the first one's.
Verdict JudgeRerun(std::uint64_t first, std::uint64_t second);

}  // namespace cppool::kernels
