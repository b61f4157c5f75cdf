#include "client/command/junit.h"

#include <algorithm>

#include "base/utf8.h"
#include "client/command/command.h"

namespace cppool::command {
namespace {

// Returns the length of the character at the front of `text` if XML 1.0 allows it, else 0.
std::size_t XmlCharacter(std::string_view text) {
  const std::size_t length = base::Utf8Length(text);
  if (length == 0) return 0;
  const unsigned code = base::CodePoint(text.substr(0, length));
  const bool control = code < 0x20 && code != '\t' && code != '\n' && code != '\r';
  return control || code == 0xFFFE || code == 0xFFFF ? 0 : length;
}

}  // namespace

std::string XmlEscape(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t length = XmlCharacter(text);
    result += length == 0      ? "?"
              : text[0] == '&' ? "&amp;"
              : text[0] == '<' ? "&lt;"
              : text[0] == '>' ? "&gt;"
              : text[0] == '"' ? "&quot;"
                               : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

void WriteJunit(std::ostream& out, const JunitSuite& suite, const std::vector<JunitCase>& cases) {
  using Outcome = JunitCase::Outcome;
  double seconds = 0;
  for (const JunitCase& one : cases) seconds += one.seconds;
  auto count = [&](Outcome outcome) {
    return std::ranges::count_if(cases, [&](const JunitCase& one) { return one.outcome == outcome; });
  };
  // In UTC, without the letter that says so, which the schema of JUnit's reports does not have.
  out << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\""
      << XmlEscape(suite.name) << "\" tests=\"" << cases.size() << "\" failures=\"" << count(Outcome::kFailed)
      << "\" errors=\"" << count(Outcome::kError) << "\" skipped=\"" << count(Outcome::kSkipped)
      << "\" time=\"" << Fixed(seconds, 3) << "\" timestamp=\"" << UtcText(suite.begin) << "\" hostname=\""
      << XmlEscape(HostName()) << "\">\n";
  if (!suite.properties.empty()) out << "<properties>\n";
  for (const auto& [name, value] : suite.properties)
    out << "<property name=\"" << XmlEscape(name) << "\" value=\"" << XmlEscape(value) << "\"/>\n";
  if (!suite.properties.empty()) out << "</properties>\n";
  for (const JunitCase& one : cases) {
    out << "<testcase classname=\"" << XmlEscape(one.group) << "\" name=\"" << XmlEscape(one.name)
        << "\" time=\"" << Fixed(one.seconds, 3) << "\">";
    if (one.outcome != Outcome::kPassed) {
      const char* element = one.outcome == Outcome::kFailed  ? "failure"
                            : one.outcome == Outcome::kError ? "error"
                                                             : "skipped";
      out << "<" << element << " message=\"" << XmlEscape(one.message) << "\">" << XmlEscape(one.details)
          << "</" << element << ">";
    } else if (!one.message.empty()) {  // as Maven's Surefire has it
      out << "<flakyFailure message=\"" << XmlEscape(one.message) << "\" type=\"flaky\"><stackTrace>"
          << XmlEscape(one.details) << "</stackTrace></flakyFailure>";
    }
    if (!one.stderr_tail.empty()) out << "<system-err>" << XmlEscape(one.stderr_tail) << "</system-err>";
    out << "</testcase>\n";
  }
  out << "</testsuite>\n</testsuites>\n";
}

}  // namespace cppool::command
