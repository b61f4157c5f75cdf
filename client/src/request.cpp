#include "client/src/request.h"

#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "protocol/json_text.h"
#include "protocol/kernel_words.h"
#include "protocol/parameters.h"

namespace cppool::client {
namespace {

// With the path of a library made absolute: the daemon has a folder of its own.
std::string WholeKernels(const std::string& kernels) {
  if (protocol::ParseKernels(kernels).path.empty()) return kernels;
  return std::filesystem::absolute(kernels).string();
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

protocol::RunRequest ToRequest(const Json& params, const RunOptions& options) {
  if (options.deadline < std::chrono::milliseconds(1) || options.deadline > std::chrono::hours(24))
    throw std::invalid_argument("deadline must be from 1 ms to 24 h");
  if (options.warmup < 0) throw std::invalid_argument("warmup must not be negative");
  if (options.repeat < 1) throw std::invalid_argument("repeat must be at least 1");
  if (const auto& sampling = options.sampling) {
    if (!(sampling->precision >= 0.0001 && sampling->precision <= 1))
      throw std::invalid_argument("sampling: precision must be from 0.0001 to 1");
    if (sampling->limit < std::chrono::milliseconds(1) || sampling->limit > std::chrono::hours(24))
      throw std::invalid_argument("sampling: limit must be from 1 ms to 24 h");
    if (sampling->most < 1) throw std::invalid_argument("sampling: most must be at least 1");
  }
  if (options.perturb > std::uint64_t{INT64_MAX}) throw std::invalid_argument("perturb must be below 2^63");
  if (options.fault && (options.fault->rank < 0 || options.fault->count < 1))
    throw std::invalid_argument("a fault's rank must not be negative, its count at least 1");
  for (const std::string* path : {&options.dump, &options.inputs, &options.trace})
    if (path->find('\0') != std::string::npos)
      throw std::invalid_argument("the name of a folder or file cannot hold a zero byte");
  protocol::RunRequest request;
  request.case_name = options.case_name;
  request.params = params.is_null() ? Json::object() : params;  // Run({}) means none
  request.deadline_ms = options.deadline.count();
  request.warmup = options.warmup;
  request.repeat = options.repeat;
  if (options.sampling) {
    request.sampling = {options.sampling->precision, options.sampling->limit.count()};
    request.repeat = options.sampling->most;
  }
  request.checks = options.checks;
  request.waits = options.waits;
  request.profile = options.profile;
  request.perturb = options.perturb;
  request.dump = options.dump;
  request.inputs = options.inputs;
  request.trace = options.trace;
  if (options.kernels.find('\0') != std::string::npos)
    throw std::invalid_argument("kernels cannot hold a zero byte");
  request.kernels = options.kernels;
  request.load = options.load;
  request.digests = options.digests;
  if (options.fault)
    request.fault = {options.fault->kind, options.fault->rank, options.fault->stage, options.fault->count};
  return Complete(std::move(request));
}

protocol::RunRequest Complete(protocol::RunRequest request) {
  auto whole = [](const std::string& path) {
    return path.empty() ? path : std::filesystem::absolute(path).string();
  };
  request.dump = whole(request.dump);
  request.inputs = whole(request.inputs);
  request.trace = whole(request.trace);
  request.kernels = WholeKernels(request.kernels);
  request.load = AbsolutePaths(request.load);
  for (const auto& [file, digest] : std::exchange(request.digests, {})) request.digests[whole(file)] = digest;
  CheckSayable(request);
  return request;
}

std::vector<std::string> AbsolutePaths(const std::vector<std::string>& files) {
  std::vector<std::string> paths;
  for (const std::string& file : files) {
    if (file.empty() || file.find('\0') != std::string::npos)
      throw std::invalid_argument("load: a library's path is not empty and has no zero byte");
    paths.push_back(std::filesystem::absolute(file).string());
  }
  return paths;
}

}  // namespace cppool::client
