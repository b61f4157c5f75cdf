// The start line, `cppoold: start {json}`, of a daemon that cannot start.
#include "protocol/start.h"

#include <string>

#include "tests/catch.h"

namespace cppool::protocol::test {
namespace {

StartFailure Full() { return {"what to do", "cuda", "what happened", "backend", 1, 2, 0, "cuda", "nccl"}; }

StartFailure Bare(const std::string& error) {
  StartFailure failure;
  failure.error = error;
  failure.kind = "internal";
  return failure;
}

std::optional<StartFailure> Read(std::string line) {
  REQUIRE(line.back() == '\n');
  line.pop_back();
  CHECK(line.find('\n') == std::string::npos);
  return ParseStart(line);
}

}  // namespace

TEST_CASE("a StartFailure that is written as a line is read back unchanged") {
  const auto read = Read(SerializeStart(Full()));
  REQUIRE(read);
  CHECK(read->error == "what to do");
  CHECK(read->kind == "cuda");
  CHECK(read->detail == "what happened");
  CHECK(read->stage == "backend");
  CHECK(read->rank == 1);
  CHECK(read->world_size == 2);
  CHECK(read->devices == 0);
  CHECK(read->backend == "cuda");
  CHECK(read->transport == "nccl");
  const auto bare = Read(SerializeStart(Bare("why")));
  REQUIRE(bare);
  CHECK(bare->detail.empty());
  CHECK_FALSE(bare->world_size);
}

TEST_CASE("the object of a start line has its required members, and what is known") {
  CHECK(ToJson(StartFailure()) == Json{{"error", ""}, {"kind", ""}});
  CHECK(ToJson(Full()) == Json{{"error", "what to do"},
                               {"kind", "cuda"},
                               {"detail", "what happened"},
                               {"stage", "backend"},
                               {"rank", 1},
                               {"world_size", 2},
                               {"devices", 0},
                               {"backend", "cuda"},
                               {"transport", "nccl"}});
}

TEST_CASE("a start line is short and valid for any texts") {
  for (const std::string& text :
       {std::string(1 << 20, 'x'), std::string(100000, '\1'), std::string(5000, '\xff'),
        std::string("a\nb\0c", 5), std::string(1999, 'x') + std::string(100, '\xc3') + "\xbc"}) {
    StartFailure failure = Full();
    failure.error = failure.detail = failure.stage = text;
    const std::string line = SerializeStart(failure);
    CHECK(line.size() <= kMaxStartLine);
    const auto read = Read(line);
    REQUIRE(read);
    CHECK(read->devices == 0);
    CHECK(read->error.substr(0, 1) == (text[0] == '\xff' ? "\xef" : text.substr(0, 1)));
  }
  // A text is not cut in the middle of a character.
  std::string umlauts;
  while (umlauts.size() < 10000) umlauts += "\xc3\xbc";
  for (const char* odd : {"", "x"}) {
    const auto read = Read(SerializeStart(Bare(odd + umlauts)));
    REQUIRE(read);
    CHECK(read->error.find("\xef\xbf\xbd") == std::string::npos);
  }
}

TEST_CASE("a line that is incomplete or not a start line is ignored") {
  const std::string line = SerializeStart(Full());
  for (std::size_t length = 0; length + 2 < line.size(); ++length)
    CHECK_FALSE(ParseStart(line.substr(0, length)));
  for (const char* text :
       {"cppoold: start", "cppoold: start []", "cppoold: start {}", R"(cppoold: start {"error": "x"})",
        R"(cppoold: start {"error": "x", "kind": 1})", R"( cppoold: start {"error": "x", "kind": "cuda"})",
        R"(cppoold: start {"error": "x", "kind": "cuda"} more)",
        R"(cppoold: start {"error": "x", "kind": "cuda", "rank": "1"})",
        R"(cppoold: start {"error": "x", "kind": "cuda", "devices": 1e99})",
        R"(cppoold: start {"error": "x", "kind": "cuda", "devices": -1})",
        "cppoold: start {\"error\": \"\xff\", \"kind\": \"cuda\"}"})
    CHECK_FALSE(ParseStart(text));
  CHECK(ParseStart(R"(cppoold: start {"error": "x", "kind": "cuda", "new": [{}]})"));
}

}  // namespace cppool::protocol::test
