#include "client/command/junit.h"

#include <algorithm>

#include "client/command/text.h"

namespace cppool::command {

void WriteJunit(std::ostream& out, const std::string& suite, const std::vector<JunitCase>& cases) {
  using Outcome = JunitCase::Outcome;
  double seconds = 0;
  for (const JunitCase& one : cases) seconds += one.seconds;
  auto count = [&](Outcome outcome) {
    return std::count_if(cases.begin(), cases.end(),
                         [&](const JunitCase& one) { return one.outcome == outcome; });
  };
  out << "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"" << XmlEscape(suite)
      << "\" tests=\"" << cases.size() << "\" failures=\"" << count(Outcome::kFailed) << "\" errors=\""
      << count(Outcome::kError) << "\" skipped=\"" << count(Outcome::kSkipped) << "\" time=\""
      << Fixed(seconds, 3) << "\">\n";
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
