#include "tests/end_to_end/user_case.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "tests/child.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

namespace fs = std::filesystem;

void Shell(const std::string& command) {
  const Child child = RunChild(command);
  if (child.exit_code != 0) throw std::runtime_error(command + "\n" + child.output);
}

// The CMake that built this program, or the first in PATH; empty if there is none.
std::string FindCmake() {
  const char* search = getenv("PATH");
  std::string folders = search == nullptr ? "" : search;
  std::vector<std::string> candidates = {CPPOOL_CMAKE};
  std::istringstream path(folders);
  for (std::string folder; std::getline(path, folder, ':');) candidates.push_back(folder + "/cmake");
  for (const std::string& candidate : candidates)
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  return "";
}

// Builds the project in `source` against a fresh prefix, both within `folder`.
struct Built {
  std::string prefix, build;
};
Built Build(const fs::path& folder, const std::string& source) {
  const std::string prefix = (folder / "prefix").string(), build = (folder / "build").string();
  const std::string cmake = FindCmake();
  Shell("'" + cmake + "' --install '" CPPOOL_BUILD "' --prefix '" + prefix + "'");
  Shell("'" + cmake + "' -S '" + source + "' -B '" + build +
        "' -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH='" + prefix + "'");
  Shell("'" + cmake + "' --build '" + build + "'");
  return {prefix, build};
}

}  // namespace

std::string UserCaseNeeds() {
  if (FindCmake().empty()) return "skipped: there is no cmake in PATH nor at " CPPOOL_CMAKE;
  for (const char* folder : {CPPOOL_BUILD, CPPOOL_USER_CASE, CPPOOL_USER_KERNEL})
    if (!fs::exists(folder)) return std::string("skipped: there is no ") + folder;
  return "";
}

const UserCase& BuildUserCase() {
  static const TemporaryFolder folder;
  static const UserCase built = [] {
    const auto [prefix, build] = Build(folder.path(), CPPOOL_USER_CASE);
    return UserCase{prefix + "/bin/cppoold", build + "/liball_reduce_case.so"};
  }();
  return built;
}

const UserKernels& BuildUserKernels() {
  static const TemporaryFolder folder;
  static const UserKernels built = [] {
    const auto [prefix, build] = Build(folder.path(), CPPOOL_USER_KERNEL);
    return UserKernels{prefix + "/bin/cppoold", prefix + "/bin/cppool", build + "/libnaive.so",
                       build + "/libforward.so", build + "/libwith_backward.so"};
  }();
  return built;
}

}  // namespace cppool::test
