// A call of a kernel that is not cppool's own, put under a trial: run on other memory than the schedule's, so
// that what it reads and writes beyond its tensors shows.
#pragma once

#include <cppool/runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cppool::kernels {

// `batch` times `rows` stretches of `row_bytes` bytes, from `offset` on; offset and strides in bytes.
struct TrialRows {
  std::int64_t offset = 0;
  std::int64_t batch = 1, rows = 0, row_bytes = 0;
  std::int64_t batch_stride = 0, row_stride = 0;
};

// A tensor is one or more such stretches of rows; what lies between them is not its own.
struct TrialTensor {
  const char* name = "";
  bool written = false;  // else read
  void* data = nullptr;
  std::vector<TrialRows> parts;

  // Bytes from the first to the last one, both included.
  std::int64_t extent() const {
    std::int64_t bytes = 0;
    for (const TrialRows& p : parts) {
      bytes = std::max(bytes,
                       p.offset + (p.batch - 1) * p.batch_stride + (p.rows - 1) * p.row_stride + p.row_bytes);
    }
    return bytes;
  }
};

struct TrialCall {
  std::string kernel;  // its name
  std::vector<TrialTensor> tensors;
  std::size_t workspace_bytes = 0;
  // Enqueues the call with each tensor, in their order, at `data`, and this workspace.
  using Run = std::function<void(const std::vector<void*>& data, void* workspace)>;
  Run run;
  // The same call with the strides of these tensors, which have as many parts of the same sizes. Empty: the
  // kernel does not take it.
  std::vector<TrialTensor> strided_tensors;
  Run run_strided;
};

class CallTrial {
 public:
  virtual ~CallTrial() = default;
  // In place of the call: reads and writes the call's tensors as it would. On the rank's thread; may wait for
  // the stream.
  virtual void Run(const TrialCall& call, cppool_stream stream) = 0;
};

}  // namespace cppool::kernels
