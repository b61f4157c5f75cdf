// A call of a kernel that is not cppool's own, put under a trial: run on other memory than the schedule's, so that what it
// reads and writes beyond its tensors shows.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cppool::kernels {

// `batch` times `rows` stretches of `row_bytes` bytes; strides in bytes.
struct TrialTensor {
  const char* name = "";
  bool written = false;  // else read
  void* data = nullptr;
  std::int64_t batch = 1, rows = 0, row_bytes = 0;
  std::int64_t batch_stride = 0, row_stride = 0;

  // Bytes from the first to the last one, both included.
  std::int64_t extent() const { return (batch - 1) * batch_stride + (rows - 1) * row_stride + row_bytes; }
};

struct TrialCall {
  std::string kernel;  // its name
  std::vector<TrialTensor> tensors;
  std::size_t workspace_bytes = 0;
  // Enqueues the call with each tensor, in their order, at `data`, and this workspace.
  using Run = std::function<void(const std::vector<void*>& data, void* workspace)>;
  Run run;
  // The same call with the strides of these tensors. Empty: the kernel does not take it.
  std::vector<TrialTensor> strided_tensors;
  Run run_strided;
};

class CallTrial {
 public:
  virtual ~CallTrial() = default;
  // In place of the call: reads and writes the call's tensors as it would. On the rank's thread; may wait for the stream.
  virtual void Run(const TrialCall& call, cppool_stream stream) = 0;
};

}  // namespace cppool::kernels
