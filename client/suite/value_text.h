// Values as people write them, in files, filters and command lines.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cppool/pool.h>

namespace cppool::suite {

// A user has given something wrong: a suite, a filter, an option. The command prints it and exits with
// code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One value: JSON if the text is JSON (`4096`, `[-1, 0]`, `true`, `"8k"`), an integer times 1024 if it is
// digits before a k (`8k` is 8192), else a string (`bf16`).
Json ValueFromText(const std::string& text);
// Returns the values of a list, `bf16,fp16` or `8k,16k`; a comma inside brackets, braces or quotes does not
// separate. At least one. Throws UsageError for an empty value in a list, naming `option`.
std::vector<Json> ValuesFromText(const std::string& text, const std::string& option);
// Returns the inverse, on one line: a string as it is, anything else as JSON. A string that would be read as
// another value or as several, or with control characters, is written as JSON too.
std::string TextFromValue(const Json& value);

// Splits "key=value" at the first '='. Throws UsageError without one or with an empty key; `option` is named
// in the error.
std::pair<std::string, std::string> SplitAssignment(const std::string& text, const std::string& option);
// Splits "a,[1,2],c" at the commas outside brackets, braces and quotes.
std::vector<std::string> SplitList(const std::string& text);

}  // namespace cppool::suite
