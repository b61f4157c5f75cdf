/* An attention kernel for one GPU (or one CPU) as a table of C functions. cppool runs such a kernel under its
 * context-parallel schedules: it partitions the tokens, cuts each block of queries and keys into rectangular
 * calls, merges what they return, and checks the whole against fp64. The kernel knows nothing of ranks.
 *
 * A shared library that exports
 *     const cppool_attention_kernel* const* cppool_attention(void);
 * (NULL-terminated; everything it points to lives as long as the library) is used with
 * `cppool run --kernels FILE.so`, or `FILE.so,NAME` for one of several. kernels/own_kernel.md has an example.
 *
 * One call: batch sequences of seqlen_q queries and seqlen_kv keys each, without padding.
 *     logit[i][j] = scale * dot(q[i], k[j]) + added[i][j]       for every key j that query i sees
 *     added[i][j] = bias[i][j], or ALiBi's -slope * abs(j - i - alibi_diagonal), or 0
 *     lse[i]      = log(sum over j of exp(logit[i][j]))         natural logarithm
 *     out[i]      = sum over j of exp(logit[i][j] - lse[i]) * v[j]
 * Query head h reads key/value head h / (heads / kv_heads). With the `backward` of a call:
 *     P[i][j] = exp(logit[i][j] - lse[i])       delta[i] = dot(out[i], dout[i])
 *     dS[i][j] = P[i][j] * (dot(dout[i], v[j]) - delta[i])
 *     dq[i] = scale * sum over j of dS[i][j] * k[j]             dk and dv are summed over the queries, and
 * over dk[j] = scale * sum over i of dS[i][j] * q[i]             the query heads of their key/value head
 *     dv[j] = sum over i of P[i][j] * dout[i]                   dbias is the sum of dS over what bias is
 *     dbias[i][j] = dS[i][j]                                    broadcast to, and 0 where nothing is seen
 * There lse, out and delta are those of the whole row over all keys of the problem, of which this call may
 * hold a part: the gradients are then exact parts of the whole. A kernel that recomputes lse from its keys is
 * wrong.
 *
 * Rules
 * - A function writes its results and does not add to what is there. It writes nothing else, in particular
 * not what lies between the rows of a tensor whose strides leave gaps, or rows of no sequence.
 * - Everything that takes time or memory (loading code, allocating, choosing an algorithm) is done in
 * `prepare`. forward and backward neither allocate nor synchronise: other ranks may be inside a collective.
 * - On CUDA `stream` is a cudaStream_t, the rank's device is current, and all calls for a plan are made on
 * its rank's thread. On the host the work is done when the function returns; it is called in the order of the
 *   stream, on any thread. Several ranks call at once, each with its own plans: no global state without a
 * lock.
 * - Errors: each function returns CPPOOL_OK or the kind of failure, and writes why, in one line for people,
 * to why[why_size] (snprintf fits). C++ exceptions must not leave it.
 * - Versions: all of this header is version 1, and smaller structs are refused. Later members are appended:
 *   compare struct_size before reading one. */
#ifndef CPPOOL_ATTENTION_H
#define CPPOOL_ATTENTION_H

#include <cppool/runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CPPOOL_ATTENTION_ABI 1

/* Element types, as DLPack has them: `code` and `bits` of cppool_tensor. */
#define CPPOOL_DL_INT 0          /* 32 */
#define CPPOOL_DL_FLOAT 2        /* 16: fp16; 32: fp32 */
#define CPPOOL_DL_BFLOAT 4       /* 16: bf16 */
#define CPPOOL_DL_FLOAT8_E4M3 10 /* 8; e4m3fn: without infinities */
#define CPPOOL_DL_FLOAT8_E5M2 12 /* 8 */
#define CPPOOL_DL_FLOAT8_E8M0 14 /* 8; scales of mxfp8 */
/* Devices, as DLPack has them. */
#define CPPOOL_DL_CPU 1
#define CPPOOL_DL_CUDA 2

/* A tensor. The members up to byte_offset are DLTensor of DLPack, so that a pointer to one can be cast to
 * DLTensor*. Shape and strides are in elements; the stride of the last dimension of q, k, v, out, bias and
 * their gradients is 1. q, k, v, out and their gradients are 16-byte aligned (fp8: 8), others as their
 * elements. */
typedef struct cppool_tensor cppool_tensor;
struct cppool_tensor {
  void* data; /* in device memory; NULL in cppool_attention_call */
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes; /* 1 */
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset; /* 0 */
  /* For fp8, else NULL. A stored element times the scale is the value: one fp32 (shape [1]). What is written
   * is divided by it. No call has e8m0 scales, by blocks of 32 elements. Fp8 is written with
   * CPPOOL_ATTENTION_FP8_OUT alone. */
  const cppool_tensor* scale;
  /* A call that writes the tensor raises this, in device memory, to its largest absolute value before
   * scaling. NULL so far. */
  float* amax;
};

