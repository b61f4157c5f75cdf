// gloo on demand: the module with it is opened by the first world of several processes on the host backend.
#include <dlfcn.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "kernels/build_id.h"
#include "kernels/error.h"
#include "kernels/host_link.h"
#include "kernels/module/module_files.h"
#include "kernels/runtime/gloo/gloo_module.h"

namespace cppool::kernels {
namespace {

constexpr const char* kGlooFile = "libcppool_gloo.so";
constexpr const char* kGlooVariable = "CPPOOL_GLOO_MODULE";

const GlooModule& OpenGlooModule() {
  std::string searched;
  for (const std::string& file : ModuleFiles(kGlooFile, kGlooVariable)) {
    searched += (searched.empty() ? "" : ", ") + file;
    if (file.find('/') != std::string::npos && access(file.c_str(), F_OK) != 0) continue;
    void* const handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle && file.find('/') == std::string::npos) continue;
    if (!handle) {
      const char* const error = dlerror();
      throw RuntimeError(CPPOOL_UNSUPPORTED, "the module " + file +
                                                 " does not load: " + (error ? error : "no reason given") +
                                                 "; on Debian, install libgloo0");
    }
    const auto table = reinterpret_cast<const GlooModule* (*)()>(dlsym(handle, kGlooModuleSymbol));
    const GlooModule* const module = table ? table() : nullptr;
    if (!module || std::string_view(module->seam_id) != SeamId())
      throw RuntimeError(CPPOOL_UNSUPPORTED,
                         file + " is no module of this build: install both from one build; " + kGlooVariable +
                             ", where it is set, chooses the module");
    return *module;
  }
  throw RuntimeError(
      CPPOOL_UNSUPPORTED,
      "ranks of several processes on the host backend need the module with gloo, which was not "
      "found (searched: " +
          searched + "): build with libgloo-dev (cmake -DCPPOOL_GLOO=ON), or set CPPOOL_GLOO_MODULE");
}

}  // namespace

std::unique_ptr<HostLink> ConnectGloo(int process, int processes, const std::string& own,
                                      const Exchange& exchange) {
  static const GlooModule& module = OpenGlooModule();
  return module.connect(process, processes, own, exchange);
}

}  // namespace cppool::kernels
