// The example's kernel with one fault each, which only a harness finds (kernels/checks.md), and the example
// itself, "warp".
#define cppool_attention example_kernels
#include "kernels/examples/forward.cu"
#undef cppool_attention

namespace {

constexpr size_t kWorkspace = 256;

// Bytes from a tensor's first element to behind its last one.
size_t Extent(const cppool_tensor& t) {
  int64_t last = 0;
  for (int i = 0; i < t.ndim; ++i) last += (t.shape[i] - 1) * t.strides[i];
  return (last + 1) * (t.bits / 8);
}

struct Plan {
  cppool_attention_call call;  // first: the example's functions take the plan for it
  cudaStream_t stream = nullptr;
  cudaEvent_t copied = nullptr;
  void* inputs[3] = {};  // as large as q, k, v
  int calls = 0;
};

__global__ void AddTo(float* to, const float* from) { *to += *from; }
__global__ void Clear(uint16_t* to) { *to = 0; }
__global__ void AddUnits(float* to, int units) { *to = __int_as_float(__float_as_int(*to) + units); }

cppool_status PrepareBad(const cppool_attention_call* c, void** plan, size_t* workspace, char* why,
                         size_t size) {
  auto* made = new Plan{*c};
  *plan = made;
  *workspace = kWorkspace;
  cudaFuncAttributes loaded;
  cudaError_t error = cudaFuncGetAttributes(&loaded, Attend);
  if (!error) error = cudaFuncGetAttributes(&loaded, AddTo);
  if (!error) error = cudaFuncGetAttributes(&loaded, AddUnits);
  if (!error) error = cudaFuncGetAttributes(&loaded, Clear);
  if (!error) error = cudaStreamCreateWithFlags(&made->stream, cudaStreamNonBlocking);
  if (!error) error = cudaEventCreateWithFlags(&made->copied, cudaEventDisableTiming);
  const cppool_tensor* const inputs[3] = {c->tensors->q, c->tensors->k, c->tensors->v};
  for (int i = 0; i < 3 && !error; ++i) error = cudaMalloc(&made->inputs[i], Extent(*inputs[i]));
  return StatusOf(error, why, size);
}

void DestroyBad(void* opaque) {
  auto* plan = static_cast<Plan*>(opaque);
  for (void* input : plan->inputs) cudaFree(input);
  if (plan->copied) cudaEventDestroy(plan->copied);
  if (plan->stream) cudaStreamDestroy(plan->stream);
  delete plan;
}

cppool_status WritesBehind(void* plan, const cppool_attention_tensors* t, void*, cppool_stream on, char* why,
                           size_t size) {
  const cppool_status status = Forward(plan, t, nullptr, on, why, size);
  if (status != CPPOOL_OK) return status;
  // Not cudaMemsetAsync, which refuses what is behind an allocation.
  Clear<<<1, 1, 0, (cudaStream_t)on>>>(static_cast<uint16_t*>(t->out->data) + Extent(*t->out) / 2);
  return StatusOf(cudaGetLastError(), why, size);
}

// Clears its workspace in its first call alone.
cppool_status KeepsWorkspace(void* opaque, const cppool_attention_tensors* t, void* workspace,
                             cppool_stream on, char* why, size_t size) {
  auto* plan = static_cast<Plan*>(opaque);
  if (plan->calls++ == 0) cudaMemsetAsync(workspace, 0, kWorkspace, (cudaStream_t)on);
  const cppool_status status = Forward(plan, t, workspace, on, why, size);
  if (status != CPPOOL_OK) return status;
  AddTo<<<1, 1, 0, (cudaStream_t)on>>>(static_cast<float*>(t->lse->data), static_cast<float*>(workspace));
  return StatusOf(cudaGetLastError(), why, size);
}

// Takes the rows of k for packed.
cppool_status TakesPacked(void* plan, const cppool_attention_tensors* t, void*, cppool_stream on, char* why,
                          size_t size) {
  const int64_t* shape = t->k->shape;
  int64_t packed[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
  cppool_tensor k = *t->k;
  k.strides = packed;
  cppool_attention_tensors tensors = *t;
  tensors.k = &k;
  return Forward(plan, &tensors, nullptr, on, why, size);
}

// Says that it is deterministic, and is not.
cppool_status Drifts(void* opaque, const cppool_attention_tensors* t, void*, cppool_stream on, char* why,
                     size_t size) {
  auto* plan = static_cast<Plan*>(opaque);
  const cppool_status status = Forward(plan, t, nullptr, on, why, size);
  if (status != CPPOOL_OK) return status;
  AddUnits<<<1, 1, 0, (cudaStream_t)on>>>(static_cast<float*>(t->lse->data), plan->calls++);
  return StatusOf(cudaGetLastError(), why, size);
}

// Reads its inputs on a stream of its own, which waits for nothing.
cppool_status OwnStream(void* opaque, const cppool_attention_tensors* t, void*, cppool_stream on, char* why,
                        size_t size) {
  auto* plan = static_cast<Plan*>(opaque);
  cppool_tensor moved[3] = {*t->q, *t->k, *t->v};
  for (int i = 0; i < 3; ++i) {
    cudaMemcpyAsync(plan->inputs[i], moved[i].data, Extent(moved[i]), cudaMemcpyDeviceToDevice, plan->stream);
    moved[i].data = plan->inputs[i];
  }
  cudaEventRecord(plan->copied, plan->stream);
  cudaStreamWaitEvent((cudaStream_t)on, plan->copied, 0);
  cppool_attention_tensors tensors = *t;
  tensors.q = &moved[0], tensors.k = &moved[1], tensors.v = &moved[2];
  return Forward(plan, &tensors, nullptr, on, why, size);
}

// Starts early (programmatic dependent launch) and does not wait for the kernel in front of it. From sm_90
// on.
cppool_status EarlyLaunch(void* opaque, const cppool_attention_tensors* t, void*, cppool_stream on, char* why,
                          size_t size) {
  const cppool_attention_call& c = static_cast<Plan*>(opaque)->call;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(c.seqlen_q, c.heads, c.batch);
  config.blockDim = dim3(32);
  config.stream = (cudaStream_t)on;
  config.attrs = &early;
  config.numAttrs = 1;
  return StatusOf(
      cudaLaunchKernelEx(&config, Attend, c, View(t->q), View(t->k), View(t->v), View(t->bias),
                         static_cast<const void*>(nullptr), View(t->out), View(t->lse), View(t->max_logit)),
      why, size);
}

cppool_attention_kernel Bad(const char* name, decltype(cppool_attention_kernel::forward) forward) {
  cppool_attention_kernel bad = *example_kernels()[0];
  bad.name = name;
  bad.features = CPPOOL_ATTENTION_DETERMINISTIC;
  bad.prepare = PrepareBad;
  bad.forward = forward;
  bad.destroy = DestroyBad;
  return bad;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention() {
  static const cppool_attention_kernel bad[] = {
      Bad("writes_behind", WritesBehind), Bad("keeps_workspace", KeepsWorkspace),
      Bad("takes_packed", TakesPacked),   Bad("drifts", Drifts),
      Bad("own_stream", OwnStream),       Bad("early_launch", EarlyLaunch)};
  static const cppool_attention_kernel* const all[] = {
      example_kernels()[0], &bad[0], &bad[1], &bad[2], &bad[3], &bad[4], &bad[5], nullptr};
  return all;
}
