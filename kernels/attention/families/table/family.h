// The family "table": a kernel of cppool/attention.h under cppool's schedules. Blocks are cut into
// rectangular calls (block_calls.h), whose results are merged in fp32.
#pragma once

#include <cppool/attention.h>

#include <string>
#include <string_view>

#include "kernels/attention/attention_family.h"

namespace cppool::kernels::table {

class TableFamily : public AttentionFamily {
 public:
  // `kernel` has been checked (kernel_library.h of the public headers) and outlives the family.
  explicit TableFamily(const cppool_attention_kernel& kernel) : kernel_(kernel) {}

  const cppool_attention_kernel& kernel() const { return kernel_; }
  const char* kernels() const override { return kernel_.name; }
  const char* version() const override { return kernel_.version; }
  const char* name() const override { return "table"; }
  Capabilities capabilities(const KernelRequest& request) const override {
    // How a library's kernel sums is its own.
    const bool may_sum_payloads = request.fp8 && std::string_view(kernel_.backend) != "host";
    return {.continues_softmax = true,
            .gradients_apart = false,
            .accumulates_gradients = true,
            .bias_with_gradients = true,
            .forward_qk = Fp8Form::kPayload,
            .forward_v = Fp8Form::kPayload,
            .backward = Fp8Form::kPayload,
            .fp8_sum_keys = may_sum_payloads ? Capabilities::kAllKeys : 0};
  }
  std::optional<std::string> Refusal(const KernelRequest& request) const override;
  std::unique_ptr<BlockAsker> AskBlocks() const override;
  std::size_t WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                             std::int64_t rows_kv) const override;
  std::size_t PlanBytes(const KernelRequest& request, const Layout& query, const Layout& key) const override;
  std::unique_ptr<AttentionKernel> Open(cppool_runtime* runtime) const override;

 private:
  const cppool_attention_kernel& kernel_;
};

}  // namespace cppool::kernels::table
