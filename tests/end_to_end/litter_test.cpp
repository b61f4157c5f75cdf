// What a case leaves behind: put right, told, or both.
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"

namespace cppool::test {
namespace {

Json Ask(DaemonProcess& daemon, const std::string& name, const Json& params = Json::object()) {
  return daemon.Ask({{"op", "run"}, {"case", name}, {"load", CPPOOL_LITTERING_CASE}, {"params", params}});
}

}  // namespace

TEST_CASE("the floating-point environment of a library, a case and its work ends with their call") {
  DaemonProcess daemon({"--world-size", "2", "--backend", "host"});
  for (int i = 0; i < 3; ++i) {
    const Json answer = Ask(daemon, "floats");
    INFO(answer);
    CHECK(answer.at("status") == "passed");
  }
  CHECK(daemon.Wait() == 0);
}

}  // namespace cppool::test
