#include "daemon/attention_case/resolve.h"

#include <cfloat>
#include <iterator>

namespace cppool::attention_case {
namespace {

constexpr double kMaxSequence = 1 << 24;
constexpr double kMaxBatch = 65536;
constexpr double kMaxRanks = 64;
constexpr double kMaxSeed = 9223372036854775807.0;  // the largest signed integer of 64 bits

constexpr cppool_parameter Integer(const char* name, const char* default_json, double minimum, double maximum,
                                   const char* doc) {
  return {name, CPPOOL_TYPE_INTEGER, default_json, nullptr, minimum, maximum, 0, doc};
}
constexpr cppool_parameter Boolean(const char* name, const char* default_json, const char* doc) {
  return {name, CPPOOL_TYPE_BOOLEAN, default_json, nullptr, 0, 0, 0, doc};
}
constexpr cppool_parameter Word(const char* name, const char* default_json, const char* allowed_json,
                                const char* doc) {
  return {name, CPPOOL_TYPE_STRING, default_json, allowed_json, 0, 0, 0, doc};
}

// Cumulated lengths: batch_size + 1 entries.
constexpr cppool_parameter Cumulated(const char* name, const char* doc) {
  return {name, CPPOOL_TYPE_INTEGER_LIST, "null", nullptr, 0, kMaxBatch * kMaxSequence, 0, doc};
}

}  // namespace

// The default problem is small enough for a laptop, and its sizes suit every schedule up to 8 ranks.
extern const cppool_parameter kParameters[] = {
    Word("model", "null", nullptr,
         "a row of the model tables (cp_1_0, ...); parameters that are given override the row's"),
    Word("kernel_backend", "null", R"(["FlashAttention", "FusedAttention"])",
         "the table of the model; needed when both tables have the row with different parameters"),
    Integer("batch_size", "2", 1, kMaxBatch, "sequences"),
    Integer("max_seqlen_q", "384", 1, kMaxSequence,
            "queries per sequence, over all ranks; divisible by 2 * world_size"),
    Integer("max_seqlen_kv", "null", 1, kMaxSequence,
            "keys per sequence, over all ranks; null: max_seqlen_q"),
    Cumulated(
        "cu_seqlens_q",
        "where each sequence's queries begin and the last one's end, [0, ...]; for thd and padding masks; "
        "null: drawn from the seed"),
    Cumulated("cu_seqlens_kv",
              "the same for keys; null: as cu_seqlens_q, where max_seqlen_kv is max_seqlen_q"),
    Cumulated("cu_seqlens_q_padded",
              "thd: the same for places, divisible by 2 * world_size; null: lengths rounded up"),
    Cumulated("cu_seqlens_kv_padded", "the same for keys"),
    Integer("num_heads", "8", 1, 1024, "query heads"),
    Integer("num_gqa_groups", "null", 1, 1024, "key/value heads: divides num_heads; null: num_heads"),
    Integer("head_dim_qk", "64", 1, 1024, "head dimension of queries and keys"),
    Integer("head_dim_v", "null", 1, 1024, "head dimension of values; null: head_dim_qk"),
    Word("dtype", "\"bf16\"", R"(["bf16", "fp16", "fp8"])",
         "of q, k, v, out and the gradients; fp8: as the next six parameters say, and bf16 elsewhere"),
    Word("scaling_mode", "null", R"(["delayed", "current", "mxfp8"])",
         "fp8: scales of whole tensors, from the amax of a step before or of the tensor itself, or of blocks "
         "of 32 "
         "elements; null: delayed"),
    Boolean("fp8_dpa", "false", "fp8: 16-bit tensors in and out, casts inside; this or fp8_mha must be true"),
    Boolean("fp8_mha", "false",
            "fp8: q, k, v arrive in fp8 and out leaves so, with fp8_bwd dout, dq, dk and dv, too; not with "
            "mxfp8"),
    Boolean("fp8_bwd", "null", "fp8: the backward pass, too; null: true"),
    Boolean("f16_O", "null",
            "fp8: the output that the backward pass gets is 16-bit; false with delayed, true with mxfp8, "
            "either with "
            "current; null: false where it can be"),
    Word("fp8_products", "\"auto\"", R"(["auto", "native", "bf16"])",
         "fp8: 8-bit or 16-bit tensor cores multiply payloads with one scale for each tensor; auto: 8-bit "
         "ones where the kernels have them and are faster so"),
    Word("qkv_format", "\"bshd\"", R"(["bshd", "sbhd", "thd"])",
         "order of batch, sequence, head and dimension; thd: packed sequences"),
    Word("cp_comm_type", "\"p2p\"", R"(["p2p", "all_gather", "a2a", "a2a+p2p"])", "the schedule"),
    Integer("a2a_size", "2", 1, kMaxRanks,
            "a2a+p2p: how many adjacent ranks exchange heads, with a ring across their groups; a divisor of "
            "world_size, greater than 1 and smaller than it"),
    Word(
        "transfers", "\"auto\"", R"(["auto", "comm", "peer"])",
        "how tensors go from rank to rank: comm: calls of the transport; peer: copies between GPUs, which "
        "need "
        "no SM, also beside NCCL; auto: peer where all GPUs reach each other. ranks in the answer say which"),
    Word("launches", "\"auto\"", R"(["auto", "steps", "one"])",
         "p2p and all_gather, forward pass: steps: a launch of the kernel for each part of the keys; one: "
         "one launch that other ranks' keys arrive under, with one rank per GPU; auto: one where it can be "
         "and its memory is free. ranks in the answer say which"),
    Word(
        "attn_mask_type", "\"causal\"",
        R"(["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"])",
        "which keys a query sees"),
    {"window_size", CPPOOL_TYPE_INTEGER_LIST, "[-1, -1]", nullptr, -1, kMaxSequence, 2,
     "[left, right] of the sliding window; -1: open; with a causal mask right is 0"},
    Word("attn_bias_type", "\"no_bias\"", R"(["no_bias", "post_scale_bias", "alibi"])",
         "what is added to the scaled logits"),
    Word("bias_shape", "\"1hss\"", R"(["1hss", "11ss", "b1ss", "bhss", "111s"])",
         "over batch, heads, queries and keys; 1: the same for all"),
    Word("softmax_type", "\"vanilla\"", R"(["vanilla", "off-by-one", "learnable"])",
         "offset in the denominator of the softmax: none, 0, or one per head, drawn from the seed"),
    Boolean("return_max_logit", "false", "also the largest logit of each head"),
    Boolean("is_training", "true", "also the backward pass: dq, dk, dv, and of bias and offset"),
    Boolean("deterministic", "false",
            "the same bits in every run: checked by a second run, and each rank reports a digest"),
    Boolean("pad_between_seqs", "false", "thd: sequences do not fill their places"),
    // Kernels use it in fp32; above the maximum logits would overflow fp16.
    {"softmax_scale", CPPOOL_TYPE_NUMBER, "null", nullptr, FLT_MIN, 1024, 0,
     "of the logits; null: 1 / sqrt(head_dim_qk)"},
    Integer("seed", "1234", 0, kMaxSeed, "of the inputs"),
};
extern const std::size_t kParameterCount = std::size(kParameters);

}  // namespace cppool::attention_case
