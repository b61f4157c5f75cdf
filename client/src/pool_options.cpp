#include "client/src/pool_options.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "client/src/members.h"
#include "protocol/start.h"

namespace cppool::client {
namespace {

// Calls visit(name, option), with the range of an int behind.
template <typename Options, typename Visit>
void ForEachOption(Options& options, Visit visit) {
  visit("world_size", options.world_size, 1, protocol::kMaxWorldSize);
  visit("daemon", options.daemon);
  visit("backend", options.backend);
  visit("transport", options.transport);
  visit("devices", options.devices);
  visit("case_files", options.case_files);
  visit("sentinel", options.sentinel);
  visit("log_level", options.log_level);
  visit("python", options.python);
  visit("preload", options.preload);
  visit("launch", options.launch);
  visit("arguments", options.arguments);
  visit("environment", options.environment);
  visit("attach", options.attach);
  visit("retries", options.retries, 0, 1000);
  visit("start_limit_ms", options.start_limit);
  visit("grace_ms", options.grace);
  visit("kill_grace_ms", options.kill_grace);
  visit("idle_exit_ms", options.idle_exit);
  visit("queue_limit_ms", options.queue_limit);
}

template <typename Value>
Json Written(const Value& value) {
  return value;
}
Json Written(const std::vector<std::pair<std::string, std::string>>& entries) {
  Json object = Json::object();
  for (const auto& [name, value] : entries) object[name] = value;
  return object;
}
Json Written(const std::chrono::milliseconds& time) { return time.count(); }
Json Written(const std::optional<std::string>& text) { return text ? Json(*text) : Json(); }

}  // namespace

PoolOptions PoolOptionsFromJson(const Json& json) {
  PoolOptions options;
  Members members(json, "the pool's options");
  ForEachOption(
      options, [&](const char* name, auto& option, auto... range) { members.Take(name, range..., &option); });
  members.End();
  return options;
}

Json ToJson(const PoolOptions& options) {
  Json json = Json::object();
  ForEachOption(options,
                [&](const char* name, const auto& option, auto...) { json[name] = Written(option); });
  return json;
}

}  // namespace cppool::client
