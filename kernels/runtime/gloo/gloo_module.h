// The table that libcppool_gloo.so exports as `cppool_gloo_module`. No other binary has gloo.
#pragma once

#include <memory>
#include <string>

#include "kernels/host_link.h"

namespace cppool::kernels {

struct GlooModule {
  const char* seam_id;  // SeamId() of build_id.h, and the first member, as CudaModule has it
  std::unique_ptr<HostLink> (*connect)(int process, int processes, const std::string& own,
                                       const Exchange& exchange);
};

inline constexpr const char* kGlooModuleSymbol =
    "cppool_gloo_module";  // extern "C" const GlooModule* cppool_gloo_module()

}  // namespace cppool::kernels
