// Whose attention kernels a request or an option names.
#pragma once

#include <cstdint>
#include <string>

namespace cppool::protocol {

struct KernelChoice {
  enum class From : std::uint8_t { kDefault, kCppool, kCudnn, kLibrary };
  From from = From::kDefault;  // nothing is named
  std::string path;            // kLibrary: its file; else empty
  std::string name;            // kLibrary: of one of its kernels; empty: its only one

  bool named() const { return from != From::kDefault; }
  std::string Words() const;  // ParseKernels returns this choice for them; empty: nothing is named
  bool operator==(const KernelChoice&) const = default;
};

// What the words may be, for an error's text.
inline constexpr const char* kKernelWordsAllowed =
    "\"cppool\", \"cudnn\", a library's path, or its path and a kernel's name with a comma between";
// Throws InvalidRequest for other words: "must be ..., not ...".
KernelChoice ParseKernels(const std::string& words);

}  // namespace cppool::protocol
