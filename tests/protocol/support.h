// Shared by the protocol's tests.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "protocol/json_text.h"
#include "protocol/request.h"
#include "tests/catch.h"

namespace cppool::protocol::test {

inline std::string Repeat(std::string_view text, std::size_t times) {
  std::string all;
  all.reserve(text.size() * times);
  for (std::size_t i = 0; i < times; ++i) all += text;
  return all;
}

// Independent of the code under test: nlohmann's dump() throws for text that is not valid UTF-8.
inline bool IsUtf8(const std::string& text) {
  try {
    (void)Json(text).dump();
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

// The text of the `Error` that `action` throws; empty if it throws nothing.
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

// Checks that the error text contains every part.
inline void CheckText(const std::string& text, const std::vector<std::string>& parts) {
  CHECK_FALSE(text.empty());
  for (const std::string& part : parts) {
    INFO("wanted: " << part << "\nin: " << text);
    CHECK(text.find(part) != std::string::npos);
  }
}

}  // namespace cppool::protocol::test
