// What cases write through stdio and iostreams, as it is on the daemon's stderr.
#include <map>
#include <sstream>
#include <string>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"

namespace cppool::test {
namespace {

DaemonProcess StartOdd(int world_size) {
  return DaemonProcess(Host(world_size, {"--case", CPPOOL_ODD_CASE}));
}

Json Request(const char* action, int deadline_ms) {
  return {{"op", "run"},
          {"case", "odd"},
          {"params", {{"action", action}, {"rank", 1}}},
          {"deadline_ms", deadline_ms}};
}

// How often each line is there. Without the log's.
std::map<std::string, int> Lines(const std::string& text) {
  std::map<std::string, int> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);)
    if (line.find("] [cppoold ") == std::string::npos) ++lines[line];
  return lines;
}

}  // namespace

TEST_CASE("each line that a rank writes has its rank, however it is written") {
  DaemonProcess daemon = StartOdd(4);
  for (const char* action : {"talk", "talk", "fork"})
    CHECK(daemon.Ask(Request(action, 60000)).at("status") == "passed");
  std::map<std::string, int> expected;
  const std::size_t most = 4080;  // bytes in a line
  for (int rank = 0; rank < 4; ++rank) {
    const std::string label = "[rank " + std::to_string(rank) + "] ";
    for (int i = 0; i < 100; ++i) {
      const std::string number = std::to_string(i);
      expected[label + "printf " + number] = 2;
      expected[label + "cout " + number] = 2;
      expected[label + "stderr cerr " + number + " and stderr"] = 2;
      expected[label + "clog " + number] = 2;
    }
    expected[label + "puts"] = expected[label + "putchar"] = 200;
    for (const char* once : {"a thread", "a stream", "not ended"}) expected[label + once] = 2;
    expected["[rank " + std::to_string(rank + 100) + "] with a label of its own"] = 2;
    expected[label + std::string(most, 'x')] = 2 * ((1 << 20) / most + 1);
    expected[label + std::string((1 << 20) % most, 'x')] = 2;
  }
  expected["[rank 1] a child"] = 1;
  const auto written = Lines(daemon.Stderr());
  for (const auto& [line, count] : written) {
    INFO(line.substr(0, 200));
    CHECK(count == expected[line]);
  }
  CHECK(written.size() == expected.size());
}

TEST_CASE("a line that a rank has begun is on stderr when its process crashes, exits or cannot go on") {
  for (const char* action : {"crash", "crash on stream", "abort", "exit"}) {
    INFO(action);
    DaemonProcess daemon = StartOdd(2);
    daemon.Send(Request(action, 60000).dump());
    CHECK(daemon.Wait() != 0);
    const std::string text = daemon.Stderr();
    const auto begun = text.find("[rank 1] soon " + std::string(action) + "\n");
    CHECK(begun != std::string::npos);
    CHECK(text.find("\"rank\":1", begun) != std::string::npos);  // the line about the crash follows
  }
  for (const char* action : {"spin", "throw alone"}) {
    INFO(action);
    DaemonProcess daemon = StartOdd(2);
    CHECK(daemon.Ask(Request(action, action == std::string("spin") ? 500 : 60000)).at("fatal") == true);
    CHECK(Lines(daemon.Stderr())["[rank 1] soon " + std::string(action)] == 1);
    CHECK(daemon.Stderr().find("\n[rank 0] [") == std::string::npos);  // the log has no second label
  }
}

}  // namespace cppool::test
