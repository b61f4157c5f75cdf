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

BiasExtent ExtentOfBias(const AttentionSpec& spec) {
  const BiasShape& shape = spec.bias_shape;
  const std::int64_t queries = shape.queries ? spec.seqlen_q : 1;
  const std::int64_t of_head = queries * spec.seqlen_kv;
  const std::int64_t of_sequence = (shape.heads ? spec.heads : 1) * of_head;
  return {.batch_stride = shape.batch ? of_sequence : 0,
          .head_stride = shape.heads ? of_head : 0,
          .query_stride = shape.queries ? spec.seqlen_kv : 0,
          .queries = queries,
          .keys = spec.seqlen_kv,
          .elements = (shape.batch ? spec.batch : 1) * of_sequence};
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
  if (spec.bias == BiasType::kPostScale) request.bias_extent = ExtentOfBias(spec);
  request.max_logit = spec.max_logit;
  request.deterministic = spec.deterministic;
  request.fp8 = spec.fp8;
  return request;
}

RankKernels::RankKernels(cppool_runtime* runtime, const AttentionFamily& used)
    : family(used), attention(used.Open(runtime)), ops(MakeTensorOps(runtime)) {}
RankKernels::~RankKernels() = default;

}  // namespace cppool::kernels
