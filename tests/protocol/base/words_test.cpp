#include "base/words.h"

#include <string>
#include <vector>

#include "tests/catch.h"

namespace {

using cppool::base::Join;
using cppool::base::Split;
using Words = std::vector<std::string>;

TEST_CASE("words: pieces between separators, with empty ones, and none behind the last") {
  CHECK(Split("", ',') == Words{});
  CHECK(Split("a", ',') == Words{"a"});
  CHECK(Split("a,,b,", ',') == Words{"a", "", "b"});
  CHECK(Split(",\n", '\n') == Words{","});
  CHECK(Split(std::string("a\0b", 3), '\0') == Words{"a", "b"});
}

TEST_CASE("words: a separator between two words, empty ones too") {
  CHECK(Join({}) == "");
  CHECK(Join({"a", "b"}) == "a, b");
  CHECK(Join({"", "a", ""}, "; ") == "; a; ");
}

}  // namespace
