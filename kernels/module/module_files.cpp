#include "kernels/module/module_files.h"

#include <unistd.h>

#include <cstdlib>

namespace cppool::kernels {
namespace {

// Returns the folder of the running program; empty when it is unknown.
std::string ProgramFolder() {
  std::vector<char> path(4096);
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) return "";
  const std::string program(path.data(), static_cast<std::size_t>(length));
  return program.substr(0, program.rfind('/'));
}

}  // namespace

std::vector<std::string> ModuleFiles(const char* file, const char* variable) {
  const char* wanted = std::getenv(variable);
  if (wanted && *wanted) return {wanted};
  std::vector<std::string> files;
  const std::string folder = ProgramFolder();
  if (!folder.empty()) {
    files.push_back(folder + "/" + file);
    files.push_back(folder + "/../lib/" + file);
  }
  files.emplace_back(file);
  return files;
}

}  // namespace cppool::kernels
