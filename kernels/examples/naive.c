/* Attention on the host, from the definition, in C99: the smallest kernel with everything that
 * cppool/attention.h asks for. It takes every mask, every stride, a bias, ALiBi, max_logit and packed
 * sequences; of dtypes bf16 and fp8. */
#include <cppool/attention.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* e4m3 has 3 bits of fraction and exponents biased by 7, e5m2 has 2 and 15. */
static float LoadFp8(const cppool_tensor* t, int64_t at) {
  const int fraction = t->code == CPPOOL_DL_FLOAT8_E4M3 ? 3 : 2, bias = fraction == 3 ? 7 : 15;
  const int bits = ((const uint8_t*)t->data)[at], exponent = (bits & 127) >> fraction;
  const int part = bits & ((1 << fraction) - 1);
  const float value = exponent > 0 ? ldexpf((float)(part + (1 << fraction)), exponent - bias - fraction)
                                   : ldexpf((float)part, 1 - bias - fraction);
  return (bits & 128 ? -value : value) * *(const float*)t->scale->data;
}

/* To nearest even; what is too large becomes the largest. */
static float RoundFp8(float x, int fraction, int bias, float largest) {
  int exponent;
  if (!(fabsf(x) < largest)) return x > 0 ? largest : x < 0 ? -largest : x;
  frexpf(x, &exponent); /* |x| / 2^exponent is from 0.5 to 1 */
  if (exponent < 2 - bias) exponent = 2 - bias;
  return ldexpf(rintf(ldexpf(x, 1 + fraction - exponent)), exponent - 1 - fraction);
}

/* P and dS, rounded to fp8 as their products take them. */
static float ForProduct(const cppool_attention_call* c, float p) {
  return c->p_scale > 0 ? RoundFp8(p * (float)c->p_scale, 3, 7, 448) / (float)c->p_scale : p;
}
static float DsForProduct(const cppool_attention_tensors* t, float ds) {
  const float* scale = t->ds_scale ? t->ds_scale->data : NULL;
  return scale ? RoundFp8(ds * *scale, 2, 15, 57344) / *scale : ds;
}

