#include "protocol/digest.h"

#include "tests/catch.h"

namespace cppool::test {

TEST_CASE("a digest is FNV-1a's: its authors' test vectors") {
  CHECK(protocol::Digest("") == "cbf29ce484222325");
  CHECK(protocol::Digest("a") == "af63dc4c8601ec8c");
  CHECK(protocol::Digest("foobar") == "85944171f73967e8");
  CHECK(protocol::Digest(std::string("a\0b", 3)) != protocol::Digest("ab"));
}

}  // namespace cppool::test
