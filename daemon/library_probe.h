// A process that opens a library before the daemon does: what crashes, hangs or exits there costs no warm
// world.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "kernels/attention/kernel_library.h"

namespace cppool::daemon {

// What a library is opened for: each kind has a function that it must export.
enum class LibraryKind {
  kCases,    // cppool_cases (cppool/case.h)
  kKernels,  // cppool_attention (cppool/attention.h)
};

// Checks the table of an opened library; `path` is its name for texts. Returns its kernels, where they are
// what it was opened for. Throws LibraryError.
std::optional<kernels::KernelLibrary> CheckTable(LibraryKind kind, void* library, const std::string& path);

// Has `program`, a cppoold, open `file` and check its table. Returns when that went well within `limit` and
// before `until`, which is for a request; else throws LibraryError. The library's output goes to stderr.
void ProbeLibrary(const std::string& program, LibraryKind kind, const std::string& file,
                  const std::string& path, std::chrono::milliseconds limit,
                  std::chrono::steady_clock::time_point until = std::chrono::steady_clock::time_point::max());

// What `cppoold --probe KIND FILE PATH` does: the other side of ProbeLibrary. Returns the exit code.
inline constexpr const char* kProbeOption = "--probe";
int RunProbe(const std::string& kind, const std::string& file, const std::string& path);

}  // namespace cppool::daemon
