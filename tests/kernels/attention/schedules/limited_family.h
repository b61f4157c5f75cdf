// The host's kernels without what makes them more than a kernel of one block: what schedules do for such families.
#pragma once

#include <memory>

#include "kernels/attention/attention_family.h"

namespace cppool::test {

// A family with `capabilities` and the host's kernels. A call that goes beyond them throws, and so does one without the
// workspace that the family asks for, which every call writes to.
class LimitedFamily : public kernels::AttentionFamily {
 public:
  explicit LimitedFamily(kernels::Capabilities capabilities) : capabilities_(capabilities) {}

  const char* kernels() const override { return "test"; }
  const char* version() const override { return "1"; }
  const char* name() const override { return "limited"; }
  kernels::Capabilities capabilities() const override { return capabilities_; }
  std::optional<std::string> Refusal(const kernels::KernelRequest& request) const override;
  std::size_t WorkspaceBytes(const kernels::KernelRequest& request, std::int64_t rows_q,
                             std::int64_t rows_kv) const override;
  std::size_t PlanBytes(const kernels::KernelRequest& request, const kernels::Layout& query,
                        const kernels::Layout& key) const override;
  std::unique_ptr<kernels::AttentionKernel> Open(cppool_runtime* runtime) const override;

 private:
  kernels::Capabilities capabilities_;
};

}  // namespace cppool::test