/* The tensors of a call; NULL: there is none. Each of q, k, v, dout, out, bias and the gradients has its own
 * dtype; lse, delta, slopes and maxima are fp32, lengths int32. */
typedef struct cppool_attention_tensors {
  uint32_t struct_size;     /* sizeof(cppool_attention_tensors) */
  const cppool_tensor* q;   /* [batch, seqlen_q, heads, dim_qk] */
  const cppool_tensor* k;   /* [batch, seqlen_kv, kv_heads, dim_qk] */
  const cppool_tensor* v;   /* [batch, seqlen_kv, kv_heads, dim_v] */
  const cppool_tensor* out; /* [batch, seqlen_q, heads, dim_v]; forward writes it, backward reads it */
  const cppool_tensor* lse; /* [batch, heads, seqlen_q]; forward writes it, backward reads it */
  /* Only backward has these. */
  const cppool_tensor* dout;  /* [batch, seqlen_q, heads, dim_v] */
  const cppool_tensor* delta; /* [batch, heads, seqlen_q]: for a kernel that does not compute it itself */
  const cppool_tensor* dq;    /* [batch, seqlen_q, heads, dim_qk] */
  const cppool_tensor* dk;    /* [batch, seqlen_kv, kv_heads, dim_qk] */
  const cppool_tensor* dv;    /* [batch, seqlen_kv, kv_heads, dim_v] */

  /* With CPPOOL_ATTENTION_BIAS: [batch or 1, heads or 1, seqlen_q or 1, seqlen_kv], often a part of a larger
   * tensor. A dimension that is 1 is broadcast, and its stride is 0. dbias has the same shape. */
  const cppool_tensor* bias;
  const cppool_tensor* dbias; /* only backward has it, always with a bias */
  /* With CPPOOL_ATTENTION_ALIBI: [heads]. Never with a bias. */
  const cppool_tensor* alibi_slopes;
  /* With CPPOOL_ATTENTION_MAX_LOGIT: forward writes the largest logit of each row; shape and strides of lse.
   */
  const cppool_tensor* max_logit;
  /* With CPPOOL_ATTENTION_VARLEN: packed sequences of different lengths, which are rows of one buffer. Every
   * tensor above has then batch 1, and seqlen_q, seqlen_kv are the rows of the buffers. Sequence b has the
   * queries cu_seqlens_q[b] to cu_seqlens_q[b] + seqlens_q[b], and the keys likewise. Never with a bias or
   * ALiBi. */
  const cppool_tensor* cu_seqlens_q;  /* [batch + 1], ascending from 0; the last is the number of rows */
  const cppool_tensor* cu_seqlens_kv; /* likewise, of the keys */
  const cppool_tensor* seqlens_q;     /* [batch]; NULL: each sequence ends where the next one begins */
  const cppool_tensor* seqlens_kv;

  /* Backward with p_scale has this, fp32, [1]. dS[i][j] * ds_scale is rounded to e5m2 for the products of dq
   * and dk, which are divided by ds_scale. Its data is NULL in calls of which dS is not to be rounded. */
  const cppool_tensor* ds_scale;
  const cppool_tensor* amax_ds; /* backward writes the largest abs(dS[i][j]) before it is rounded */
} cppool_attention_tensors;

/* Where the diagonal of a mask is, from which windows are counted. */
typedef enum cppool_attention_anchor {
  CPPOOL_TOP_LEFT,    /* key i for query i */
  CPPOOL_BOTTOM_RIGHT /* key i + seqlen_kv - seqlen_q for query i: the last key for the last query */
} cppool_attention_anchor;

/* One distinct shape of call, of one of the two passes. Query i sees the keys from diagonal(i) - window_left
 * to diagonal(i) + window_right; -1: without a limit on that side. So (-1, -1) is no mask, (-1, 0) is causal,
 * and (128, 0) a sliding window. Every query sees a key and every key is seen. With (-1, -1), and where
 * seqlen_q == seqlen_kv in every sequence, both anchors are the same and `anchor` is CPPOOL_TOP_LEFT. With
 * cu_seqlens the mask is counted in each sequence, from its own lengths. */
typedef struct cppool_attention_call {
  uint32_t struct_size; /* sizeof(cppool_attention_call) */
  int32_t backward;     /* which function the call is for: 0 forward, 1 backward */
  /* 1: the same bits are wanted on every run. Only asked of a kernel with CPPOOL_ATTENTION_DETERMINISTIC. */
  int32_t deterministic;
  cppool_attention_anchor anchor;
  int64_t window_left, window_right;
  /* ALiBi's distance is counted from key i + alibi_diagonal for query i. It is not the mask's diagonal: the
   * call may be a part of a sequence, far from its beginning. */
  int64_t alibi_diagonal;
  int64_t batch;               /* sequences */
  int64_t seqlen_q, seqlen_kv; /* with cu_seqlens those of the longest sequence */
  int64_t heads, kv_heads;     /* kv_heads divides heads */
  int64_t dim_qk, dim_v;
  double scale;
  /* As later calls will give them, strides and scales included, but with data NULL. */
  const cppool_attention_tensors* tensors;
  /* With CPPOOL_ATTENTION_FP8, else 0: q, k and v are e4m3 and dout is e5m2, each with a scale. forward
   * rounds p_scale * exp(logit[i][j] - m) to e4m3 for the product with v, and divides the product by p_scale;
   * m is the largest logit of row i, or of the keys up to there. backward rounds p_scale * P[i][j] to e4m3
   * for the product with dout, and divides the product by p_scale; it rounds dS as ds_scale says. All
   * rounding is to nearest even and saturates. Sums, lse and dS are those of P before it is rounded. Use
   * delta as it is given: it is that of out and dout as the recipe stores them, and `out` here is rounded in
   * another way, also in the 16-bit backward pass of a case whose forward pass is in fp8. */
  double p_scale;
} cppool_attention_call;

