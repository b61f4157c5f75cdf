/* Attention on the host, from the definition, in C99: the smallest kernel with everything that cppool/attention.h asks
 * for. It takes every mask and every stride; of dtypes bf16 alone. */
#include <cppool/attention.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float Load(const cppool_tensor* t, int64_t b, int64_t i, int64_t h, int64_t d) {
  const int64_t at = b * t->strides[0] + i * t->strides[1] + h * t->strides[2] + d;
  const uint32_t bits = (uint32_t)((const uint16_t*)t->data)[at] << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

static void Store(const cppool_tensor* t, int64_t b, int64_t i, int64_t h, int64_t d, float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fff + ((bits >> 16) & 1); /* to nearest even */
  ((uint16_t*)t->data)[b * t->strides[0] + i * t->strides[1] + h * t->strides[2] + d] =
      (uint16_t)(bits >> 16);
}

/* Of lse and delta, [batch, heads, queries] in fp32. */
static float* Row(const cppool_tensor* t, int64_t b, int64_t h, int64_t i) {
  return (float*)t->data + b * t->strides[0] + h * t->strides[1] + i * t->strides[2];
}

/* The keys that query i sees: first .. end. */
static void Seen(const cppool_attention_call* c, int64_t i, int64_t* first, int64_t* end) {
  const int64_t diagonal = i + (c->anchor == CPPOOL_BOTTOM_RIGHT ? c->seqlen_kv - c->seqlen_q : 0);
  *first = c->window_left >= 0 && diagonal > c->window_left ? diagonal - c->window_left : 0;
  *end = c->window_right >= 0 && diagonal + c->window_right + 1 < c->seqlen_kv
             ? diagonal + c->window_right + 1
             : c->seqlen_kv;
}

static float Logit(const cppool_attention_call* c, const cppool_attention_tensors* t, int64_t b, int64_t h,
                   int64_t i, int64_t j) {
  float sum = 0;
  for (int64_t d = 0; d < c->dim_qk; ++d)
    sum += Load(t->q, b, i, h, d) * Load(t->k, b, j, h / (c->heads / c->kv_heads), d);
  return (float)c->scale * sum;
}

static cppool_status Supports(const cppool_attention_call* c, char* why, size_t size) {
  const cppool_tensor* q = c->tensors->q;
  if (q->code == CPPOOL_DL_BFLOAT && q->bits == 16) return CPPOOL_OK;
  snprintf(why, size, "dtype bf16 alone");
  return CPPOOL_UNSUPPORTED;
}

/* The plan is a copy of the call; a row of sums is the workspace. */
static cppool_status Prepare(const cppool_attention_call* c, void** plan, size_t* workspace_bytes, char* why,
                             size_t size) {
  cppool_attention_call* copy = malloc(sizeof(*copy));
  if (!copy) {
    snprintf(why, size, "no memory");
    return CPPOOL_OUT_OF_MEMORY;
  }
  *copy = *c;
  copy->tensors = NULL;
  *plan = copy;
  *workspace_bytes =
      sizeof(float) * (size_t)(c->backward ? c->seqlen_kv * (c->dim_qk + c->dim_v) : c->seqlen_kv);
  return CPPOOL_OK;
}

static cppool_status Forward(void* plan, const cppool_attention_tensors* t, void* workspace,
                             cppool_stream stream, char* why, size_t size) {
  const cppool_attention_call* c = plan;
  float* p = workspace; /* [keys] */
  int64_t first, end;
  (void)stream, (void)why, (void)size;
  for (int64_t b = 0; b < c->batch; ++b)
    for (int64_t h = 0; h < c->heads; ++h)
      for (int64_t i = 0; i < c->seqlen_q; ++i) {
        float most = -INFINITY, sum = 0;
        Seen(c, i, &first, &end);
        for (int64_t j = first; j < end; ++j) most = fmaxf(most, p[j] = Logit(c, t, b, h, i, j));
        for (int64_t j = first; j < end; ++j) sum += p[j] = expf(p[j] - most);
        *Row(t->lse, b, h, i) = most + logf(sum);
        for (int64_t d = 0; d < c->dim_v; ++d) {
          float out = 0;
          for (int64_t j = first; j < end; ++j)
            out += p[j] * Load(t->v, b, j, h / (c->heads / c->kv_heads), d);
          Store(t->out, b, i, h, d, out / sum);
        }
      }
  return CPPOOL_OK;
}

static cppool_status Backward(void* plan, const cppool_attention_tensors* t, void* workspace,
                              cppool_stream stream, char* why, size_t size) {
  const cppool_attention_call* c = plan;
  const int64_t group = c->heads / c->kv_heads;
  float *dk = workspace, *dv = dk + c->seqlen_kv * c->dim_qk; /* of one key/value head */
  float dq[1024];
  int64_t first, end;
  (void)stream, (void)why, (void)size;
  for (int64_t b = 0; b < c->batch; ++b)
    for (int64_t kv = 0; kv < c->kv_heads; ++kv) {
      memset(dk, 0, sizeof(float) * (size_t)(c->seqlen_kv * (c->dim_qk + c->dim_v)));
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h)
        for (int64_t i = 0; i < c->seqlen_q; ++i) {
          memset(dq, 0, sizeof(dq));
          Seen(c, i, &first, &end);
          for (int64_t j = first; j < end; ++j) {
            const float p = expf(Logit(c, t, b, h, i, j) - *Row(t->lse, b, h, i)); /* lse of the whole row */
            float dp = 0;
            for (int64_t d = 0; d < c->dim_v; ++d) {
              dp += Load(t->dout, b, i, h, d) * Load(t->v, b, j, kv, d);
              dv[j * c->dim_v + d] += p * Load(t->dout, b, i, h, d);
            }
            const float ds = (float)c->scale * p * (dp - *Row(t->delta, b, h, i));
            for (int64_t d = 0; d < c->dim_qk; ++d) {
              dq[d] += ds * Load(t->k, b, j, kv, d);
              dk[j * c->dim_qk + d] += ds * Load(t->q, b, i, h, d);
            }
          }
          for (int64_t d = 0; d < c->dim_qk; ++d) Store(t->dq, b, i, h, d, dq[d]);
        }
      for (int64_t j = 0; j < c->seqlen_kv; ++j) {
        for (int64_t d = 0; d < c->dim_qk; ++d) Store(t->dk, b, j, kv, d, dk[j * c->dim_qk + d]);
        for (int64_t d = 0; d < c->dim_v; ++d) Store(t->dv, b, j, kv, d, dv[j * c->dim_v + d]);
      }
    }
  return CPPOOL_OK;
}

__attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention(void) {
  static const cppool_attention_kernel naive = {CPPOOL_ATTENTION_ABI,
                                                sizeof(naive),
                                                "naive",
                                                "1.0",
                                                "host",
                                                CPPOOL_ATTENTION_DETERMINISTIC,
                                                Supports,
                                                Prepare,
                                                Forward,
                                                Backward,
                                                free};
  static const cppool_attention_kernel* const all[] = {&naive, NULL};
  return all;
}
