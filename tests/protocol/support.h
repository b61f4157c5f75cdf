// What the protocol's tests share.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tests/catch.h"
#include "protocol/json_text.h"
#include "protocol/request.h"

namespace cppool::protocol::test {

inline std::string Repeat(std::string_view text, std::size_t times) {
  std::string all;
  all.reserve(text.size() * times);
  for (std::size_t i = 0; i < times; ++i) all += text;
  return all;
}

// Independent of the code under test: a JSON string of `text` in strict mode is only written for valid UTF-8.
inline bool IsUtf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

// What `action` throws as `Error`; empty when it throws nothing.
template <typename Error, typename Action>
std::string Thrown(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    std::string what = error.what();
    CHECK(IsUtf8(what));
    CHECK(what.size() < 2000);
    return what;
  }
  return "";
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The error text holds every one of the parts.
inline void CheckText(const std::string& text, const std::vector<std::string>& parts) {
  CHECK_FALSE(text.empty());
  for (const std::string& part : parts) {
    INFO("wanted: " << part << "\nin: " << text);
    CHECK(Contains(text, part));
  }
}

}  // namespace cppool::protocol::test
