// The attention kernels of a shared library (cppool/attention.h), which the program has opened and never
// closes.
#pragma once

#include <cppool/attention.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/attention_family.h"

namespace cppool::kernels {

// Why a library, or the kernel that is asked of it, cannot be used; names the file and says what to do.
class LibraryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The tables of a library's kernels, checked.
class KernelLibrary {
 public:
  // `handle` is dlopen's, of `file` or a copy of it; `file` is for texts. Throws LibraryError.
  KernelLibrary(void* handle, std::string file);

  // The kernel with this name; with an empty name the only one of the backend. It lives as long as the
  // process. Throws LibraryError.
  const cppool_attention_kernel& Find(const std::string& name, std::string_view backend) const;

 private:
  void Add(const cppool_attention_kernel& kernel);

  std::string file_;
  std::vector<const cppool_attention_kernel*> kernels_;
};

// The absolute path of libcppool_cudnn.so, whose kernel is named "cudnn". Throws LibraryError when it is not
// there.
std::string CudnnModule();

// A kernel of a library as a family: "table". It lives as its owner says, and the kernel outlives it.
std::unique_ptr<const AttentionFamily> MakeFamily(const cppool_attention_kernel& kernel);

}  // namespace cppool::kernels
