#include "client/src/request.h"

#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::client {
namespace {

std::string Absolute(const std::string& path, const std::string& folder) {
  return std::filesystem::absolute(std::filesystem::path(folder) / path).string();
}

// Why JSON cannot express the request; empty: it can.
std::string Unsayable(const protocol::RunRequest& request) {
  try {
    protocol::SerializeRequest({std::nullopt, request});
    return "";
  } catch (const protocol::InvalidRequest& error) {
    return error.what();
  }
}

// Throws std::invalid_argument for NaN, infinities and text that is not UTF-8, and names the parameter.
void CheckSayable(const protocol::RunRequest& request) {
  const std::string why = Unsayable(request);
  if (why.empty()) return;
  protocol::RunRequest one;
  for (const auto& [name, value] : request.params.items()) {
    one.params = {{name, value}};
    if (!Unsayable(one).empty())
      throw std::invalid_argument("the parameter " + protocol::JsonText(name) + ": " + why);
  }
  throw std::invalid_argument(why);
}

}  // namespace

protocol::RunRequest ToRequest(const Json& params, const RunOptions& options) try {
  return Complete(
      protocol::MakeRun(options, params.is_null() ? Json::object() : params));  // Run({}) means none
} catch (const protocol::InvalidRequest& error) {
  throw std::invalid_argument(error.what());
}

protocol::RunRequest Complete(protocol::RunRequest request, const std::string& folder) {
  auto whole = [&](const std::string& path) { return path.empty() ? path : Absolute(path, folder); };
  request.dump = whole(request.dump);
  request.inputs = whole(request.inputs);
  request.trace = whole(request.trace);
  request.choice.path = whole(request.choice.path);
  if (!request.python.empty()) request.python = protocol::ParsePythonCase(request.python, folder).dump();
  request.kernels = request.choice.Words();
  request.load = AbsolutePaths(request.load, folder);
  for (const auto& [file, digest] : std::exchange(request.digests, {})) request.digests[whole(file)] = digest;
  CheckSayable(request);
  return request;
}

std::vector<std::string> AbsolutePaths(const std::vector<std::string>& files, const std::string& folder) {
  std::vector<std::string> paths;
  for (const std::string& file : files) {
    if (file.empty() || file.find('\0') != std::string::npos)
      throw std::invalid_argument("load: a library's path is not empty and has no zero byte");
    paths.push_back(Absolute(file, folder));
  }
  return paths;
}

}  // namespace cppool::client
