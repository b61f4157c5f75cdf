#include "kernels/attention/families/table/prepared_call.h"

#include <array>
#include <exception>
#include <string>
#include <string_view>

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

// Calls a function of the kernel; throws what it fails with.
template <typename Function>
void Call(const cppool_attention_kernel& kernel, const char* name, const CallForm& form,
          Function&& function) {
  std::array<char, 512> why{};
  int status = CPPOOL_INTERNAL;
  std::string text;
  try {
    status = static_cast<int>(function(why.data(), why.size()));
    why.back() = '\0';
    text = why.data();
  } catch (const std::exception& error) {
    text = std::string("threw ") + error.what();
  } catch (...) {
    text = "threw something that is not a std::exception";
  }
  if (status == CPPOOL_OK) return;
  if (text.empty()) text = "failed with status " + std::to_string(status) + " and does not say why";
  text = "kernel " + std::string(kernel.name) + ", " + name + ": " + text + " (" + Describe(form) + ")";
  switch (status) {
    case CPPOOL_OUT_OF_MEMORY:
    case CPPOOL_CUDA:
      throw RuntimeError(static_cast<cppool_status>(status), text);
    case CPPOOL_UNSUPPORTED:  // only before the first call
      if (std::string_view(name) == "prepare") throw RuntimeError(CPPOOL_UNSUPPORTED, text);
      [[fallthrough]];
    default:
      throw RuntimeError(CPPOOL_INTERNAL, text);
  }
}

}  // namespace

class PreparedCall::State {
 public:
  State(cppool_runtime* runtime, const cppool_attention_kernel& kernel, const CallForm& form)
      : rt_(runtime), kernel_(kernel), form_(form) {
    const CallView view(form_, rt_->device);
    Call(kernel_, "prepare", form_, [&](char* why, std::size_t size) {
      return kernel_.prepare(view.call(), &plan_, &workspace_bytes_, why, size);
    });
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    if (!plan_ || !kernel_.destroy || (!on_host() && std::uncaught_exceptions() > 0)) return;
    try {
      kernel_.destroy(plan_);
    } catch (...) {  // nobody to tell
    }
  }

  bool on_host() const { return rt_->device < 0; }
  cppool_runtime* runtime() const { return rt_; }
  const CallForm& form() const { return form_; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }

  void Run(const CallData& data, void* workspace, cppool_stream stream) const {
    const CallView view(form_, rt_->device, data);
    const auto function = form_.backward ? kernel_.backward : kernel_.forward;
    Call(kernel_, form_.backward ? "backward" : "forward", form_, [&](char* why, std::size_t size) {
      return function(plan_, view.tensors(), workspace, stream, why, size);
    });
  }

 private:
  cppool_runtime* rt_;
  const cppool_attention_kernel& kernel_;
  const CallForm form_;
  void* plan_ = nullptr;
  std::size_t workspace_bytes_ = 0;
};

PreparedCall::PreparedCall(cppool_runtime* runtime, const cppool_attention_kernel& kernel,
                           const CallForm& form)
    : state_(std::make_shared<State>(runtime, kernel, form)) {}
PreparedCall::~PreparedCall() = default;

const CallForm& PreparedCall::form() const { return state_->form(); }
std::size_t PreparedCall::workspace_bytes() const { return state_->workspace_bytes(); }

void PreparedCall::Run(const CallData& data, void* workspace, cppool_stream stream) const {
  if (!state_->on_host()) {
    state_->Run(data, workspace, stream);
    return;
  }
  // The work keeps the plan as long as it needs it.
  Enqueue(state_->runtime(), stream,
          [state = state_, data, workspace, stream] { state->Run(data, workspace, stream); });
}

}  // namespace cppool::kernels::table
