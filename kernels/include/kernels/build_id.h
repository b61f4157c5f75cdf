// Which build a program or the CUDA module comes from. Each has its own copy of both functions, so that the
// loader can compare them.
#pragma once

#include <string>

#if defined(__GNUC__)
#pragma GCC visibility push(hidden)  // the module must not find the program's
#endif

namespace cppool::kernels {

// A hash of the headers that programs and module must share, made at build time by cmake/seam_id.cmake. In
// library cppool_kernels.
const char* SeamId();

// The commit that was checked out at build time; empty without git. In library cppool_commit, which only the
// daemon and the module link: a new commit changes nothing else.
const char* Commit();

// A build id as texts have it: "1f8a6e02b7c94d35-6985ccd0a1b2", or the seam's alone.
inline std::string BuildIdText(const std::string& seam, const std::string& commit) {
  return seam + (commit.empty() ? "" : "-") + commit;
}

}  // namespace cppool::kernels

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
