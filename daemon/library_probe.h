// A process that opens a library before the daemon does: what crashes, hangs or exits there costs no warm world.
#pragma once

#include <chrono>
#include <string>

namespace cppool::daemon {

// What a library is opened for: each kind has a function that it must export.
enum class LibraryKind {
  kCases,    // cppool_cases (cppool/case.h)
  kKernels,  // cppool_attention (cppool/attention.h)
};

// Checks the table of a library that was opened from `file`; `path` is its name for texts. Throws LibraryError.
void CheckTable(LibraryKind kind, void* library, const std::string& file, const std::string& path);

// Has `program`, a cppoold, open `file` and check its table. Returns when that went well before `until`; else throws LibraryError. The
// library's output goes to stderr.
void ProbeLibrary(const std::string& program, LibraryKind kind, const std::string& file,
                  const std::string& path, std::chrono::steady_clock::time_point until);

// What `cppoold --probe KIND FILE PATH` does: the other side of ProbeLibrary. Returns the exit code.
inline constexpr const char* kProbeOption = "--probe";
int RunProbe(const std::string& kind, const std::string& file, const std::string& path);

}  // namespace cppool::daemon
