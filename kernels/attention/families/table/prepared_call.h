// One distinct call of a kernel of cppool/attention.h on one rank: prepared, and then run as often as wanted.
#pragma once

#include <cppool/attention.h>

#include <cstddef>
#include <memory>

#include "kernels/attention/families/table/call.h"

namespace cppool::kernels::table {

class PreparedCall {
 public:
  // On the rank's thread. Throws RuntimeError: CPPOOL_UNSUPPORTED with the kernel's reason when it refuses.
  // `kernel` and `runtime` outlive the object and its work.
  PreparedCall(cppool_runtime* runtime, const cppool_attention_kernel& kernel, const CallForm& form);
  PreparedCall(const PreparedCall&) = delete;
  PreparedCall& operator=(const PreparedCall&) = delete;
  // On the host the kernel's plan goes after the work that uses it. On CUDA that work must be done; while an
  // exception unwinds, which leaves this open, the plan is left behind.
  ~PreparedCall();

  const CallForm& form() const;
  std::size_t workspace_bytes() const;
  // Enqueues the call: forward or backward, as the form says. On the host what the kernel fails with is
  // reported when the stream is synchronised; on CUDA this throws RuntimeError.
  void Run(const CallData& data, void* workspace, cppool_stream stream) const;

 private:
  class State;
  std::shared_ptr<State> state_;
};

}  // namespace cppool::kernels::table
