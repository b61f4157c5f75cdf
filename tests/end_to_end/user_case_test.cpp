#include "tests/end_to_end/user_case_smoke.h"

namespace cppool::test {

TEST_CASE("a user's case, built against the installed prefix, on the host") {
  for (const int world_size : {1, 2, 4, 8}) RunUserCase("host", world_size);
}

}  // namespace cppool::test
