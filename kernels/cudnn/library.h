// The libraries that cuDNN's frontend calls, opened at run time: nothing is linked to them, and cppool runs
// where they are missing.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace cppool::kernels::cudnn {

struct OpenedLibrary {
  void* handle = nullptr;  // of dlopen; NULL: not found. Never closed
  std::string failure;     // then: where it was looked for, and what to do
};

// libcudnn.so.9: CPPOOL_CUDNN_LIBRARY when it is set; else that of PyPI's nvidia-cudnn-cu13 (or -cu12) in a
// folder of PythonFolders(), which is the one that frameworks use; else what the dynamic linker finds.
OpenedLibrary OpenCudnn();

// libcudart.so of this major version, from the same places (PyPI's nvidia-cuda-runtime), so that the frontend
// finds it open.
OpenedLibrary OpenCudaRuntime(int major);

// Where the python3 on PATH looks for packages (sys.path), asked of it: 20 ms. Empty without one.
std::vector<std::string> PythonFolders();

// 90 for sm_90; nothing while this process has not started CUDA. Does not start it.
std::optional<int> ComputeCapability(int device);

}  // namespace cppool::kernels::cudnn
