#include "kernels/attention/kernel_library.h"

#include <cppool/attention.h>

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <system_error>

#include "kernels/attention/checks/digest.h"
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
    CPPOOL_ATTENTION_MAX_LOGIT | CPPOOL_ATTENTION_VARLEN | CPPOOL_ATTENTION_FP8;

[[noreturn]] void Refuse(const std::string& file, const std::string& why) {
  throw LibraryError("kernels of " + file + ": " + why);
}

std::string DigestOf(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) Refuse(file, std::string("cannot be read: ") + std::strerror(errno));
  std::vector<char> block(1 << 16);
  std::uint64_t digest = 0, words = 0, bytes = 0;
  while (in) {
    in.read(block.data(), static_cast<std::streamsize>(block.size()));
    const auto count = static_cast<std::size_t>(in.gcount());
    for (std::size_t at = 0; at < count; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, block.data() + at, std::min<std::size_t>(8, count - at));
      digest += DigestWord(words++, word);
    }
    bytes += count;
  }
  if (in.bad()) Refuse(file, std::string("cannot be read: ") + std::strerror(errno));
  digest += DigestStart(bytes);
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(digest));
  return text;
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

void KernelLibrary::Add(const void* kernel) {
  const auto& table = *static_cast<const cppool_attention_kernel*>(kernel);
  CheckKernel(file_, table);
  for (std::size_t i = 0; i < families_.size(); ++i) {
    if (families_[i]->kernels() == std::string_view(table.name) && backends_[i] == table.backend)
      Refuse(file_,
             std::string("two kernels of the backend ") + table.backend + " have the name " + table.name);
  }
  families_.push_back(std::make_unique<table::TableFamily>(table));
  backends_.emplace_back(table.backend);
}

const AttentionFamily& KernelLibrary::Family(const std::string& name, std::string_view backend) const {
  const AttentionFamily* found = nullptr;
  std::string there, of_backend;
  for (std::size_t i = 0; i < families_.size(); ++i) {
    const AttentionFamily& family = *families_[i];
    there += (there.empty() ? "" : ", ") + std::string(family.kernels()) + " (" + backends_[i] + ")";
    if (backends_[i] != backend || (!name.empty() && name != family.kernels())) continue;
    of_backend += (of_backend.empty() ? "" : ", ") + std::string(family.kernels());
    if (found) Refuse(file_, "it has several kernels, " + of_backend + ": say which one, FILE,NAME");
    found = &family;
  }
  if (found) return *found;
  Refuse(file_, "it has no kernel " + (name.empty() ? "" : "'" + name + "' ") + "for the backend " +
                    std::string(backend) + ": there is " + there);
}

const KernelLibrary& OpenKernelLibrary(const std::string& path, const std::string& copy) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<KernelLibrary>> opened;
  const std::lock_guard lock(mutex);
  // An absolute path: dlopen searches the system's folders for a plain name.
  std::error_code ignored;
  const auto whole = [&](const std::string& name) {
    return std::filesystem::absolute(name, ignored).lexically_normal().string();
  };
  const std::string file = whole(path), opened_file = copy.empty() ? file : whole(copy);
  // Its name stands for its content, and the file may be gone by now.
  const auto known = std::find_if(opened.begin(), opened.end(), [&](const auto& library) {
    return !copy.empty() && library->opened_ == opened_file;
  });
  if (known != opened.end()) return **known;
  const std::filesystem::file_status status = std::filesystem::status(opened_file, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    Refuse(file, "it is a folder or a device, not a library");
  const std::string digest = DigestOf(opened_file);
  for (const auto& library : opened) {
    if (library->opened_ != opened_file) continue;
    if (library->digest() == digest) return *library;
    Refuse(file, "it has changed since it was opened: start the daemon again, or give it another name");
  }
  const FloatEnvironment kept;
  void* const handle = dlopen(opened_file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* error = dlerror();
    Refuse(file, std::string("it does not load: ") + (error ? error : "no reason given"));
  }
  const auto entry = reinterpret_cast<cppool_attention_entry>(dlsym(handle, kEntry));
  if (!entry) {
    Refuse(file, std::string("it exports no function ") + kEntry +
                     ": declare it extern \"C\" and with default visibility (see cppool/attention.h)");
  }
  std::unique_ptr<KernelLibrary> library(new KernelLibrary);
  library->file_ = file;
  library->opened_ = opened_file;
  library->digest_ = digest;
  const cppool_attention_kernel* const* kernels = entry();
  if (!kernels || !*kernels) Refuse(file, std::string(kEntry) + "() returns no kernels");
  for (; *kernels; ++kernels) library->Add(*kernels);
  opened.push_back(std::move(library));
  return *opened.back();
}

NamedKernels FindKernels(std::string path, const std::string& name, std::string_view backend,
                         const std::string& copy) {
  NamedKernels found;
  if (path.empty()) {
    std::string searched;
    for (const std::string& file : ModuleFiles(kCudnn, "CPPOOL_CUDNN_MODULE")) {
      searched += (searched.empty() ? "" : ", ") + file;
      const bool plain = file.find('/') == std::string::npos;
      if (path.empty() && !plain && access(file.c_str(), F_OK) == 0) path = file;
    }
    if (path.empty()) {
      throw LibraryError(
          "the kernels \"cudnn\" are in a module that was not found (searched: " + searched +
          "): run scripts/setup --cudnn and build again, or set CPPOOL_CUDNN_MODULE to its path");
    }
  }
  found.library = &OpenKernelLibrary(path, copy);
  found.family = &found.library->Family(name, backend);
  return found;
}

}  // namespace cppool::kernels
