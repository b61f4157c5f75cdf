// The words with which requests and options name attention kernels.
#pragma once

#include <string>

namespace cppool::protocol {

// "cppool" and "cudnn" name kernels that cppool finds itself; other words are a library's path, or "path,name" for one of
// its kernels.
struct KernelWords {
  std::string path;  // empty: `name` is one that cppool finds
  std::string name;  // empty: the only kernel of the library
};
KernelWords ParseKernels(const std::string& words);

}  // namespace cppool::protocol
