// What only a harness finds out about a kernel: that it writes beyond its tensors, depends on what its
// workspace held, on packed rows, or on inputs that are there before the work in front of it has written
// them.
#pragma once

#include <cppool/runtime.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "kernels/attention/call_trial.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// Each call runs on copies of its tensors, between guards. The copies hold NaN wherever no row is.
class KernelTrial : public CallTrial {
 public:
  enum class Kind {
    kStrides,     // rows have gaps between them; the workspace holds zeros
    kWorkspace,   // the workspace holds NaN
    kLateInputs,  // inputs are written by a slow kernel on the same stream, right before the call
  };
  static constexpr Kind kAll[] = {Kind::kStrides, Kind::kWorkspace, Kind::kLateInputs};
  static const char* NameOf(Kind kind);  // "strides", "workspace", "late_inputs": `against` of the checks

  // The runtime and the kernels outlive the trial.
  KernelTrial(cppool_runtime* runtime, CheckKernels& kernels) : rt_(runtime), kernels_(kernels) {}

  void Begin(Kind kind) { kind_ = kind, strided_ = false; }
  void Run(const TrialCall& call, cppool_stream stream) override;
  // The results of the trial that began last are not those of the run. Once for each trial.
  void ResultsDiffer();
  // The first write beyond the tensors; without one, the trials in which results differed, and what the
  // kernel must do. Empty: there was nothing.
  const std::string& finding() const { return write_.empty() ? differences_ : write_; }

 private:
  struct Place {  // of a tensor in the arena
    TrialTensor tensor;
    std::size_t offset;  // of its first row
  };
  struct Arrangement {
    std::vector<Place> places;
    std::size_t workspace = 0, bytes = 0;
  };
  static Arrangement Arrange(const std::vector<TrialTensor>& tensors, std::size_t workspace_bytes);
  // As CheckKernels::CopyRows, any number of copies; with a delay each kernel's elements are so much later.
  void CopyAll(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay, cppool_stream stream);
  std::string Locate(const TrialCall& call, const Arrangement& arranged,
                     const std::vector<TrialTensor>& originals, cppool_stream stream);

  cppool_runtime* rt_;
  CheckKernels& kernels_;
  Kind kind_ = Kind::kStrides;
  bool strided_ = false;  // a call since Begin had rows apart
  Buffer arena_, blank_;
  std::string kernel_;  // of the last call
  std::string write_, differences_;
};

}  // namespace cppool::kernels
