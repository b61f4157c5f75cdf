// Pools of a suite beside one another: the next one starts while the last one works, and the last one ends
// while the next one works.
#include <sys/stat.h>

#include <algorithm>
#include <fstream>

#include "tests/catch.h"
#include "tests/client/command_support.h"

namespace cppool::command::test {
namespace {

using namespace cppool::test;

// A daemon that is the fake one between two commands of the shell.
std::string Around(const TemporaryFolder& folder, const std::string& before, const std::string& after) {
  std::string name = folder.File("around");
  std::ofstream(name) << "#!/bin/sh\n"
                      << before << "\n'" << CPPOOL_FAKE_DAEMON << "' \"$@\"\n"
                      << after << "\n";
  chmod(name.c_str(), 0755);
  return name;
}

}  // namespace

TEST_CASE("the pool of the next world size starts while the last one works") {
  const TemporaryFolder folder;
  const std::string log = folder.File("log");
  const std::string daemon =
      Around(folder, "echo \"start $2\" >>'" + log + "'", "echo \"end $2\" >>'" + log + "'");
  const Ran ran = Cppool({"run", "--suite", "smoke", "--param", "do=late", "--param", "ms=50"}, daemon);
  CHECK(ran.Last() == "20 passed, 0 failed, 0 skipped");
  // The smoke suite has 8 cells of 2 ranks and then 12 of 4.
  CHECK(Lines(ReadFile(log)) == std::vector<std::string>{"start 2", "start 4", "end 2", "end 4"});
}

TEST_CASE("what other pools write while a cell runs is in the log and is not the cell's output") {
  const TemporaryFolder folder;
  const std::string log = folder.File("run.log");
  const std::string daemon =
      Around(folder, "echo \"start of $2\" >&2", "[ $2 = 4 ] || sleep 0.3; echo \"end of $2\" >&2");
  const Ran ran = Cppool({"run", "--suite", "smoke", "--param", "do=say", "--param", "text=\"its own\\n\"",
                          "--verbose", "--log", log},
                         daemon);
  CHECK(ran.Last() == "20 passed, 0 failed, 0 skipped");
  int own = 0;
  for (const std::string& line : ran.lines) own += line == "  | its own";
  CHECK(own == 20);
  for (const char* other : {"start of 2", "start of 4", "end of 2"}) {
    INFO(other);
    CHECK_FALSE(ran.Prints(other));
    int logged = 0;
    for (const std::string& line : Lines(ReadFile(log)))
      if (line.ends_with(other)) {
        ++logged;
        CHECK_FALSE(Has(line, " W="));  // no cell
      }
    CHECK(logged == 1);
  }
}

TEST_CASE("a pool that cannot start beside the last one starts after it") {
  const TemporaryFolder folder;
  const std::string lock = folder.File("lock"), refused = folder.File("refused");
  // As where a GPU takes one process at a time.
  const std::string daemon = Around(
      folder, "mkdir '" + lock + "' || { echo \"$2\" >>'" + refused + "'; exit 2; }", "rmdir '" + lock + "'");
  const Ran ran = Cppool({"run", "--suite", "smoke", "--param", "do=late", "--param", "ms=50"}, daemon);
  CHECK(ran.Last() == "20 passed, 0 failed, 0 skipped");
  CHECK(ReadFile(refused) == "4\n");
}

TEST_CASE("a case that is short of memory runs again when its pool is alone") {
  const TemporaryFolder folder;
  const std::string running = folder.File("running"), starts = folder.File("starts");
  mkdir(running.c_str(), 0755);
  const std::string daemon =
      Around(folder, "touch '" + running + "'/$$; echo \"$2\" >>'" + starts + "'", "rm '" + running + "'/$$");
  const Ran ran = Cppool(
      {"run", "--suite", "smoke", "--param", "do=alone", "--param", "ms=50", "--param", "folder=" + running},
      daemon);
  CHECK(ran.Last() == "20 passed, 0 failed, 0 skipped");
  CHECK(Lines(ReadFile(starts)) == std::vector<std::string>{"2", "4", "4"});
}

}  // namespace cppool::command::test
