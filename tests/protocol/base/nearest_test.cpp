#include "base/nearest.h"

#include <optional>
#include <string>
#include <vector>

#include "tests/catch.h"

namespace cppool::base {
namespace {

TEST_CASE("the nearest word is one that a typing error explains") {
  const std::vector<std::string> words = {"hello",        "list",          "run", "stats", "shutdown",
                                          "max_seqlen_q", "max_seqlen_kv", "p2p", "bf16",  "fp16"};
  struct Row {
    std::string word;
    std::optional<std::string> nearest;
  };
  const std::vector<Row> rows = {{"helo", "hello"},
                                 {"hlelo", "hello"},
                                 {"HELLO", "hello"},
                                 {"hello", "hello"},
                                 {"nur", std::nullopt},
                                 {"rnu", "run"},
                                 {"shutdwon", "shutdown"},
                                 {"shtudwon", "shutdown"},
                                 {"stat", "stats"},
                                 {"lists", "list"},
                                 {"max_seq_len_q", "max_seqlen_q"},
                                 {"max_seqlen_k", "max_seqlen_q"},
                                 {"p2pp", "p2p"},
                                 {"fp8", std::nullopt},
                                 {"bf61", "bf16"},
                                 {"", std::nullopt},
                                 {"zzzzz", std::nullopt},
                                 {"runs the whole suite", std::nullopt},
                                 {std::string(1 << 20, 'r'), std::nullopt},
                                 {"\xff\xfe", std::nullopt}};
  for (const Row& row : rows) {
    CAPTURE(row.word.substr(0, 40));
    CHECK(Nearest(row.word, words) == row.nearest);
  }
  CHECK_FALSE(Nearest("run", {}));
  CHECK_FALSE(Nearest("x", {"a", ""}));  // a word of one letter is near no other word
}

}  // namespace
}  // namespace cppool::base