/* What a kernel does beyond out, lse and their gradients, or in another way. `supports` may refuse single
 * calls. */
enum {
  CPPOOL_ATTENTION_DETERMINISTIC = 1, /* with call.deterministic the same inputs give the same bits */
  /* Takes fp32 for out, dq, dk, dv and dbias. Where parts are merged they then lose no precision; without it
   * they are in 16 bits. */
  CPPOOL_ATTENTION_FP32_RESULTS = 2,
  CPPOOL_ATTENTION_LSE_BASE2 = 4, /* its lse is a logarithm to base 2, in both passes */
  /* lse, delta and max_logit must be packed: strides heads * seqlen_q, seqlen_q, 1. */
  CPPOOL_ATTENTION_LSE_HEADS_FIRST = 8,
  /* These say which tensors it knows. Without one no call has them: cases with a bias, ALiBi or max_logit are
   * skipped, and packed sequences of different lengths get a call each. */
  CPPOOL_ATTENTION_BIAS = 16, /* and dbias in the backward pass */
  CPPOOL_ATTENTION_ALIBI = 32,
  CPPOOL_ATTENTION_MAX_LOGIT = 64,
  CPPOOL_ATTENTION_VARLEN = 128,
  /* fp8 with one scale for each tensor; out and gradients are in 16 bits or fp32 as ever. Without it, and for
   * recipes with scales of blocks (mxfp8), cases with dtype fp8 are skipped. A case whose backward pass is in
   * 16 bits has only forward calls in fp8. */
  CPPOOL_ATTENTION_FP8 = 256,
  /* Forward calls in fp8 write out in e4m3, with the scale of v, which no element of out exceeds: for a
   * kernel that has it in no other dtype. What it rounds then, cppool rounds once more. */
  CPPOOL_ATTENTION_FP8_OUT = 512
};

typedef struct cppool_attention_kernel {
  uint32_t abi;         /* CPPOOL_ATTENTION_ABI */
  uint32_t struct_size; /* sizeof(cppool_attention_kernel) */
  const char* name;     /* one line; unique in its library, without a comma */
  const char* version;  /* one line */
  const char* backend;  /* "cuda" or "host": where its memory is and what `stream` means */
  uint32_t features;    /* CPPOOL_ATTENTION_..., or 0 */

  /* CPPOOL_OK, or CPPOOL_UNSUPPORTED with the reason, which becomes the reason that a case is skipped. Any
   * other status is an error of the case. Asked on any thread, before there is a device, and often: it must
   * not use one and takes microseconds. Where cppool can cut a block in other ways (another anchor, squares
   * instead of a rectangle), it asks for those too. */
  cppool_status (*supports)(const cppool_attention_call* call, char* why, size_t why_size);

  /* Makes what the pass needs for calls of this shape; *plan may stay NULL. `workspace_bytes`: device memory
   * that each call gets, 256-byte aligned, shared with the calls of other plans between two calls.
   * CPPOOL_UNSUPPORTED is still possible, for what depends on the device. The call and what it points to are
   * gone afterwards. */
  cppool_status (*prepare)(const cppool_attention_call* call, void** plan, size_t* workspace_bytes, char* why,
                           size_t why_size);

  /* Enqueue the work. `workspace` is undefined on entry, and NULL where none was asked for. */
  cppool_status (*forward)(void* plan, const cppool_attention_tensors* tensors, void* workspace,
                           cppool_stream stream, char* why, size_t why_size);
  /* NULL: forward only. */
  cppool_status (*backward)(void* plan, const cppool_attention_tensors* tensors, void* workspace,
                            cppool_stream stream, char* why, size_t why_size);

  /* After the plan's work is done, on its rank's thread or in stream order. Not called when a case has failed
   * with work under way on CUDA: nothing may be waited for then. NULL: plans hold nothing. */
  void (*destroy)(void* plan);
} cppool_attention_kernel;

/* What the library exports, with default visibility. */
typedef const cppool_attention_kernel* const* (*cppool_attention_entry)(void);

#ifdef __cplusplus
}
#endif
#endif /* CPPOOL_ATTENTION_H */
