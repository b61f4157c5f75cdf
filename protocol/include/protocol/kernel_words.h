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

// What words for kernels may be, for an error's text.
inline constexpr const char* kKernelWordsAllowed =
    "\"cppool\", \"cudnn\", a library's path, or its path and a kernel's name with a comma between";
// Whether the words name kernels: they are not empty, and have a path before a comma.
bool NameKernels(const std::string& words);

}  // namespace cppool::protocol
