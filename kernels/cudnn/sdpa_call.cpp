#include "kernels/cudnn/sdpa_call.h"

#include <cstddef>
#include <vector>

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

bool IsPayload(const cppool_tensor* tensor) {
  return tensor && tensor->code == CPPOOL_DL_FLOAT8_E4M3 && tensor->scale;
}

// Describes a tensor [batch, tokens, heads, dim].
TensorForm FormOf(const cppool_tensor& tensor) {
  const std::int64_t *d = tensor.shape, *s = tensor.strides;
  return {{d[0], d[2], d[1], d[3]}, {s[0], s[2], s[1], s[3]}};
}

// Describes a tensor [batch, heads, tokens].
TensorForm RowFormOf(const cppool_tensor& tensor) {
  const std::int64_t *d = tensor.shape, *s = tensor.strides;
  return {{d[0], d[1], d[2], 1}, {s[0], s[1], s[2], 1}};
}

// Describes a bias. Where a dimension is 1 the table's stride is 0, and cuDNN's samples have that of a packed
// tensor.
TensorForm BiasFormOf(const cppool_tensor& tensor) {
  TensorForm form;
  for (std::size_t axis = 4; axis-- > 0;) {
    form.dims[axis] = tensor.shape[axis];
    form.strides[axis] = tensor.strides[axis];
    if (form.dims[axis] == 1)
      form.strides[axis] = axis == 3 ? 1 : form.dims[axis + 1] * form.strides[axis + 1];
  }
  return form;
}

bool IsPacked(const TensorForm& form) {
  std::int64_t size = 1;
  for (std::size_t axis = 4; axis-- > 0; size *= form.dims[axis]) {
    if (form.strides[axis] != size) return false;
  }
  return true;
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
  std::vector<Named> named = {{"q", tensors->q, &to.q},
                              {"k", tensors->k, &to.k},
                              {"v", tensors->v, &to.v},
                              {"out", tensors->out, &to.out}};
  if (tensors->bias) named.push_back({"bias", tensors->bias, &to.bias});
  to.fp8 = call.p_scale != 0;
  to.p_scale = static_cast<float>(call.p_scale);
  if (to.fp8 && to.backward)
    return "cuDNN's backward pass in fp8 computes delta and always rounds dS; here delta is given, and the "
           "step that finds dS's scale does not round it";
  if (to.backward) {
    named.insert(named.end(), {{"dout", tensors->dout, &to.dout},
                               {"dq", tensors->dq, &to.dq},
                               {"dk", tensors->dk, &to.dk},
                               {"dv", tensors->dv, &to.dv}});
    if (tensors->bias) named.push_back({"dbias", tensors->dbias, &to.dbias});
  }
  for (const auto& [name, tensor, form] : named) {
    if (!tensor || tensor->ndim != 4) return std::string("it needs ") + name + ", of 4 dimensions";
    if (to.fp8 && form != &to.bias) {
      if (!IsPayload(tensor)) return std::string("it needs ") + name + " in e4m3 with a scale";
      *form = FormOf(*tensor);
      continue;
    }
    const std::optional<ElementType> type = TypeOf(*tensor);
    if (!type || tensor->scale || tensor->amax)
      return std::string("it takes tensors of fp16 and bf16 here, and ") + name + " is " + Describe(*tensor);
    if (form == &to.q || to.fp8) to.type = *type;
    if (*type != to.type)
      return "it takes tensors of one dtype here, and q is " + Describe(*tensors->q) + " but " + name +
             " is " + Describe(*tensor);
    *form = form == &to.bias || form == &to.dbias ? BiasFormOf(*tensor) : FormOf(*tensor);
  }
  if (!tensors->lse || tensors->lse->ndim != 3) return "it needs lse, of 3 dimensions";
  to.stats = RowFormOf(*tensors->lse);
  if (to.backward && tensors->bias) {
    if (to.dbias.dims != to.bias.dims) return "it needs dbias in the shape of bias";
    if (to.dbias.dims[2] != call.seqlen_q)
      return "cuDNN makes no dbias of a bias that all queries share (its documentation has bias as [1 or B, "
             "1 or H, S_q, S_kv])";
    if (!IsPacked(to.dbias)) return "it takes a packed dbias";
  }
  if (tensors->alibi_slopes) {
    const cppool_tensor& slopes = *tensors->alibi_slopes;
    if (slopes.ndim != 1 || slopes.strides[0] != 1) return "it needs alibi_slopes, of 1 dimension and packed";
    to.alibi = true;
    to.alibi_diagonal = call.alibi_diagonal;
  }
  if (tensors->max_logit && !to.backward) {
    if (tensors->max_logit->ndim != 3 || RowFormOf(*tensors->max_logit) != to.stats || !IsPacked(to.stats))
      return "it needs max_logit in the form of lse, and both packed";
    to.max_logit = true;
  }
  return std::nullopt;
}

}  // namespace cppool::kernels::cudnn
