#include "kernels/attention/families/table/prepared_call.h"

#include <exception>
#include <string>

#include "kernels/attention/families/table/kernel_function.h"
#include "kernels/runtime.h"

namespace cppool::kernels::table {
namespace {

std::string Describe(const CallForm& form) {
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  std::string text = form.backward ? "backward" : "forward";
  text += ": batch " + number(form.batch) + ", " + number(form.queries) + " queries, " + number(form.keys) +
          " keys, heads " + number(form.heads) + "/" + number(form.kv_heads) + ", head dims " +
          number(form.dim_qk) + "/" + number(form.dim_v) + ", window [" + number(form.window_left) + ", " +
          number(form.window_right) + "]";
  return text + (form.anchor == CPPOOL_BOTTOM_RIGHT ? " from the bottom right" : "");
}

}  // namespace

RuntimeError KernelError(const cppool_attention_kernel& kernel, const char* name, const CallForm& form,
                         int status, std::string why) {
  if (why.empty()) why = "failed with status " + std::to_string(status) + " and does not say why";
  why = "kernel " + std::string(kernel.name) + ", " + name + ": " + why + " (" + Describe(form) + ")";
  const bool known = status == CPPOOL_OUT_OF_MEMORY || status == CPPOOL_CUDA || status == CPPOOL_UNSUPPORTED;
  return {known ? static_cast<cppool_status>(status) : CPPOOL_INTERNAL, why};
}

PreparedCall::PreparedCall(cppool_runtime* runtime, const cppool_attention_kernel& kernel,
                           const CallForm& form)
    : rt_(runtime), kernel_(kernel), form_(form) {
  const CallView view(form_, rt_->device);
  const auto refusal = CallKernel(kernel_, "prepare", form_, [&](char* why, std::size_t size) {
    return kernel_.prepare(view.call(), &plan_, &workspace_bytes_, why, size);
  });
  if (refusal) throw KernelError(kernel_, "prepare", form_, CPPOOL_UNSUPPORTED, *refusal);
}

PreparedCall::~PreparedCall() {
  if (!plan_ || !kernel_.destroy || (!on_host() && std::uncaught_exceptions() > 0)) return;
  try {
    const FloatEnvironment kept;
    kernel_.destroy(plan_);
  } catch (...) {  // nobody to tell
  }
}

void PreparedCall::Run(const CallData& data, void* workspace, cppool_stream stream) const {
  if (!on_host()) return RunKernel(data, workspace, stream);
  Enqueue(rt_, stream,
          [self = shared_from_this(), data, workspace, stream] { self->RunKernel(data, workspace, stream); });
}

void PreparedCall::RunKernel(const CallData& data, void* workspace, cppool_stream stream) const {
  const CallView view(form_, rt_->device, data);
  const auto function = form_.backward ? kernel_.backward : kernel_.forward;
  const char* const name = form_.backward ? "backward" : "forward";
  const auto refusal = CallKernel(kernel_, name, form_, [&](char* why, std::size_t size) {
    return function(plan_, view.tensors(), workspace, stream, why, size);
  });
  if (refusal)
    throw KernelError(
        kernel_, name, form_, CPPOOL_INTERNAL,
        "refused a call that supports and prepare have taken" + (refusal->empty() ? "" : ": " + *refusal));
}

}  // namespace cppool::kernels::table
