#include "protocol/crash.h"

#include "tests/catch.h"

namespace cppool::test {

TEST_CASE("a crash line is read as it was written") {
  Crash crash;
  crash.error = "rank 1 crashed";
  CHECK(protocol::SerializeCrash(crash) == "cppoold: crash {\"error\":\"rank 1 crashed\"}\n");
  crash.rank = 1;
  crash.stage = "forward/attend 1";
  crash.case_name = "mine";
  crash.library = "/x/mine.so";
  crash.stack = {"Inner [mine.so]", "Outer [mine.so]"};
  CHECK(protocol::ToJson(crash) == protocol::Json{{"error", "rank 1 crashed"},
                                                  {"rank", 1},
                                                  {"stage", "forward/attend 1"},
                                                  {"case", "mine"},
                                                  {"library", "/x/mine.so"},
                                                  {"stack", {"Inner [mine.so]", "Outer [mine.so]"}}});
  std::string line = protocol::SerializeCrash(crash);
  line.pop_back();
  const auto read = protocol::ParseCrash(line);
  REQUIRE(read);
  CHECK(read->error == crash.error);
  CHECK(read->rank == 1);
  CHECK(read->stage == crash.stage);
  CHECK(read->case_name == crash.case_name);
  CHECK(read->library == crash.library);
  CHECK(read->stack == crash.stack);
}

TEST_CASE("a crash line keeps its limit: frames are dropped at the outer end, then texts are cut") {
  Crash crash;
  crash.error = std::string(3000, 'e') + "\xff";
  crash.stack.assign(1000, "a function with a name of some length [libmine.so]");
  crash.stack.front() = "innermost";
  const std::string line = protocol::SerializeCrash(crash);
  CHECK(line.size() <= protocol::kMaxCrashLine);
  const auto read = protocol::ParseCrash(line.substr(0, line.size() - 1));
  REQUIRE(read);
  CHECK(read->stack.size() > 4);
  CHECK(read->stack.front() == "innermost");
}

TEST_CASE("what is no crash line is not taken for one") {
  for (const char* line :
       {"", "cppoold: crash ", "cppoold: crash {}", "cppoold: crash {\"error\": 1}",
        "cppoold: crash {\"error\": \"x\"", "cppoold: crash {\"error\": \"x\", \"stack\": [1]}",
        "cppoold: crash {\"error\": \"x\", \"rank\": \"1\"}", "cppoold: start {\"error\": \"x\"}",
        "cppoold: crash [1]"}) {
    INFO(line);
    CHECK_FALSE(protocol::ParseCrash(line));
  }
  CHECK(protocol::ParseCrash("cppoold: crash {\"error\": \"x\", \"unknown\": 1}"));
}

}  // namespace cppool::test
