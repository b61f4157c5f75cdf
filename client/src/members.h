// Reads a JSON object whose members are all known.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::client {

using protocol::Json;

// Takes the members of an object one by one. All throw std::invalid_argument for a member that is not of the
// type asked for, and End for one that has not been taken.
class Members {
 public:
  // `what` is named in errors: "the pool's options".
  Members(Json object, std::string what) : json_(std::move(object)), what_(std::move(what)) {
    if (!json_.is_object()) throw std::invalid_argument(what_ + " must be a JSON object");
  }

  void Take(const char* key, Json* to) {  // any value
    Read(
        key, "", [](const Json&) { return true; }, to);
  }
  void Take(const char* key, std::string* to) { Read(key, "a string", &Json::is_string, to); }
  void Take(const char* key, std::optional<std::string>* to) {  // null: none
    Json value;
    Read(
        key, "a string", [](const Json& json) { return json.is_string() || json.is_null(); }, &value);
    if (value.is_string()) *to = value.get<std::string>();
  }
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
  void Take(const char* key, std::chrono::milliseconds* to) {
    std::int64_t count = to->count();
    Take(key, 0, 24 * 3600 * 1000, &count);
    *to = std::chrono::milliseconds(count);
  }
  void Take(const char* key, std::int64_t minimum, std::int64_t maximum, int* to) {
    std::int64_t value = *to;
    Take(key, minimum, maximum, &value);
    *to = static_cast<int>(value);
  }

  void End() const {
    for (const auto& [key, value] : json_.items())
      if (std::ranges::find(known_, key) == known_.end())
        throw std::invalid_argument(protocol::Unknown("key", key, known_, " of " + what_));
  }

 private:
  static bool AreStrings(const Json& values) {
    return std::ranges::all_of(values, [](const Json& value) { return value.is_string(); });
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

}  // namespace cppool::client
