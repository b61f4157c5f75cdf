// Forward attention in bf16: a warp for each query and head walks over its keys with an online softmax.
#include <cppool/attention.h>
#include <cuda_bf16.h>
#include <cstdio>

struct Rows {  // a tensor [batch, tokens, heads, dim]
  __nv_bfloat16* data;
  int64_t batch, token, head;
  Rows(const cppool_tensor* t)
      : data((__nv_bfloat16*)t->data), batch(t->strides[0]), token(t->strides[1]), head(t->strides[2]) {}
  __device__ auto* At(int b, int i, int h) const { return data + b * batch + i * token + h * head; }
};

__global__ void Attend(cppool_attention_call c, int64_t diagonal, Rows q, Rows k, Rows v, Rows out, float* lse,
                       int64_t lse_batch, int64_t lse_head, int64_t lse_token) {
  const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x, kv = h / (c.heads / c.kv_heads);
  const int first = c.window_left < 0 ? 0 : max(int64_t(0), i + diagonal - c.window_left);
  const int end = c.window_right < 0 ? c.seqlen_kv : min(c.seqlen_kv, i + diagonal + c.window_right + 1);
  float most = -INFINITY, sum = 0, o[8] = {};  // of dims lane, lane + 32, ...
  for (int j = first; j < end; ++j) {
    float logit = 0;
    for (int d = lane; d < c.dim_qk; d += 32) logit += float(q.At(b, i, h)[d]) * float(k.At(b, j, kv)[d]);
    for (int step = 16; step > 0; step /= 2) logit += __shfl_xor_sync(~0u, logit, step);
    logit *= float(c.scale);
    const float top = fmaxf(most, logit), keep = expf(most - top), weight = expf(logit - top);
    most = top;
    sum = sum * keep + weight;
    for (int d = lane, n = 0; d < c.dim_v; d += 32, ++n) o[n] = o[n] * keep + weight * float(v.At(b, j, kv)[d]);
  }
  for (int d = lane, n = 0; d < c.dim_v; d += 32, ++n) out.At(b, i, h)[d] = __float2bfloat16(o[n] / sum);
  if (lane == 0) lse[b * lse_batch + h * lse_head + i * lse_token] = most + logf(sum);
}

static cppool_status Supports(const cppool_attention_call* c, char* why, size_t size) {
  if (c->tensors->q->code == CPPOOL_DL_BFLOAT && c->dim_v <= 256) return CPPOOL_OK;
  return snprintf(why, size, "bf16 with head_dim_v up to 256 alone"), CPPOOL_UNSUPPORTED;
}
static cppool_status Said(cudaError_t error, char* why, size_t size) {
  return error ? (snprintf(why, size, "%s", cudaGetErrorString(error)), CPPOOL_CUDA) : CPPOOL_OK;
}
static cppool_status Prepare(const cppool_attention_call* c, void** plan, size_t*, char* why, size_t size) {
  *plan = new cppool_attention_call(*c);
  cudaFuncAttributes loaded;  // now: loaded later it could wait for another rank's collective
  return Said(cudaFuncGetAttributes(&loaded, Attend), why, size);
}
static cppool_status Forward(void* plan, const cppool_attention_tensors* t, void*, cppool_stream stream, char* why,
                             size_t size) {
  const auto& c = *(cppool_attention_call*)plan;
  Attend<<<dim3(c.seqlen_q, c.heads, c.batch), 32, 0, (cudaStream_t)stream>>>(
      c, c.anchor == CPPOOL_BOTTOM_RIGHT ? c.seqlen_kv - c.seqlen_q : 0, t->q, t->k, t->v, t->out,
      (float*)t->lse->data, t->lse->strides[0], t->lse->strides[1], t->lse->strides[2]);
  return Said(cudaGetLastError(), why, size);
}
static void Destroy(void* plan) { delete (cppool_attention_call*)plan; }
extern "C" __attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention() {
  static const cppool_attention_kernel warp{CPPOOL_ATTENTION_ABI, sizeof(warp), "warp", "1.0", "cuda",
      CPPOOL_ATTENTION_DETERMINISTIC, Supports, Prepare, Forward, nullptr, Destroy}, *const all[] = {&warp, nullptr};
  return all;
}
