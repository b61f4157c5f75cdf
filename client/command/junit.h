// JUnit XML for continuous integration.
#pragma once

#include <chrono>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/pool.h>

namespace cppool::command {

struct JunitCase {
  using Outcome = Status;
  std::string group;  // its class name
  std::string name;
  Outcome outcome = Outcome::kPassed;
  double seconds = 0;
  std::string message;  // one line: what failed, or why it was skipped; of one that passed in the end: that
                        // it is flaky
  std::string details;  // any text: checks, the command that repeats the case
  std::string stderr_tail;
};

struct JunitSuite {
  std::string name;
  std::chrono::system_clock::time_point begin;
  std::vector<std::pair<std::string, std::string>> properties;  // what it ran on
};

// Returns XML text or the value of an attribute: markup is escaped; control characters and bytes that XML 1.0
// forbids become '?'.
std::string XmlEscape(std::string_view text);

void WriteJunit(std::ostream& out, const JunitSuite& suite, const std::vector<JunitCase>& cases);

}  // namespace cppool::command
