// One distinct call of a kernel of cppool/attention.h on one rank: prepared, and then run as often as wanted.
#pragma once

#include <cppool/attention.h>

#include <cstddef>
#include <memory>

#include "kernels/attention/families/table/call.h"

namespace cppool::kernels::table {

// On the host its work owns it too, so that the kernel's plan goes after the work: it must be in shared_ptrs
// there.
class PreparedCall : public std::enable_shared_from_this<PreparedCall> {
 public:
  // On the rank's thread. Throws RuntimeError: CPPOOL_UNSUPPORTED with the kernel's reason when it refuses.
  // `kernel` and `runtime` outlive the object and its work.
  PreparedCall(cppool_runtime* runtime, const cppool_attention_kernel& kernel, const CallForm& form);
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;
  // On CUDA its work must be done; while an exception unwinds, which leaves this open, the kernel's plan is
  // left behind.
  ~PreparedCall();

  const CallForm& form() const { return form_; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  // Enqueues the call: forward or backward, as the form says. On the host what the kernel fails with is
  // reported when the stream is synchronised; on CUDA this throws RuntimeError.
  void Run(const CallData& data, void* workspace, cppool_stream stream) const;

 private:
  bool on_host() const { return rt_->device < 0; }
  void RunKernel(const CallData& data, void* workspace, cppool_stream stream) const;

  cppool_runtime* rt_;
  const cppool_attention_kernel& kernel_;
  const CallForm form_;
  void* plan_ = nullptr;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace cppool::kernels::table
