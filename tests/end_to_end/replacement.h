// A daemon whose library is built again and again, on either runtime.
#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <string>

#include <cppool/pool.h>

#include "tests/catch.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {

// `run` runs a case of the library `file`, a version of `library`. When 64 are loaded the daemon is replaced,
// and no call fails.
inline void CheckReplacement(PoolOptions options, const std::string& library,
                             const std::function<Result(Pool&, const std::string& file)>& run) {
  const TemporaryFolder folder;
  const Environment cache("CPPOOL_CACHE", folder.File("cache"));
  std::string log;
  options.log = [&](std::string_view line) { log += std::string(line) + "\n"; };
  Pool pool(options);
  const std::string bytes = ReadFile(library), file = folder.File("mine.so");
  REQUIRE_FALSE(bytes.empty());
  const Json first = pool.Hello().at("pid");
  std::size_t announced = 0;
  for (std::size_t i = 1; announced == 0 && i <= 100; ++i) {
    WriteFile(file, bytes + std::to_string(i));  // what lies behind the end of a library is not read
    if (i > 1) CHECK(pool.Hello().at("pid") == first);
    const Result result = run(pool, file);
    INFO("version " << i << ": " << result.error);
    REQUIRE(result.status == Status::kPassed);
    CHECK(result.attempts == 1);
    if (result.json.contains("respawn")) announced = i;
  }
  CHECK(announced == 64);
  CHECK(log.find("the daemon is replaced: 64 libraries are loaded, as many as may be") != std::string::npos);
  CHECK(run(pool, file).status == Status::kPassed);
  CHECK(pool.Hello().at("pid") != first);
}

}  // namespace cppool::test
