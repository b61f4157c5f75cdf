#include "base/digest.h"

#include "tests/catch.h"

namespace cppool::test {

TEST_CASE("a digest is FNV-1a's: its authors' test vectors") {
  CHECK(base::Digest("") == "cbf29ce484222325");
  CHECK(base::Digest("a") == "af63dc4c8601ec8c");
  CHECK(base::Digest("foobar") == "85944171f73967e8");
  CHECK(base::Digest(std::string("a\0b", 3)) != base::Digest("ab"));
}

}  // namespace cppool::test
