// Libraries with kernels of cppool/attention.h: opened by the program, and kept until it ends.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/attention_family.h"

namespace cppool::kernels {

// What is wrong with a library, or with the kernel that is asked of it; names the file and what to do.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An opened library, whose tables have been checked.
class KernelLibrary {
 public:
  const std::string& file() const { return file_; }      // absolute
  const std::string& digest() const { return digest_; }  // of its bytes: 16 hexadecimal digits
  // The kernel with this name; with an empty name the only one of the backend. Throws LibraryError.
  const AttentionFamily& Family(const std::string& name, std::string_view backend) const;

 private:
  friend const KernelLibrary& OpenKernelLibrary(const std::string& path);
  KernelLibrary() = default;
  void Add(const void* kernel);

  std::string file_, digest_;
  std::vector<std::unique_ptr<const AttentionFamily>> families_;
  std::vector<std::string> backends_;  // of each
};

// Opens the library, or returns it when a file with these bytes was opened from there before. Any thread. Never closed:
// its CUDA code could not be. Throws LibraryError. (dlopen of a path that is open returns what was there before: a file
// that has changed is refused.)
const KernelLibrary& OpenKernelLibrary(const std::string& path);

// Kernels by the words of a request: "cudnn" (the module libcppool_cudnn.so), a path, or a path and a kernel's name with a
// comma between.
struct NamedKernels {
  const AttentionFamily* family = nullptr;
  const KernelLibrary* library = nullptr;
};
NamedKernels FindKernels(const std::string& words, std::string_view backend);

}  // namespace cppool::kernels
