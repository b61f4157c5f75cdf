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
  const std::string& file() const { return file_; }      // as texts and answers name it; absolute
  const std::string& digest() const { return digest_; }  // of its bytes: 16 hexadecimal digits
  // The kernel with this name; with an empty name the only one of the backend. Throws LibraryError.
  const AttentionFamily& Family(const std::string& name, std::string_view backend) const;

 private:
  friend const KernelLibrary& OpenKernelLibrary(const std::string& path, const std::string& copy);
  KernelLibrary() = default;
  void Add(const void* kernel);

  std::string file_, opened_, digest_;  // `opened_`: the file that was opened, `file_` or a copy of it
  std::vector<std::unique_ptr<const AttentionFamily>> families_;
  std::vector<std::string> backends_;  // of each
};

// Opens the library, or returns it when it was opened before. Any thread. Never closed: its CUDA code could not be. Throws
// LibraryError. `copy`: a copy of the library, which is opened in its place; another content of the library needs another copy, since
// dlopen returns what a path had when it was opened first. Without one, a file that has changed since is refused.
const KernelLibrary& OpenKernelLibrary(const std::string& path, const std::string& copy = "");

// The kernel `name` of the library at `path`; with an empty path "cudnn", of its module libcppool_cudnn.so. Throws LibraryError. `copy`: of the library at this path, as for OpenKernelLibrary.
struct NamedKernels {
  const AttentionFamily* family = nullptr;
  const KernelLibrary* library = nullptr;
};
NamedKernels FindKernels(std::string path, const std::string& name, std::string_view backend,
                         const std::string& copy = "");

}  // namespace cppool::kernels
