// What the fuzzers' targets share: how a property that does not hold is reported, and what an error text must be.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "protocol/json_text.h"

namespace cppool::fuzz {

// Ends the process: the fuzzer then keeps the input that it was given.
inline void Require(bool holds, const char* property, const std::string& detail = "") {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s%s%s\n", property, detail.empty() ? "" : ": ", detail.c_str());
  std::abort();
}

// Independent of the code under test: in strict mode only UTF-8 is written.
inline bool IsUtf8(const std::string& text) {
  try {
    (void)protocol::Json(text).dump();
    return true;
  } catch (const protocol::Json::exception&) {
    return false;
  }
}

// An error says something, whatever it was given: short, and fit for a response and a report.
inline void RequireErrorText(const std::string& text) {
  Require(!text.empty(), "an error has a text");
  Require(text.size() < 3000, "an error's text is short", std::to_string(text.size()) + " bytes");
  Require(IsUtf8(text), "an error's text is UTF-8", text);
}

}  // namespace cppool::fuzz
