// CUDA on demand: the driver is asked for devices, and the module with everything that needs CUDA or NCCL is
// opened, only when wanted. And the kernels that belong to a runtime: the host's, or those of the module that
// made the runtime.
#include <dlfcn.h>
#include <unistd.h>

#include <mutex>
#include <string>
#include <string_view>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/families/host/family.h"
#include "kernels/attention/tensor_ops/host/tensor_ops.h"
#include "kernels/build_id.h"
#include "kernels/error.h"
#include "kernels/module/cuda_module.h"
#include "kernels/module/module_files.h"

namespace cppool::kernels {
namespace {

constexpr const char* kModuleFile = "libcppool_cuda.so";

// The few values of the driver's CUresult that mean something of their own here (cuda.h of CUDA 13.0).
constexpr int kCudaSuccess = 0;
constexpr int kCudaStubLibrary = 34;  // the stand-in for linking without a driver
constexpr int kCudaNoDevice = 100;
constexpr int kCudaOperatingSystem = 304;  // the device files are not reachable
constexpr int kCudaSystemNotReady = 802;   // the fabric manager is not up
constexpr int kCudaDriverMismatch = 803;   // library and kernel module differ
constexpr int kCudaUnknown = 999;

const char* AdviceFor(int code) {
  switch (code) {
    case kCudaOperatingSystem:
      return "may this user open /dev/nvidia*? In a container, start it with the GPUs";
    case kCudaSystemNotReady:
      return "is nvidia-fabricmanager running, of the driver's version?";
    case kCudaDriverMismatch:
      return "libcuda.so.1 and the loaded kernel module are of different versions: reboot, or reload the "
             "module";
    case kCudaUnknown:
      return "is the nvidia kernel module loaded (nvidia-smi)? It often has to be reloaded after a suspend "
             "or an update";
    default:
      return "see whether nvidia-smi works";
  }
}

// The driver's functions, as they are called here.
using CuInit = int (*)(unsigned);
using CuDeviceGetCount = int (*)(int*);
using CuGetErrorName = int (*)(int, const char**);

RuntimeError DriverError(void* driver, const char* call, int code) {
  std::string name = "error " + std::to_string(code);
  const auto error_name = reinterpret_cast<CuGetErrorName>(dlsym(driver, "cuGetErrorName"));
  const char* text = nullptr;
  if (error_name && error_name(code, &text) == kCudaSuccess && text)
    name = std::string(text) + " (" + std::to_string(code) + ")";
  return RuntimeError(CPPOOL_CUDA, std::string("the CUDA driver is here but does not work: ") + call +
                                       " returned " + name + "; " + AdviceFor(code) +
                                       ". Use the host backend to go on without GPUs");
}

// Never closed: the driver does not support being unloaded. Null: there is none.
void* Driver() {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return driver;
}

RuntimeError OpenError(const std::string& file, const std::string& reason) {
  return RuntimeError(CPPOOL_CUDA,
                      "the CUDA module " + file + " does not load: " + reason +
                          (Driver() ? ""
                                    : "; there is no NVIDIA driver (libcuda.so.1): install one, or "
                                      "use the host backend"));
}

void* OpenFile() {
  std::string searched, linker;  // what the dynamic linker says of a plain name
  for (const std::string& file : ModuleFiles(kModuleFile, "CPPOOL_CUDA_MODULE")) {
    const bool plain = file.find('/') == std::string::npos;
    searched += (searched.empty() ? "" : ", ") + file;
    if (!plain && access(file.c_str(), F_OK) != 0) continue;
    if (void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    const char* error = dlerror();
    const std::string reason = error ? error : "no reason given";
    if (!plain) throw OpenError(file, reason);
    linker = "; " + reason;
  }
  throw RuntimeError(
      CPPOOL_CUDA,
      "the CUDA module was not found (searched: " + searched + linker +
          "). If this build has none, build again where nvcc and NCCL are (cmake -DCPPOOL_CUDA=ON says what "
          "is missing); else set CPPOOL_CUDA_MODULE to its path. The host backend needs no module");
}

// The file that a function of a module is in.
std::string FileOf(void* function) {
  Dl_info info{};
  return function && dladdr(function, &info) && info.dli_fname ? info.dli_fname : "(unknown)";
}

RuntimeError AnotherBuild(const std::string& file, const std::string& module, const std::string& program) {
  return RuntimeError(
      CPPOOL_CUDA, "the CUDA module " + file + " has the build id " + module + ", this program " + program +
                       ": both must come from one build. Build both (cmake --build BUILD --target "
                       "cppool_programs), or install both from one build; CPPOOL_CUDA_MODULE, where it is "
                       "set, chooses the module");
}

bool OnHost(std::string_view backend) {
  if (backend != "host" && backend != "cuda")
    throw RuntimeError(CPPOOL_INTERNAL, "no kernels for the backend " + std::string(backend));
  return backend == "host";
}

}  // namespace

int CountCudaDevices() {
  void* const driver = Driver();
  if (!driver) return 0;
  const auto init = reinterpret_cast<CuInit>(dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<CuDeviceGetCount>(dlsym(driver, "cuDeviceGetCount"));
  if (!init || !get_count) {
    throw RuntimeError(
        CPPOOL_CUDA,
        "libcuda.so.1 has no cuInit or cuDeviceGetCount: it is not NVIDIA's driver. Repair the "
        "installation, or use the host backend");
  }
  int code = init(0);
  if (code == kCudaNoDevice || code == kCudaStubLibrary) return 0;
  if (code != kCudaSuccess) throw DriverError(driver, "cuInit", code);
  int count = 0;
  code = get_count(&count);
  if (code == kCudaNoDevice) return 0;
  if (code != kCudaSuccess) throw DriverError(driver, "cuDeviceGetCount", code);
  return count;
}

const CudaModule& OpenCudaModule() {
  static std::mutex mutex;
  static const CudaModule* opened = nullptr;
  std::lock_guard lock(mutex);
  if (opened) return *opened;
  void* handle = OpenFile();
  const auto table = reinterpret_cast<const CudaModule* (*)()>(dlsym(handle, kCudaModuleSymbol));
  const std::string file = FileOf(reinterpret_cast<void*>(table));
  // Not closed when it is refused: CUDA's and NCCL's libraries, which it may have brought, are not made for
  // that.
  if (!table) {
    throw RuntimeError(CPPOOL_CUDA, std::string("not cppool's CUDA module: it has no ") + kCudaModuleSymbol +
                                        ". Does CPPOOL_CUDA_MODULE name the right file?");
  }
  const CudaModule* module = table();
  if (!module) throw RuntimeError(CPPOOL_CUDA, "the CUDA module " + file + " has no table");
  if (std::string_view(module->seam_id) != SeamId()) throw AnotherBuild(file, module->seam_id, SeamId());
  opened = module;
  return *opened;
}

std::string CudaModuleFile() { return FileOf(reinterpret_cast<void*>(OpenCudaModule().create_backend)); }

std::unique_ptr<Backend> CreateCudaBackend(const Place& place, Transport transport, const std::string& commit,
                                           WorldLink link) {
  if (!place.whole() && transport == Transport::kPeer) {
    throw RuntimeError(CPPOOL_UNSUPPORTED, "the transport peer copies within one process, and this one has " +
                                               std::to_string(place.ranks) + " of " +
                                               std::to_string(place.world_size) +
                                               " ranks: between processes it is nccl");
  }
  if (!place.whole() && !link.exchange) {
    throw RuntimeError(CPPOOL_INTERNAL, "a CUDA backend of " + std::to_string(place.ranks) + " of " +
                                            std::to_string(place.world_size) +
                                            " ranks needs a link to the others");
  }
  const CudaModule& module = OpenCudaModule();
  const std::string other = module.commit;
  if (!commit.empty() && !other.empty() && other != commit)
    throw AnotherBuild(CudaModuleFile(), BuildIdText(module.seam_id, other), BuildIdText(SeamId(), commit));
  return module.create_backend(place, transport, std::move(link));
}

std::vector<const AttentionFamily*> AttentionFamilies(std::string_view backend) {
  return OnHost(backend) ? std::vector<const AttentionFamily*>{&host::HostFamily()}
                         : OpenCudaModule().attention_families();
}

std::unique_ptr<TensorOps> MakeTensorOps(cppool_runtime* runtime) {
  return OnHost(runtime->backend) ? host::MakeTensorOps(runtime) : OpenCudaModule().make_tensor_ops(runtime);
}

std::unique_ptr<CheckKernels> MakeCheckKernels(cppool_runtime* runtime) {
  return OnHost(runtime->backend) ? MakeHostCheckKernels(runtime)
                                  : OpenCudaModule().make_check_kernels(runtime);
}

}  // namespace cppool::kernels
