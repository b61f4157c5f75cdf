#include "kernels/attention/attention_family.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/error.h"

namespace cppool::kernels {

FamilyChoice ChooseFamily(std::string_view backend, const KernelRequest& request) {
  FamilyChoice choice;
  for (const AttentionFamily* family : AttentionFamilies(backend)) {
    const std::optional<std::string> refusal = family->Refusal(request);
    if (!refusal) return {family, ""};
    if (choice.refusal.empty()) choice.refusal = *refusal;
  }
  return choice;
}

KernelRequest RequestOf(const AttentionSpec& spec) {
  KernelRequest request;
  request.shape = {spec.dtypes,
                   spec.dim_qk,
                   spec.dim_v,
                   spec.heads,
                   spec.kv_heads,
                   0,
                   0,
                   spec.heads / spec.kv_heads,
                   static_cast<float>(spec.scale)};
  request.training = spec.training;
  request.bias = spec.bias;
  request.max_logit = spec.max_logit;
  request.deterministic = spec.deterministic;
  request.fp8 = spec.fp8;
  return request;
}

Fp8Ops& TensorOps::fp8() {
  throw RuntimeError(CPPOOL_UNSUPPORTED, "this runtime has no operations on fp8 tensors");
}

RankKernels::RankKernels(cppool_runtime* runtime, const AttentionFamily& used)
    : family(used), attention(used.Open(runtime)), ops(MakeTensorOps(runtime)) {}
RankKernels::~RankKernels() = default;

}  // namespace cppool::kernels
