#include "kernels/attention/kernel_library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <utility>

#include "kernels/attention/families/table/family.h"
#include "kernels/float_environment.h"
#include "kernels/module/module_files.h"

namespace cppool::kernels {
namespace {

constexpr const char* kEntry = "cppool_attention";
constexpr const char* kCudnn = "libcppool_cudnn.so";
constexpr std::uint32_t kFeatures =
    CPPOOL_ATTENTION_DETERMINISTIC | CPPOOL_ATTENTION_FP32_RESULTS | CPPOOL_ATTENTION_LSE_BASE2 |
    CPPOOL_ATTENTION_LSE_HEADS_FIRST | CPPOOL_ATTENTION_BIAS | CPPOOL_ATTENTION_ALIBI |
    CPPOOL_ATTENTION_MAX_LOGIT | CPPOOL_ATTENTION_VARLEN | CPPOOL_ATTENTION_FP8 | CPPOOL_ATTENTION_FP8_OUT;

[[noreturn]] void Refuse(const std::string& file, const std::string& why) {
  throw LibraryError("kernels of " + file + ": " + why);
}

bool OneLine(const char* text) {
  return text && *text && std::string_view(text).find('\n') == std::string_view::npos;
}

// Throws LibraryError unless the table can be used.
void CheckKernel(const std::string& file, const cppool_attention_kernel& kernel) {
  // The ABI comes first: with another one no other member can be read.
  if (kernel.abi != CPPOOL_ATTENTION_ABI || kernel.struct_size < sizeof(cppool_attention_kernel)) {
    Refuse(file, "a kernel was built for version " + std::to_string(kernel.abi) + " of cppool/attention.h (" +
                     std::to_string(kernel.struct_size) + " bytes), and this cppool has version " +
                     std::to_string(CPPOOL_ATTENTION_ABI) + " (" +
                     std::to_string(sizeof(cppool_attention_kernel)) +
                     " bytes or more): rebuild it against this cppool's header");
  }
  if (!OneLine(kernel.name) || std::string_view(kernel.name).find(',') != std::string_view::npos)
    Refuse(file, "a kernel's name must be one line of text without a comma");
  const std::string name = std::string("kernel ") + kernel.name;
  if (!OneLine(kernel.version)) Refuse(file, name + " has no version: one line of text");
  const std::string_view backend = kernel.backend ? kernel.backend : "";
  if (backend != "cuda" && backend != "host")
    Refuse(file, name + ": its backend must be \"cuda\" or \"host\", not \"" + std::string(backend) + "\"");
  if (kernel.features & ~kFeatures)
    Refuse(file,
           name + " has features that this cppool does not know: rebuild it against this cppool's header");
  const auto missing = [&](const char* function) {
    Refuse(file, name + " has no function " + function + ": only backward and destroy may be NULL");
  };
  if (!kernel.supports) missing("supports");
  if (!kernel.prepare) missing("prepare");
  if (!kernel.forward) missing("forward");
}

}  // namespace

KernelLibrary::KernelLibrary(void* handle, std::string file) : file_(std::move(file)) {
  const auto entry = reinterpret_cast<cppool_attention_entry>(dlsym(handle, kEntry));
  if (!entry) {
    Refuse(file_, std::string("it exports no function ") + kEntry +
                      ": declare it extern \"C\" and with default visibility (see cppool/attention.h)");
  }
  const FloatEnvironment kept;
  const cppool_attention_kernel* const* kernels = entry();
  if (!kernels || !*kernels) Refuse(file_, std::string(kEntry) + "() returns no kernels");
  for (; *kernels; ++kernels) Add(**kernels);
}

void KernelLibrary::Add(const cppool_attention_kernel& kernel) {
  CheckKernel(file_, kernel);
  for (const cppool_attention_kernel* other : kernels_) {
    if (other->name == std::string_view(kernel.name) && other->backend == std::string_view(kernel.backend))
      Refuse(file_,
             std::string("two kernels of the backend ") + kernel.backend + " have the name " + kernel.name);
  }
  kernels_.push_back(&kernel);
}

const cppool_attention_kernel& KernelLibrary::Find(const std::string& name, std::string_view backend) const {
  const cppool_attention_kernel* found = nullptr;
  std::string there, of_backend;
  for (const cppool_attention_kernel* kernel : kernels_) {
    there += (there.empty() ? "" : ", ") + std::string(kernel->name) + " (" + kernel->backend + ")";
    if (kernel->backend != backend || (!name.empty() && name != kernel->name)) continue;
    of_backend += (of_backend.empty() ? "" : ", ") + std::string(kernel->name);
    if (found) Refuse(file_, "it has several kernels, " + of_backend + ": say which one, FILE,NAME");
    found = kernel;
  }
  if (found) return *found;
  Refuse(file_, "it has no kernel " + (name.empty() ? "" : "'" + name + "' ") + "for the backend " +
                    std::string(backend) + ": there is " + there);
}

std::string CudnnModule() {
  std::string searched;
  for (const std::string& file : ModuleFiles(kCudnn, "CPPOOL_CUDNN_MODULE")) {
    searched += (searched.empty() ? "" : ", ") + file;
    const bool plain = file.find('/') == std::string::npos;
    if (!plain && access(file.c_str(), F_OK) == 0)
      return std::filesystem::absolute(file).lexically_normal().string();
  }
  throw LibraryError("the kernels \"cudnn\" are in a module that was not found (searched: " + searched +
                     "): run scripts/setup --cudnn and build again, or set CPPOOL_CUDNN_MODULE to its path");
}

std::unique_ptr<const AttentionFamily> MakeFamily(const cppool_attention_kernel& kernel) {
  return std::make_unique<table::TableFamily>(kernel);
}

}  // namespace cppool::kernels
