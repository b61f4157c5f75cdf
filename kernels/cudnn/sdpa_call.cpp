#include "kernels/cudnn/sdpa_call.h"

#include <cstddef>

namespace cppool::kernels::cudnn {
namespace {

std::string Describe(const cppool_tensor& tensor) {
  switch (tensor.code) {
    case CPPOOL_DL_FLOAT:
      return "fp" + std::to_string(tensor.bits);
    case CPPOOL_DL_BFLOAT:
      return "bf" + std::to_string(tensor.bits);
    case CPPOOL_DL_FLOAT8_E4M3:
    case CPPOOL_DL_FLOAT8_E5M2:
      return "fp8";
    default:
      return "DLPack type " + std::to_string(tensor.code) + " of " + std::to_string(tensor.bits) + " bits";
  }
}

std::optional<ElementType> TypeOf(const cppool_tensor& tensor) {
  if (tensor.bits != 16) return std::nullopt;
  if (tensor.code == CPPOOL_DL_FLOAT) return ElementType::kFp16;
  if (tensor.code == CPPOOL_DL_BFLOAT) return ElementType::kBf16;
  return std::nullopt;
}

// From [batch, tokens, heads, dim].
TensorForm FormOf(const cppool_tensor& tensor) {
  const std::int64_t *d = tensor.shape, *s = tensor.strides;
  return {{d[0], d[2], d[1], d[3]}, {s[0], s[2], s[1], s[3]}};
}

}  // namespace

std::optional<std::string> ReadCall(const cppool_attention_call& call, SdpaCall& to) {
  const cppool_attention_tensors* tensors = call.tensors;
  if (call.struct_size < sizeof(call) || !tensors || tensors->struct_size < sizeof(*tensors))
    return "the call is that of an older cppool/attention.h";
  to = {};
  to.backward = call.backward != 0;
  to.deterministic = call.deterministic != 0;
  to.scale = call.scale;
  to.bottom_right = call.anchor == CPPOOL_BOTTOM_RIGHT;
  // cuDNN counts the diagonal as part of the window to its left.
  if (call.window_left >= 0) to.left_bound = call.window_left + 1;
  if (call.window_right >= 0) to.right_bound = call.window_right;

  struct Named {
    const char* name;
    const cppool_tensor* from;
    TensorForm* to;
  };
  const Named all[] = {{"q", tensors->q, &to.q},          {"k", tensors->k, &to.k},
                       {"v", tensors->v, &to.v},          {"out", tensors->out, &to.out},
                       {"dout", tensors->dout, &to.dout}, {"dq", tensors->dq, &to.dq},
                       {"dk", tensors->dk, &to.dk},       {"dv", tensors->dv, &to.dv}};
  const std::size_t count = to.backward ? std::size(all) : 4;
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [name, tensor, form] = all[i];
    if (!tensor || tensor->ndim != 4) return std::string("it needs ") + name + ", of 4 dimensions";
    const std::optional<ElementType> type = TypeOf(*tensor);
    if (!type || tensor->scale || tensor->amax)
      return std::string("it takes tensors of fp16 and bf16 here, and ") + name + " is " + Describe(*tensor);
    if (i == 0) to.type = *type;
    if (*type != to.type)
      return "it takes tensors of one dtype here, and q is " + Describe(*all[0].from) + " but " + name +
             " is " + Describe(*tensor);
    *form = FormOf(*tensor);
  }
  const cppool_tensor* lse = tensors->lse;
  if (!lse || lse->ndim != 3) return "it needs lse, of 3 dimensions";
  to.stats = {{lse->shape[0], lse->shape[1], lse->shape[2], 1},
              {lse->strides[0], lse->strides[1], lse->strides[2], 1}};
  return std::nullopt;
}

}  // namespace cppool::kernels::cudnn
