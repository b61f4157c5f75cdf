// Shared by the fuzzers' targets: the report of a property that does not hold, and the properties of an error
// text.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "protocol/json_text.h"

namespace cppool::fuzz {

// Aborts if the property does not hold: the fuzzer then saves the input.
inline void Require(bool holds, const char* property, const std::string& detail = "") {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s%s%s\n", property, detail.empty() ? "" : ": ", detail.c_str());
  std::abort();
}

// Independent of the code under test: nlohmann's dump() throws for text that is not valid UTF-8.
inline bool IsUtf8(const std::string& text) {
  try {
    (void)protocol::Json(text).dump();
    return true;
  } catch (const protocol::Json::exception&) {
    return false;
  }
}

// Requires that an error text is neither empty nor long, and is valid UTF-8, so that it fits into a response.
inline void RequireErrorText(const std::string& text) {
  Require(!text.empty(), "an error has a text");
  Require(text.size() < 3000, "an error's text is short", std::to_string(text.size()) + " bytes");
  Require(IsUtf8(text), "an error's text is UTF-8", text);
}

}  // namespace cppool::fuzz
