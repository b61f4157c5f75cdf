#include "user_case.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

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

UserCase Build(const fs::path& folder) {
  const std::string prefix = (folder / "prefix").string(), build = (folder / "build").string();
  const fs::path log = folder / "log";
  const std::string cmake = CPPOOL_CMAKE;
  Shell("'" + cmake + "' --install '" CPPOOL_BUILD "' --prefix '" + prefix + "'", log);
  Shell("'" + cmake + "' -S '" CPPOOL_USER_CASE "' -B '" + build +
            "' -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH='" + prefix + "'",
        log);
  Shell("'" + cmake + "' --build '" + build + "'", log);
  return {prefix + "/bin/cppoold", build + "/liball_reduce_case.so"};
}

}  // namespace

const UserCase& BuildUserCase() {
  static const Folder folder;
  static const UserCase built = Build(folder.path);
  return built;
}

}  // namespace cppool::test
