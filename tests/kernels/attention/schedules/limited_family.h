// The host's kernels with restricted capabilities, to test the fallbacks of the schedules.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "kernels/attention/attention_family.h"

namespace cppool::test {

// A family with the host's kernels that reports `capabilities`, or what `of` says of a request. A call that
// needs other capabilities throws, and so does a call on one stream without the workspace of WorkspaceBytes,
// which every such call overwrites.
class LimitedFamily : public kernels::AttentionFamily {
 public:
  using CapabilitiesOf = std::function<kernels::Capabilities(const kernels::KernelRequest&)>;
  explicit LimitedFamily(kernels::Capabilities capabilities)
      : of_([capabilities](const kernels::KernelRequest&) { return capabilities; }) {}
  explicit LimitedFamily(CapabilitiesOf of) : of_(std::move(of)) {}

  const char* kernels() const override { return "test"; }
  const char* version() const override { return "1"; }
  const char* name() const override { return "limited"; }
  kernels::Capabilities capabilities(const kernels::KernelRequest& request) const override {
    return of_(request);
  }
  std::optional<std::string> Refusal(const kernels::KernelRequest& request) const override;
  std::size_t WorkspaceBytes(const kernels::KernelRequest& request, std::int64_t rows_q,
                             std::int64_t rows_kv) const override;
  std::size_t PlanBytes(const kernels::KernelRequest& request, const kernels::Layout& query,
                        const kernels::Layout& key) const override;
  std::unique_ptr<kernels::AttentionKernel> Open(cppool_runtime* runtime) const override;

 private:
  CapabilitiesOf of_;
};

}  // namespace cppool::test
