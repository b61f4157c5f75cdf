// Forward attention in bf16: a warp for each query and head walks over its keys with an online softmax.
#include <cppool/attention.h>
#include <cuda_bf16.h>
#include <cstdio>

struct View {  // a tensor [batch, tokens, heads, dim], a bias, or fp32 values of each query; without data
               // where there is none
  void* data = nullptr;
  int64_t s[3] = {};
  View(const cppool_tensor* t) {
    if (t) data = t->data, s[0] = t->strides[0], s[1] = t->strides[1], s[2] = t->strides[2];
  }
  __device__ auto* At(int a, int b, int c) const {
    return (__nv_bfloat16*)data + a * s[0] + b * s[1] + c * s[2];
  }
  __device__ auto& Float(int a, int b, int c) const { return ((float*)data)[a * s[0] + b * s[1] + c * s[2]]; }
};
__global__ void Attend(cppool_attention_call c, View q, View k, View v, View bias, const void* slopes,
                       View out, View lse, View max_logit) {
  const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, lane = threadIdx.x,
            kv = h / (c.heads / c.kv_heads);
  const int64_t diagonal = i + (c.anchor == CPPOOL_BOTTOM_RIGHT ? c.seqlen_kv - c.seqlen_q : 0);
  const int first = c.window_left < 0 ? 0 : max(int64_t(0), diagonal - c.window_left);
  const int end = c.window_right < 0 ? c.seqlen_kv : min(c.seqlen_kv, diagonal + c.window_right + 1);
  float most = -INFINITY, sum = 0, o[8] = {};  // o: dims lane, lane + 32, ...
  for (int j = first; j < end; ++j) {
    float logit = 0;
    for (int d = lane; d < c.dim_qk; d += 32) logit += float(q.At(b, i, h)[d]) * float(k.At(b, j, kv)[d]);
    for (int step = 16; step > 0; step /= 2) logit += __shfl_xor_sync(~0u, logit, step);
    logit *= float(c.scale);
    if (bias.data) logit += float(bias.At(b, h, i)[j]);
    if (slopes) logit -= ((const float*)slopes)[h] * abs(j - i - int(c.alibi_diagonal));
    const float top = fmaxf(most, logit), keep = expf(most - top), weight = expf(logit - top);
    most = top, sum = sum * keep + weight;
    for (int d = lane, n = 0; d < c.dim_v; d += 32, ++n)
      o[n] = o[n] * keep + weight * float(v.At(b, j, kv)[d]);
  }
  for (int d = lane, n = 0; d < c.dim_v; d += 32, ++n) out.At(b, i, h)[d] = __float2bfloat16(o[n] / sum);
  if (lane == 0) lse.Float(b, h, i) = most + logf(sum);
  if (lane == 0 && max_logit.data) max_logit.Float(b, h, i) = most;
}

static cppool_status Supports(const cppool_attention_call* c, char* why, size_t size) {
  const bool ok = c->tensors->q->code == CPPOOL_DL_BFLOAT && c->dim_v <= 256;
  return ok ? CPPOOL_OK : (snprintf(why, size, "bf16 with head_dim_v up to 256 alone"), CPPOOL_UNSUPPORTED);
}
static cppool_status StatusOf(cudaError_t error, char* why, size_t size) {
  return error ? (snprintf(why, size, "%s", cudaGetErrorString(error)), CPPOOL_CUDA) : CPPOOL_OK;
}
static cppool_status Prepare(const cppool_attention_call* c, void** plan, size_t*, char* why, size_t size) {
  *plan = new cppool_attention_call(*c);
  cudaFuncAttributes
      loaded;  // asking loads the kernel; loading it later could wait for another rank's collective
  return StatusOf(cudaFuncGetAttributes(&loaded, Attend), why, size);
}
static cppool_status Forward(void* plan, const cppool_attention_tensors* t, void*, cppool_stream on,
                             char* why, size_t size) {
  const auto& c = *(cppool_attention_call*)plan;
  Attend<<<dim3(c.seqlen_q, c.heads, c.batch), 32, 0, (cudaStream_t)on>>>(
      c, t->q, t->k, t->v, t->bias, t->alibi_slopes ? t->alibi_slopes->data : nullptr, t->out, t->lse,
      t->max_logit);
  return StatusOf(cudaGetLastError(), why, size);
}
extern "C" __attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention() {
  static const cppool_attention_kernel warp{CPPOOL_ATTENTION_ABI,
                                            sizeof(warp),
                                            "warp",
                                            "1.0",
                                            "cuda",
                                            CPPOOL_ATTENTION_DETERMINISTIC | CPPOOL_ATTENTION_BIAS |
                                                CPPOOL_ATTENTION_ALIBI | CPPOOL_ATTENTION_MAX_LOGIT,
                                            Supports,
                                            Prepare,
                                            Forward,
                                            nullptr,
                                            [](void*plan) { delete (cppool_attention_call*)plan; }},
      *const all[] = {&warp, nullptr};
  return all;
}
