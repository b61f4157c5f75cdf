// The module libcppool_cudnn.so: cuDNN's attention as a kernel of cppool/attention.h.
#include <cppool/attention.h>

#include <cstdio>
#include <exception>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kernels/cudnn/library.h"
#include "kernels/cudnn/sdpa_call.h"
#include "kernels/cudnn/sdpa_graph.h"

namespace cppool::kernels::cudnn {
namespace {

// Limits that are asked for before CUDA has started are those of Hopper, of which cuDNN supports most.
constexpr int kAssumedCapability = 90;
constexpr std::size_t kKeptGraphs = 128;  // of a rank

// What one rank's thread has on one device.
struct RankState {
  explicit RankState(int device)
      : capability(ComputeCapability(device).value_or(kAssumedCapability)), handle(new Handle) {}

  struct Kept {
    SdpaCall call;
    std::shared_ptr<const SdpaGraph> graph;
  };

  // Returns the graph of an equal call before, or a new one.
  std::shared_ptr<const SdpaGraph> Graph(const SdpaCall& call) {
    for (auto kept = graphs.begin(); kept != graphs.end(); ++kept) {
      if (!(kept->call == call)) continue;
      graphs.splice(graphs.begin(), graphs, kept);
      return graphs.front().graph;
    }
    const auto graph = std::make_shared<const SdpaGraph>(call, capability, *handle);
    graphs.push_front({call, graph});
    for (auto kept = graphs.end(); graphs.size() > kKeptGraphs && kept != graphs.begin();) {
      --kept;
      if (kept->graph.use_count() == 1) kept = graphs.erase(kept);  // no plan has it
    }
    return graph;
  }

  int capability;
  Handle* handle;
  std::list<Kept> graphs;  // the last used first
};

// Kept to the end of the process: what cuDNN holds is released only after a wait for the device.
RankState& StateOfThread(int device) {
  static thread_local auto* const states = new std::map<int, std::unique_ptr<RankState>>;
  std::unique_ptr<RankState>& state = (*states)[device];
  if (!state) state = std::make_unique<RankState>(device);
  return *state;
}

struct Plan {
  std::shared_ptr<const SdpaGraph> graph;
  const Handle* handle;
};

// Calls the function; what it throws becomes a status with its text.
template <typename Function>
cppool_status Guard(char* why, std::size_t why_size, Function&& function) {
  try {
    function();
    return CPPOOL_OK;
  } catch (const Error& error) {
    std::snprintf(why, why_size, "%s", error.what());
    return error.status();
  } catch (const std::exception& error) {
    std::snprintf(why, why_size, "%s", error.what());
    return CPPOOL_INTERNAL;
  } catch (...) {
    std::snprintf(why, why_size, "an exception of an unknown type");
    return CPPOOL_INTERNAL;
  }
}

SdpaCall Read(const cppool_attention_call& call) {
  SdpaCall sdpa;
  if (auto refusal = ReadCall(call, sdpa)) throw Error(CPPOOL_UNSUPPORTED, *refusal);
  return sdpa;
}

cppool_status Supports(const cppool_attention_call* call, char* why, std::size_t why_size) {
  return Guard(why, why_size, [&] {
    const SdpaCall sdpa = Read(*call);
    const int capability = ComputeCapability(call->tensors->q->device_id).value_or(kAssumedCapability);
    if (auto refusal = SdpaGraph::Refusal(sdpa, capability)) throw Error(CPPOOL_UNSUPPORTED, *refusal);
  });
}

cppool_status Prepare(const cppool_attention_call* call, void** plan, std::size_t* workspace_bytes, char* why,
                      std::size_t why_size) {
  return Guard(why, why_size, [&] {
    RankState& state = StateOfThread(call->tensors->q->device_id);
    auto prepared = std::make_unique<Plan>(Plan{state.Graph(Read(*call)), state.handle});
    *workspace_bytes = prepared->graph->workspace_bytes();
    *plan = prepared.release();
  });
}

cppool_status Run(void* plan, const cppool_attention_tensors* tensors, void* workspace, cppool_stream stream,
                  char* why, std::size_t why_size) {
  return Guard(why, why_size, [&] {
    const auto& prepared = *static_cast<const Plan*>(plan);
    prepared.graph->Run(*prepared.handle, *tensors, workspace, stream);
  });
}

void Destroy(void* plan) { delete static_cast<Plan*>(plan); }

// With the version that was found, or the reason why there is none, which `supports` gives again.
const char* VersionText() {
  static const std::string text = [] {
    try {
      return Version();
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  }();
  return text.c_str();
}

}  // namespace
}  // namespace cppool::kernels::cudnn

extern "C" __attribute__((visibility("default"))) const cppool_attention_kernel* const* cppool_attention(
    void) {
  namespace cudnn = cppool::kernels::cudnn;
  static const cppool_attention_kernel kernel = {
      CPPOOL_ATTENTION_ABI,
      sizeof(cppool_attention_kernel),
      "cudnn",
      cudnn::VersionText(),
      "cuda",
      // Not CPPOOL_ATTENTION_FP32_RESULTS: gradients are in 16 bits, and cuDNN 9.14 takes an `out` in fp32
      // and writes wrong values.
      CPPOOL_ATTENTION_DETERMINISTIC | CPPOOL_ATTENTION_LSE_HEADS_FIRST | CPPOOL_ATTENTION_BIAS |
          CPPOOL_ATTENTION_ALIBI | CPPOOL_ATTENTION_MAX_LOGIT | CPPOOL_ATTENTION_FP8 |
          CPPOOL_ATTENTION_FP8_OUT,
      cudnn::Supports,
      cudnn::Prepare,
      cudnn::Run,
      cudnn::Run,
      cudnn::Destroy,
  };
  static const cppool_attention_kernel* const kernels[] = {&kernel, nullptr};
  return kernels;
}
