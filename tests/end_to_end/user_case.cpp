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

// Builds an example, named by its folder below examples/, with a fresh prefix, both within `folder`.
struct Built {
  std::string prefix, build;
};
Built Build(const fs::path& folder, const std::string& example) {
  const std::string prefix = (folder / "prefix").string(), build = (folder / "build").string();
  const std::string cmake = FindCmake();
  Shell("'" + cmake + "' --install '" CPPOOL_BUILD "' --prefix '" + prefix + "'");
  // Cases and kernels need no JSON library.
  Shell("'" + cmake + "' -S '" + prefix + "/share/doc/cppool/examples/" + example + "' -B '" + build +
        "' -DCMAKE_BUILD_TYPE=Release -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON -DCMAKE_PREFIX_PATH='" +
        prefix + "'");
  Shell("'" + cmake + "' --build '" + build + "'");
  return {prefix, build};
}

}  // namespace

std::string UserCaseNeeds() {
  if (FindCmake().empty()) return "skipped: there is no cmake in PATH nor at " CPPOOL_CMAKE;
  if (!fs::exists(CPPOOL_BUILD)) return "skipped: there is no " CPPOOL_BUILD;
  return "";
}

const UserCase& BuildUserCase() {
  static const TemporaryFolder folder;
  static const UserCase built = [] {
    const auto [prefix, build] = Build(folder.path(), "daemon/all_reduce");
    return UserCase{prefix + "/bin/cppoold", build + "/liball_reduce_case.so"};
  }();
  return built;
}

const UserKernels& BuildUserKernels() {
  static const TemporaryFolder folder;
  static const UserKernels built = [] {
    const auto [prefix, build] = Build(folder.path(), "kernels");
    return UserKernels{prefix + "/bin/cppoold", prefix + "/bin/cppool", build + "/libnaive.so",
                       build + "/libforward.so", build + "/libwith_backward.so"};
  }();
  return built;
}

}  // namespace cppool::test
