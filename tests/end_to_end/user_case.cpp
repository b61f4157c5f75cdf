#include "tests/end_to_end/user_case.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace cppool::test {
namespace {

namespace fs = std::filesystem;

struct Folder {
  Folder() {
    std::string name = (fs::temp_directory_path() / "cppool-user-case-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path = name;
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

void Shell(const std::string& command, const fs::path& log) {
  if (std::system((command + " > '" + log.string() + "' 2>&1").c_str()) == 0) return;
  std::ifstream file(log);
  std::ostringstream text;
  text << command << "\n" << file.rdbuf();
  throw std::runtime_error(text.str());
}

// The CMake that built this, or another; empty when there is none.
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

UserCase Build(const fs::path& folder) {
  const std::string prefix = (folder / "prefix").string(), build = (folder / "build").string();
  const fs::path log = folder / "log";
  const std::string cmake = FindCmake();
  Shell("'" + cmake + "' --install '" CPPOOL_BUILD "' --prefix '" + prefix + "'", log);
  Shell("'" + cmake + "' -S '" CPPOOL_USER_CASE "' -B '" + build +
            "' -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH='" + prefix + "'",
        log);
  Shell("'" + cmake + "' --build '" + build + "'", log);
  return {prefix + "/bin/cppoold", build + "/liball_reduce_case.so"};
}

}  // namespace

std::string UserCaseNeeds() {
  if (FindCmake().empty()) return "left out: there is no cmake in PATH nor at " CPPOOL_CMAKE;
  for (const char* folder : {CPPOOL_BUILD, CPPOOL_USER_CASE})
    if (!fs::exists(folder)) return std::string("left out: there is no ") + folder;
  return "";
}

const UserCase& BuildUserCase() {
  static const Folder folder;
  static const UserCase built = Build(folder.path);
  return built;
}

}  // namespace cppool::test
