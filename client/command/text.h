// Small conversions between JSON, words and command lines.
#pragma once

#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/pool.h>

namespace cppool::command {

// What is wrong with the command line: printed with exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// JSON where the text is JSON, else the text itself: `4096`, `[-1, 0]`, `true`, `bf16`.
Json ValueFromText(const std::string& text);
// The other way round: a string as it is, anything else as compact JSON; so is a string that would read as JSON, or has
// control characters, so that a command is one line.
std::string TextFromValue(const Json& value);

// "key=value" cut at the first '='. Throws UsageError without one, or with an empty key; `option` names the option that it was given to.
std::pair<std::string, std::string> SplitAssignment(const std::string& text, const std::string& option);
// "a,[1,2],c" cut at the commas outside brackets, braces and quotes.
std::vector<std::string> SplitList(const std::string& text);

std::string ShellQuote(const std::string& word);  // as one word of a POSIX shell
// As XML text or attribute: markup escaped; what XML 1.0 forbids, control characters and invalid UTF-8, replaced by '?'.
std::string XmlEscape(std::string_view text);
std::string FirstLine(const std::string& text);
void PrintJson(std::ostream& out, const Json& value);  // one line, at once
std::string Fixed(double value, int digits);           // "-" when it is not finite

}  // namespace cppool::command
