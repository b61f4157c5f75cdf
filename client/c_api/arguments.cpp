#include "client/c_api/arguments.h"

#include <algorithm>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>
#include <variant>

#include "client/suite/repeat.h"
#include "client/suite/suite.h"
#include "protocol/json_text.h"
#include "protocol/start.h"

namespace cppool::client {
namespace {

using std::chrono::milliseconds;

// The members of one object; each that is taken must have the type asked for, and none may be left over.
class Members {
 public:
  Members(const char* text, std::string what)
      : json_(text == nullptr ? Json::object() : protocol::ParseJson(text)), what_(std::move(what)) {
    if (!json_.is_object()) throw std::invalid_argument(what_ + " must be a JSON object");
  }

  void Take(const char* key, std::string* to) { Read(key, "a string", &Json::is_string, to); }
  void Take(const char* key, std::vector<std::string>* to) {
    Read(
        key, "a list of strings", [](const Json& value) { return AreStrings(value) && value.is_array(); },
        to);
  }
  void Take(const char* key, std::vector<std::pair<std::string, std::string>>* to) {
    std::map<std::string, std::string> entries;
    Read(
        key, "an object of strings", [](const Json& value) { return AreStrings(value) && value.is_object(); },
        &entries);
    to->insert(to->end(), entries.begin(), entries.end());
  }
  void Take(const char* key, std::int64_t minimum, std::int64_t maximum, std::int64_t* to) {
    const std::string range = "an integer from " + std::to_string(minimum) + " to " + std::to_string(maximum);
    Read(
        key, range,
        [=](const Json& value) {
          return value.is_number_integer() &&
                 !(value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX) &&
                 value.get<std::int64_t>() >= minimum && value.get<std::int64_t>() <= maximum;
        },
        to);
  }
  void Take(const char* key, milliseconds* to) {
    std::int64_t count = to->count();
    Take(key, 0, 24 * 3600 * 1000, &count);
    *to = milliseconds(count);
  }
  void Take(const char* key, std::int64_t minimum, std::int64_t maximum, int* to) {
    std::int64_t value = *to;
    Take(key, minimum, maximum, &value);
    *to = static_cast<int>(value);
  }

  void End() const {
    for (const auto& [key, value] : json_.items())
      if (std::find(known_.begin(), known_.end(), key) == known_.end())
        throw std::invalid_argument(protocol::Unknown("key", key, known_, " of " + what_));
  }

 private:
  static bool AreStrings(const Json& values) {
    return std::all_of(values.begin(), values.end(), [](const Json& value) { return value.is_string(); });
  }

  template <typename Holds, typename Value>
  void Read(const char* key, const std::string& type, Holds holds, Value* to) {
    known_.emplace_back(key);
    const auto found = json_.find(key);
    if (found == json_.end()) return;
    if (!std::invoke(holds, *found))
      throw std::invalid_argument(protocol::Quoted(key) + " of " + what_ + " must be " + type + ", not " +
                                  protocol::EchoValue(*found));
    *to = found->template get<Value>();
  }

  const Json json_;
  const std::string what_;
  std::vector<std::string> known_;
};

using Words = std::vector<std::string>;

// The libraries that may hold the case; attention is built in.
Words LibrariesFor(const PoolOptions& options, const protocol::RunRequest& request) {
  if (request.case_name == suite::Cell().case_name) return {};
  Words files = options.case_files;
  files.insert(files.end(), request.load.begin(), request.load.end());
  return files;
}

}  // namespace

PoolOptions ToPoolOptions(const char* text) {
  PoolOptions options;
  Members members(text, "the pool's options");
  members.Take("world_size", 1, protocol::kMaxWorldSize, &options.world_size);
  members.Take("daemon", &options.daemon);
  members.Take("backend", &options.backend);
  members.Take("transport", &options.transport);
  members.Take("devices", &options.devices);
  members.Take("case_files", &options.case_files);
  members.Take("sentinel", &options.sentinel);
  members.Take("log_level", &options.log_level);
  members.Take("arguments", &options.arguments);
  members.Take("environment", &options.environment);
  members.Take("retries", 0, 1000, &options.retries);
  members.Take("start_limit_ms", &options.start_limit);
  members.Take("grace_ms", &options.grace);
  members.Take("kill_grace_ms", &options.kill_grace);
  members.Take("idle_exit_ms", &options.idle_exit);
  members.End();
  return options;
}

protocol::Operation ToOperation(const char* text) {
  if (text == nullptr) throw std::invalid_argument("there is no request");
  protocol::Request request = protocol::ParseRequest(text);
  if (request.id) throw std::invalid_argument("a request to a pool has no \"id\": the pool gives it one");
  return std::move(request.operation);
}

std::pair<std::string, CompileOptions> ToCompileOptions(const char* text) {
  std::pair<std::string, CompileOptions> result;
  Members members(text, "what is to be compiled");
  members.Take("source", &result.first);
  members.Take("include_folders", &result.second.include_folders);
  members.End();
  if (result.first.empty())
    throw std::invalid_argument("\"source\" is missing: the path of a .cu, .cpp or .c file");
  return result;
}

std::vector<suite::Cell> ToCells(const char* text) {
  std::string name;
  Words filters;
  std::int64_t max_seqlen = 0;
  Members members(text, "the selection of cells");
  members.Take("suite", &name);
  members.Take("filters", &filters);
  members.Take("max_seqlen", 1, INT64_MAX, &max_seqlen);
  members.End();
  std::vector<suite::Filter> parsed;
  for (const std::string& filter : filters) parsed.push_back(suite::FilterFromText(filter, "a filter"));
  const std::vector<suite::Cell> suite = suite::LoadSuite(name);
  const std::vector<suite::Cell> selected = suite::Select(suite, parsed);
  if (selected.empty())
    throw std::invalid_argument("no cell of the suite matches the filters: " +
                                suite::DescribeNoMatch(suite, parsed));
  std::vector<suite::Cell> cells;
  for (const std::size_t index : suite::RunOrder(selected)) {
    cells.push_back(selected[index]);
    if (max_seqlen > 0) suite::Shrink(&cells.back().params, max_seqlen, cells.back().world_size);
  }
  return cells;
}

std::string ToCommand(const PoolOptions& options, const protocol::RunRequest& request) {
  const Words libraries = LibrariesFor(options, request);
  // `cppool run` takes no string form, and refuses a library that the case is not in; which one that is only
  // a daemon can tell.
  if (request.from_kwargs || libraries.size() > 1 || !suite::HasOptions(options, request))
    return suite::PipeCommand(options, {{std::nullopt, request}});
  suite::Cell cell;
  cell.world_size = options.world_size;
  cell.case_name = request.case_name;
  cell.params = request.params;
  return suite::Assignments(options) +
         suite::RepeatCommand("cppool", cell, suite::OptionWords(options, libraries, request));
}

}  // namespace cppool::client
