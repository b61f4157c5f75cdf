// Tests that ThreadSanitizer reports a missing wait between two streams of the host runtime, and nothing if
// the wait is present.
#include "tests/catch.h"
#include "tests/child.h"

using cppool::test::Child;
using cppool::test::RunChild;

namespace {

constexpr int kRaceExit = 66;

Child Probe(const std::string& scenario, const std::string& wait) {
  return RunChild("TSAN_OPTIONS=exitcode=" + std::to_string(kRaceExit) +
                  " timeout 60 " CPPOOL_RACE_PROBE " " + scenario + " " + wait);
}

}  // namespace

TEST_CASE("host runtime under ThreadSanitizer: a missing wait is reported, and nothing else") {
  const std::string scenario =
      GENERATE("write", "other-event", "allocated", "released", "allocator", "destroyed", "recreated",
               "communicators", "new-communicator", "collective", "ring-piece", "ring-memory");
  CAPTURE(scenario);
  const Child with = Probe(scenario, "wait");
  if (with.output.find("FATAL: ThreadSanitizer") != std::string::npos) {
    WARN("ThreadSanitizer does not run on this machine: " << with.output);
    return;
  }
  CAPTURE(with.output);
  CHECK(with.exit_code == 0);
  CHECK(with.output == "done\n");
  const Child without = Probe(scenario, "no-wait");
  CAPTURE(without.output);
  CHECK(without.exit_code == kRaceExit);
  CHECK_THAT(without.output, Catch::Matchers::ContainsSubstring("WARNING: ThreadSanitizer: data race"));
  CHECK_THAT(without.output, Catch::Matchers::ContainsSubstring("done"));
}