static float Load(const cppool_tensor* t, int64_t at) {
  if (t->bits == 8) return LoadFp8(t, at);
  const uint32_t bits = (uint32_t)((const uint16_t*)t->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static void Store(const cppool_tensor* t, int64_t at, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fff + ((bits >> 16) & 1); /* to nearest even */
  ((uint16_t*)t->data)[at] = (uint16_t)(bits >> 16);
}

/* Where element (i, j, k, 0) is, and of a tensor of three dimensions element (i, j, k). */
static int64_t At(const cppool_tensor* t, int64_t i, int64_t j, int64_t k) {
  return i * t->strides[0] + j * t->strides[1] + k * t->strides[2];
}

/* One sequence of a call: which entry of the tensors' first dimension, its first rows there, and its lengths.
 */
typedef struct Sequence {
  int64_t entry, q, k, queries, keys;
} Sequence;

static Sequence SequenceAt(const cppool_attention_call* c, const cppool_attention_tensors* t, int64_t b) {
  Sequence s = {b, 0, 0, c->seqlen_q, c->seqlen_kv};
  if (t->cu_seqlens_q) { /* packed: all are rows of one entry */
    const int32_t *q = (const int32_t*)t->cu_seqlens_q->data + b,
                  *k = (const int32_t*)t->cu_seqlens_kv->data + b;
    s.entry = 0;
    s.q = q[0];
    s.k = k[0];
    s.queries = t->seqlens_q ? ((const int32_t*)t->seqlens_q->data)[b] : q[1] - q[0];
    s.keys = t->seqlens_kv ? ((const int32_t*)t->seqlens_kv->data)[b] : k[1] - k[0];
  }
  return s;
}

/* Query i sees the keys from first to end - 1. */
static void Seen(const cppool_attention_call* c, const Sequence* s, int64_t i, int64_t* first, int64_t* end) {
  const int64_t diagonal = i + (c->anchor == CPPOOL_BOTTOM_RIGHT ? s->keys - s->queries : 0);
  *first = c->window_left >= 0 && diagonal > c->window_left ? diagonal - c->window_left : 0;
  *end = c->window_right >= 0 && diagonal + c->window_right + 1 < s->keys ? diagonal + c->window_right + 1
                                                                          : s->keys;
}

static float Logit(const cppool_attention_call* c, const cppool_attention_tensors* t, const Sequence* s,
                   int64_t h, int64_t i, int64_t j) {
  const int64_t q = At(t->q, s->entry, s->q + i, h),
                k = At(t->k, s->entry, s->k + j, h / (c->heads / c->kv_heads));
  float sum = 0;
  for (int64_t d = 0; d < c->dim_qk; ++d) sum += Load(t->q, q + d) * Load(t->k, k + d);
  sum *= (float)c->scale;
  if (t->bias) sum += Load(t->bias, At(t->bias, s->entry, h, i) + j); /* strides of 0 broadcast */
  if (t->alibi_slopes)
    sum -= ((const float*)t->alibi_slopes->data)[h] * fabsf((float)(j - i - c->alibi_diagonal));
  return sum;
}

/* Where dS of a logit is added up: dbias is packed here, and has dimensions of 1 where bias is broadcast. */
static int64_t BiasAt(const int64_t* shape, int64_t b, int64_t h, int64_t i, int64_t j) {
  return ((b % shape[0] * shape[1] + h % shape[1]) * shape[2] + i % shape[2]) * shape[3] + j;
}

static cppool_status Supports(const cppool_attention_call* c, char* why, size_t size) {
  const cppool_tensor* q = c->tensors->q;
  if ((q->code == CPPOOL_DL_BFLOAT && q->bits == 16) || q->code == CPPOOL_DL_FLOAT8_E4M3) return CPPOOL_OK;
  snprintf(why, size, "dtypes bf16 and fp8 alone");
  return CPPOOL_UNSUPPORTED;
}

/* The plan is a copy of the call; sums in fp32 are the workspace. */
static cppool_status Prepare(const cppool_attention_call* c, void** plan, size_t* workspace_bytes, char* why,
                             size_t size) {
  const cppool_tensor* dbias = c->tensors->dbias;
  int64_t sums = c->backward ? c->seqlen_kv * (c->dim_qk + c->dim_v) : c->seqlen_kv;
  cppool_attention_call* copy = malloc(sizeof(*copy));
  if (!copy) {
    snprintf(why, size, "no memory");
    return CPPOOL_OUT_OF_MEMORY;
  }
  *copy = *c;
  copy->tensors = NULL;
  *plan = copy;
  if (dbias) sums += dbias->shape[0] * dbias->shape[1] * dbias->shape[2] * dbias->shape[3];
  *workspace_bytes = sizeof(float) * (size_t)sums;
  return CPPOOL_OK;
}

static cppool_status Forward(void* plan, const cppool_attention_tensors* t, void* workspace,
                             cppool_stream stream, char* why, size_t size) {
  const cppool_attention_call* c = plan;
  float* p = workspace; /* [keys] */
  int64_t first, end;
  (void)stream, (void)why, (void)size;
  for (int64_t b = 0; b < c->batch; ++b) {
    const Sequence s = SequenceAt(c, t, b);
    for (int64_t h = 0; h < c->heads; ++h)
      for (int64_t i = 0; i < s.queries; ++i) {
        float most = -INFINITY, sum = 0;
        Seen(c, &s, i, &first, &end);
        for (int64_t j = first; j < end; ++j) most = fmaxf(most, p[j] = Logit(c, t, &s, h, i, j));
        for (int64_t j = first; j < end; ++j) sum += p[j] = expf(p[j] - most);
        ((float*)t->lse->data)[At(t->lse, s.entry, h, s.q + i)] = most + logf(sum);
        if (t->max_logit) ((float*)t->max_logit->data)[At(t->max_logit, s.entry, h, s.q + i)] = most;
        for (int64_t d = 0; d < c->dim_v; ++d) {
          float out = 0;
          for (int64_t j = first; j < end; ++j)
            out += ForProduct(c, p[j]) *
                   Load(t->v, At(t->v, s.entry, s.k + j, h / (c->heads / c->kv_heads)) + d);
          Store(t->out, At(t->out, s.entry, s.q + i, h) + d, out / sum);
        }
      }
  }
  return CPPOOL_OK;
}

static cppool_status Backward(void* plan, const cppool_attention_tensors* t, void* workspace,
                              cppool_stream stream, char* why, size_t size) {
  const cppool_attention_call* c = plan;
  const int64_t group = c->heads / c->kv_heads;
  float *dk = workspace, *dv = dk + c->seqlen_kv * c->dim_qk; /* one key/value head */
  float* dbias = dv + c->seqlen_kv * c->dim_v;
  const int64_t* bias = t->dbias ? t->dbias->shape : NULL;
  float dq[1024], amax_ds = 0;
  int64_t first, end;
  (void)stream, (void)why, (void)size;
  if (bias) memset(dbias, 0, sizeof(float) * (size_t)(bias[0] * bias[1] * bias[2] * bias[3]));
  for (int64_t b = 0; b < c->batch; ++b) {
    const Sequence s = SequenceAt(c, t, b);
    for (int64_t kv = 0; kv < c->kv_heads; ++kv) {
      memset(dk, 0, sizeof(float) * (size_t)(c->seqlen_kv * (c->dim_qk + c->dim_v)));
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        for (int64_t i = 0; i < s.queries; ++i) {
          const int64_t q = At(t->q, s.entry, s.q + i, h), dout = At(t->dout, s.entry, s.q + i, h);
          const float lse = ((float*)t->lse->data)[At(t->lse, s.entry, h, s.q + i)]; /* the whole row's */
          const float delta = ((float*)t->delta->data)[At(t->delta, s.entry, h, s.q + i)];
          memset(dq, 0, sizeof(dq));
          Seen(c, &s, i, &first, &end);
          for (int64_t j = first; j < end; ++j) {
            const int64_t k = At(t->k, s.entry, s.k + j, kv), v = At(t->v, s.entry, s.k + j, kv);
            const float p = expf(Logit(c, t, &s, h, i, j) - lse);
            float dp = 0;
            for (int64_t d = 0; d < c->dim_v; ++d) {
              dp += Load(t->dout, dout + d) * Load(t->v, v + d);
              dv[j * c->dim_v + d] += ForProduct(c, p) * Load(t->dout, dout + d);
            }
            float ds = p * (dp - delta);
            if (bias) dbias[BiasAt(bias, b, h, i, j)] += ds;
            amax_ds = fmaxf(amax_ds, fabsf(ds));
            ds = DsForProduct(t, ds);
            for (int64_t d = 0; d < c->dim_qk; ++d) {
              dq[d] += (float)c->scale * ds * Load(t->k, k + d);
              dk[j * c->dim_qk + d] += (float)c->scale * ds * Load(t->q, q + d);
            }
          }
          for (int64_t d = 0; d < c->dim_qk; ++d) Store(t->dq, At(t->dq, s.entry, s.q + i, h) + d, dq[d]);
        }
      for (int64_t j = 0; j < s.keys; ++j) {
        for (int64_t d = 0; d < c->dim_qk; ++d)
          Store(t->dk, At(t->dk, s.entry, s.k + j, kv) + d, dk[j * c->dim_qk + d]);
        for (int64_t d = 0; d < c->dim_v; ++d)
          Store(t->dv, At(t->dv, s.entry, s.k + j, kv) + d, dv[j * c->dim_v + d]);
      }
    }
  }
  if (t->amax_ds) *(float*)t->amax_ds->data = amax_ds;
  if (bias)
    for (int64_t b = 0; b < bias[0]; ++b)
      for (int64_t h = 0; h < bias[1]; ++h)
        for (int64_t i = 0; i < bias[2]; ++i)
          for (int64_t j = 0; j < bias[3]; ++j)
            Store(t->dbias, At(t->dbias, b, h, i) + j, dbias[BiasAt(bias, b, h, i, j)]);
  return CPPOOL_OK;
}

__attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention(void) {
  static const cppool_attention_kernel naive = {CPPOOL_ATTENTION_ABI,
                                                sizeof(naive),
                                                "naive",
                                                "1.0",
                                                "host",
                                                CPPOOL_ATTENTION_DETERMINISTIC | CPPOOL_ATTENTION_BIAS |
                                                    CPPOOL_ATTENTION_ALIBI | CPPOOL_ATTENTION_MAX_LOGIT |
                                                    CPPOOL_ATTENTION_VARLEN | CPPOOL_ATTENTION_FP8,
                                                Supports,
                                                Prepare,
                                                Forward,
                                                Backward,
                                                free};
  static const cppool_attention_kernel* const all[] = {&naive, NULL};
  return all;
}
