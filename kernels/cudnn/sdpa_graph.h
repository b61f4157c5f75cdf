// cuDNN's scaled dot-product attention through its C++ frontend (https://github.com/NVIDIA/cudnn-frontend),
// whose headers sdpa_graph.cpp alone includes: they take most of a minute to compile.
#pragma once

#include <cppool/attention.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "kernels/cudnn/sdpa_call.h"

namespace cppool::kernels::cudnn {

// What cuDNN or its frontend failed with; `status` is what cppool/attention.h calls it, CPPOOL_UNSUPPORTED
// included.
class Error : public std::runtime_error {
 public:
  Error(cppool_status status, const std::string& what) : std::runtime_error(what), status_(status) {}
  cppool_status status() const { return status_; }

 private:
  cppool_status status_;
};

// The versions of libcudnn, of the headers and of the frontend, such as "9.19.0 (built with 9.28.0,
// frontend 1.32.0)". Throws Error: libcudnn was not found, or is not one that works.
const std::string& Version();

// Belongs to the thread that makes it and to the device that is current then. Throws Error.
class Handle {
 public:
  Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() = delete;  // cudnnDestroy waits for the device: handles live as long as the process
  void* get() const { return handle_; }
  void* plan_stream() const { return plan_stream_; }  // a cudaStream_t on which plans are tried out

 private:
  void* handle_ = nullptr;
  void* plan_stream_ = nullptr;
};

// One call as a graph with its plan.
class SdpaGraph {
 public:
  // What the frontend has against the call on a device of this compute capability (90: sm_90); nothing when
  // it takes it. It knows documented limits by libcudnn's version. Any thread, microseconds, no device.
  // Throws Error, as Version.
  static std::optional<std::string> Refusal(const SdpaCall& call, int compute_capability);

  // Builds the plan and loads its kernels: a second for the first call of a kind, 50 ms for others. On the
  // handle's thread, as Run. Throws Error.
  SdpaGraph(const SdpaCall& call, int compute_capability, const Handle& handle);
  ~SdpaGraph();
  SdpaGraph(const SdpaGraph&) = delete;
  SdpaGraph& operator=(const SdpaGraph&) = delete;

  std::size_t workspace_bytes() const;
  // Enqueues the call. `workspace` may be NULL when it has no bytes. Throws Error.
  void Run(const Handle& handle, const cppool_attention_tensors& tensors, void* workspace,
           cppool_stream stream) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cppool::kernels::cudnn
