// The ranges and names that a profiler sees. The profiler is this test: NVTX finds its injection function in
// the program. No GPU.
#include "kernels/runtime/cuda/stage_ranges.h"

#define NVTX_NO_IMPL  // the types alone
#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/catch.h"

namespace {

std::vector<std::string> calls;

nvtxDomainHandle_t Create(const char* name) {
  static int domain;
  calls.push_back(std::string("domain ") + name);
  return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

int Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* range) {
  calls.push_back(std::string("push ") + range->message.ascii);
  return 0;
}

int Pop(nvtxDomainHandle_t) {
  calls.emplace_back("pop");
  return 0;
}

void NameThread(std::uint32_t, const char* name) { calls.push_back(std::string("thread ") + name); }

void NameStream(cudaStream_t, const char* name) { calls.push_back(std::string("stream ") + name); }

// What an attached profiler does: sets the functions that NVTX calls.
int Inject(NvtxGetExportTableFunc_t tables) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  const auto set = [&](NvtxCallbackModule module, unsigned id, auto* function) {
    NvtxFunctionTable table = nullptr;
    unsigned size = 0;
    if (callbacks->GetModuleFunctionTable(module, &table, &size) && id < size)
      *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CB_MODULE_CORE2, NVTX_CBID_CORE2_DomainCreateA, &Create);
  set(NVTX_CB_MODULE_CORE2, NVTX_CBID_CORE2_DomainRangePushEx, &Push);
  set(NVTX_CB_MODULE_CORE2, NVTX_CBID_CORE2_DomainRangePop, &Pop);
  set(NVTX_CB_MODULE_CORE, NVTX_CBID_CORE_NameOsThreadA, &NameThread);
  set(NVTX_CB_MODULE_CUDART, NVTX_CBID_CUDART_NameCudaStreamA, &NameStream);
  return 1;
}

std::vector<std::string> Calls() { return std::exchange(calls, {}); }

using Texts = std::vector<std::string>;

}  // namespace

extern "C" {
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = &Inject;
}

TEST_CASE("stages are NVTX ranges with their rank, nested as a profiler wants them") {
  using cppool::kernels::cuda::StageRanges;
  const auto stream = [](std::uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); };
  {
    StageRanges ranges(3);
    CHECK(Calls() == Texts{"domain cppool", "thread rank 3"});
    ranges.Name(stream(1), "main");
    CHECK(Calls() == Texts{"stream rank 3 main"});
    ranges.Enter(stream(1), "forward/a");
    ranges.Enter(stream(1), "forward/b");  // ends the one before
    CHECK(Calls() == Texts{"push rank 3 forward/a", "pop", "push rank 3 forward/b"});
    ranges.Enter(stream(2), "copy");
    ranges.Enter(stream(2), nullptr);
    CHECK(Calls() == Texts{"push rank 3 copy", "pop"});
    // Not nested: the other stream's range is interrupted.
    ranges.Enter(stream(2), "copy");
    ranges.Enter(stream(1), "forward/c");
    CHECK(Calls() == Texts{"push rank 3 copy", "pop", "pop", "push rank 3 copy", "push rank 3 forward/c"});
    ranges.Enter(stream(4), nullptr);  // has none
    CHECK(Calls().empty());
  }
  CHECK(Calls() == Texts{"pop", "pop"});
}
