#include "kernels/cudnn/library.h"

#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <system_error>

namespace cppool::kernels::cudnn {
namespace {

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Opens the first of `package_files` that is in a folder of Python's packages, else `name`.
OpenedLibrary Open(const std::string& name, const std::vector<std::string>& package_files) {
  OpenedLibrary library;
  std::string searched, broken;
  const auto try_file = [&](const std::string& file) {
    std::error_code ignored;
    library.handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library.handle && std::filesystem::exists(file, ignored)) broken += std::string("; ") + dlerror();
    return library.handle != nullptr;
  };
  if (!package_files.empty()) {
    for (const std::string& folder : PythonFolders()) {
      for (const std::string& file : package_files) {
        if (try_file(folder + "/" + file)) return library;
      }
      searched += folder + ", ";
    }
  }
  if (try_file(name)) return library;
  library.failure = "was not found (searched: " + searched + name + broken + ")";
  return library;
}

}  // namespace

std::vector<std::string> PythonFolders() {
  FILE* python =
      popen("python3 -c 'import sys; print(\"\\n\".join(filter(None, sys.path)))' 2>/dev/null", "r");
  if (!python) return {};
  std::string text;
  std::array<char, 4096> part;
  while (const std::size_t n = std::fread(part.data(), 1, part.size(), python)) text.append(part.data(), n);
  if (pclose(python) != 0) return {};
  std::vector<std::string> folders;
  std::istringstream lines(text);
  for (std::string folder; std::getline(lines, folder);) {
    if (!folder.empty()) folders.push_back(folder);
  }
  return folders;
}

OpenedLibrary OpenCudnn() {
  const std::string wanted = Variable("CPPOOL_CUDNN_LIBRARY");
  OpenedLibrary library =
      wanted.empty() ? Open("libcudnn.so.9", {"nvidia/cudnn/lib/libcudnn.so.9"}) : Open(wanted, {});
  if (!library.handle) {
    library.failure = "libcudnn.so.9 " + library.failure +
                      ": install it, for example with `pip install nvidia-cudnn-cu13`, or set "
                      "CPPOOL_CUDNN_LIBRARY to its path";
  }
  return library;
}

OpenedLibrary OpenCudaRuntime(int major) {
  const std::string version = std::to_string(major), file = "libcudart.so." + version;
  OpenedLibrary library =
      Open(file, {"nvidia/cu" + version + "/lib/" + file, "nvidia/cuda_runtime/lib/" + file});
  if (!library.handle) {
    library.failure = file + ", which cuDNN's frontend needs, " + library.failure +
                      ": put the folder that has it into LD_LIBRARY_PATH";
  }
  return library;
}

std::optional<int> ComputeCapability(int device) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!driver) return std::nullopt;
  using GetDevice = int (*)(int*, int);
  using GetAttribute = int (*)(int*, int, int);
  const auto get_device = reinterpret_cast<GetDevice>(dlsym(driver, "cuDeviceGet"));
  const auto get_attribute = reinterpret_cast<GetAttribute>(dlsym(driver, "cuDeviceGetAttribute"));
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
  int handle = 0, major = 0, minor = 0;
  const bool known = get_device && get_attribute && get_device(&handle, device) == 0 &&
                     get_attribute(&major, kMajor, handle) == 0 && get_attribute(&minor, kMinor, handle) == 0;
  dlclose(driver);
  return known ? std::optional(10 * major + minor) : std::nullopt;
}

}  // namespace cppool::kernels::cudnn
