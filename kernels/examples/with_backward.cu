// Attention in bf16 with its gradients, with a bias, ALiBi and max_logit: a warp for each vector of the
// output, of dq, and of dk and dv, and for each element of dbias, so that every sum has one order and no
// atomics.
#include <cppool/attention.h>
#include <cuda_bf16.h>
#include <cstdio>

namespace {

constexpr int kPerLane = 8;  // elements of a vector that a lane holds: head dims up to 256

struct Rows {  // a tensor [batch, tokens, heads, dim], or a bias [batch, heads, queries, keys]
  __nv_bfloat16* data = nullptr;
  int64_t batch = 0, token = 0, head = 0;
  Rows() = default;
  explicit Rows(const cppool_tensor* t)
      : data((__nv_bfloat16*)t->data), batch(t->strides[0]), token(t->strides[1]), head(t->strides[2]) {}
  __device__ __nv_bfloat16* At(int b, int i, int h) const { return data + b * batch + i * token + h * head; }
};

struct Shape {  // a bias; a dimension is 1 where it is broadcast
  int batch, heads, queries;
};

struct Values {  // fp32 [batch, heads, tokens]
  float* data = nullptr;
  int64_t batch = 0, head = 0, token = 0;
  Values() = default;
  explicit Values(const cppool_tensor* t)
      : data((float*)t->data), batch(t->strides[0]), head(t->strides[1]), token(t->strides[2]) {}
  __device__ float& At(int b, int h, int i) const { return data[b * batch + h * head + i * token]; }
};

// Query i sees the keys i + low .. i + high.
struct Problem {
  int queries, keys, heads, group, dim_qk, dim_v, batch, low, high, alibi_diagonal;
  float scale;
};

struct Tensors {
  Rows q, k, v, out, dout, dq, dk, dv, bias, dbias;
  Values lse, delta, max_logit;
  const float* slopes = nullptr;
};

__device__ float Dot(const __nv_bfloat16* a, const __nv_bfloat16* b, int dim) {
  float sum = 0;
  for (int d = threadIdx.x; d < dim; d += 32) sum += float(a[d]) * float(b[d]);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return sum;
}

// sum = keep * sum + weight * row, in the lanes' elements.
__device__ void Add(float* sum, float keep, float weight, const __nv_bfloat16* row, int dim) {
  for (int d = threadIdx.x, n = 0; d < dim; d += 32, ++n) sum[n] = keep * sum[n] + weight * float(row[d]);
}

__device__ void Store(__nv_bfloat16* row, const float* sum, float factor, int dim) {
  for (int d = threadIdx.x, n = 0; d < dim; d += 32, ++n) row[d] = __float2bfloat16(factor * sum[n]);
}

__device__ float Logit(const Problem& p, const Tensors& t, int b, int h, int i, int j) {
  float logit = p.scale * Dot(t.q.At(b, i, h), t.k.At(b, j, h / p.group), p.dim_qk);
  if (t.bias.data) logit += float(t.bias.At(b, h, i)[j]);  // strides of 0 broadcast
  if (t.slopes) logit -= t.slopes[h] * abs(j - i - p.alibi_diagonal);
  return logit;
}

__global__ void Forward(Problem p, Tensors t) {
  const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, kv = h / p.group;
  float most = -INFINITY, sum = 0, out[kPerLane] = {};
  for (int j = max(0, i + p.low); j <= min(p.keys - 1, i + p.high); ++j) {
    const float logit = Logit(p, t, b, h, i, j);
    const float top = fmaxf(most, logit), keep = expf(most - top), weight = expf(logit - top);
    most = top;
    sum = sum * keep + weight;
    Add(out, keep, weight, t.v.At(b, j, kv), p.dim_v);
  }
  Store(t.out.At(b, i, h), out, 1 / sum, p.dim_v);
  if (threadIdx.x == 0) t.lse.At(b, h, i) = most + logf(sum);
  if (threadIdx.x == 0 && t.max_logit.data) t.max_logit.At(b, h, i) = most;
}

struct Gradient {
  float p, ds;
};
// Uses lse and delta of the whole row, whose other keys are in other calls.
__device__ Gradient GradientAt(const Problem& p, const Tensors& t, int b, int h, int i, int j) {
  const int kv = h / p.group;
  const float weight = expf(Logit(p, t, b, h, i, j) - t.lse.At(b, h, i));
  return {weight, weight * (Dot(t.dout.At(b, i, h), t.v.At(b, j, kv), p.dim_v) - t.delta.At(b, h, i))};
}

__global__ void BackwardQuery(Problem p, Tensors t) {
  const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  float dq[kPerLane] = {};
  for (int j = max(0, i + p.low); j <= min(p.keys - 1, i + p.high); ++j)
    Add(dq, 1, GradientAt(p, t, b, h, i, j).ds, t.k.At(b, j, h / p.group), p.dim_qk);
  Store(t.dq.At(b, i, h), dq, p.scale, p.dim_qk);
}

__global__ void BackwardKey(Problem p, Tensors t) {
  const int j = blockIdx.x, kv = blockIdx.y, b = blockIdx.z;
  float dk[kPerLane] = {}, dv[kPerLane] = {};
  for (int h = kv * p.group; h < (kv + 1) * p.group; ++h) {
    for (int i = max(0, j - p.high); i <= min(p.queries - 1, j - p.low); ++i) {
      const Gradient g = GradientAt(p, t, b, h, i, j);
      Add(dk, 1, g.ds, t.q.At(b, i, h), p.dim_qk);
      Add(dv, 1, g.p, t.dout.At(b, i, h), p.dim_v);
    }
  }
  Store(t.dk.At(b, j, kv), dk, p.scale, p.dim_qk);
  Store(t.dv.At(b, j, kv), dv, 1, p.dim_v);
}

// Sums dS over what the bias is broadcast to; 0 where nothing is seen.
__global__ void BackwardBias(Problem p, Tensors t, Shape shape) {
  const int j = blockIdx.x, first_i = blockIdx.y, first_h = blockIdx.z % shape.heads,
            first_b = blockIdx.z / shape.heads;
  float sum = 0;
  for (int b = first_b; b < p.batch; b += shape.batch) {
    for (int h = first_h; h < p.heads; h += shape.heads) {
      for (int i = first_i; i < p.queries; i += shape.queries) {
        if (j >= i + p.low && j <= i + p.high) sum += GradientAt(p, t, b, h, i, j).ds;
      }
    }
  }
  if (threadIdx.x == 0) t.dbias.At(first_b, first_h, first_i)[j] = __float2bfloat16(sum);
}

cppool_status StatusOf(cudaError_t error, char* why, size_t size) {
  if (error == cudaSuccess) return CPPOOL_OK;
  snprintf(why, size, "%s", cudaGetErrorString(error));
  return CPPOOL_CUDA;
}

cppool_status Supports(const cppool_attention_call* c, char* why, size_t size) {
  if (c->tensors->q->code == CPPOOL_DL_BFLOAT && c->dim_qk <= 32 * kPerLane && c->dim_v <= 32 * kPerLane)
    return CPPOOL_OK;
  snprintf(why, size, "bf16 with head dims up to %d alone", 32 * kPerLane);
  return CPPOOL_UNSUPPORTED;
}

cppool_status Prepare(const cppool_attention_call* c, void** plan, size_t*, char* why, size_t size) {
  cudaFuncAttributes
      loaded;  // asking loads the kernel; loading it later could wait for another rank's collective
  for (const void* kernel : {(const void*)Forward, (const void*)BackwardQuery, (const void*)BackwardKey,
                             (const void*)BackwardBias}) {
    const cudaError_t error = cudaFuncGetAttributes(&loaded, kernel);
    if (error != cudaSuccess) return StatusOf(error, why, size);
  }
  const int64_t diagonal = c->anchor == CPPOOL_BOTTOM_RIGHT ? c->seqlen_kv - c->seqlen_q : 0;
  *plan = new Problem{int(c->seqlen_q),
                      int(c->seqlen_kv),
                      int(c->heads),
                      int(c->heads / c->kv_heads),
                      int(c->dim_qk),
                      int(c->dim_v),
                      int(c->batch),
                      int(c->window_left < 0 ? -c->seqlen_q : diagonal - c->window_left),
                      int(c->window_right < 0 ? c->seqlen_kv : diagonal + c->window_right),
                      int(c->alibi_diagonal),
                      float(c->scale)};
  return CPPOOL_OK;
}

// The tensors that are added to the logits.
void SetBias(const cppool_attention_tensors* from, Tensors& t) {
  if (from->bias) t.bias = Rows(from->bias);
  if (from->alibi_slopes) t.slopes = (const float*)from->alibi_slopes->data;
}

cppool_status RunForward(void* plan, const cppool_attention_tensors* from, void*, cppool_stream stream,
                         char* why, size_t size) {
  const Problem& p = *static_cast<Problem*>(plan);
  Tensors t;
  t.q = Rows(from->q), t.k = Rows(from->k), t.v = Rows(from->v), t.out = Rows(from->out),
  t.lse = Values(from->lse);
  if (from->max_logit) t.max_logit = Values(from->max_logit);
  SetBias(from, t);
  Forward<<<dim3(p.queries, p.heads, p.batch), 32, 0, (cudaStream_t)stream>>>(p, t);
  return StatusOf(cudaGetLastError(), why, size);
}

cppool_status RunBackward(void* plan, const cppool_attention_tensors* from, void*, cppool_stream stream,
                          char* why, size_t size) {
  const Problem& p = *static_cast<Problem*>(plan);
  Tensors t;
  t.q = Rows(from->q), t.k = Rows(from->k), t.v = Rows(from->v), t.dout = Rows(from->dout);
  t.dq = Rows(from->dq), t.dk = Rows(from->dk), t.dv = Rows(from->dv);
  t.lse = Values(from->lse), t.delta = Values(from->delta);
  SetBias(from, t);
  BackwardQuery<<<dim3(p.queries, p.heads, p.batch), 32, 0, (cudaStream_t)stream>>>(p, t);
  BackwardKey<<<dim3(p.keys, p.heads / p.group, p.batch), 32, 0, (cudaStream_t)stream>>>(p, t);
  if (from->dbias) {
    t.dbias = Rows(from->dbias);
    const int64_t* const n = from->dbias->shape;
    BackwardBias<<<dim3(n[3], n[2], n[0] * n[1]), 32, 0, (cudaStream_t)stream>>>(
        p, t, {int(n[0]), int(n[1]), int(n[2])});
  }
  return StatusOf(cudaGetLastError(), why, size);
}

}  // namespace

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
                                            RunForward,
                                            RunBackward,
                                            [](void* plan) { delete static_cast<Problem*>(plan); }};
  static const cppool_attention_kernel* const all[] = {&warp, nullptr};
  return all;
}
