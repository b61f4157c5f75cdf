// A case that does what its parameter `action` names, and the inner parts of a daemon to run it: a fake world
// and a dispatcher.
#pragma once

#include <cppool/case.h>

#include <memory>
#include <optional>
#include <string>

#include "daemon/case_registry.h"
#include "daemon/dispatcher.h"
#include "daemon/thread_ranks.h"
#include "tests/catch.h"
#include "tests/daemon/fake_backend.h"

namespace cppool::test {

using protocol::Json;

const cppool_case* FakeCase();

// With kSoon ranks that wait for a failed one are aborted at once; with kPatient they have long ended by
// themselves.
inline constexpr daemon::FailureLimits kSoon{std::chrono::milliseconds(30), std::chrono::seconds(20),
                                             std::chrono::seconds(20)};
inline constexpr daemon::FailureLimits kPatient{std::chrono::seconds(20), std::chrono::seconds(20),
                                                std::chrono::seconds(20)};

struct Inside {
  explicit Inside(int world_size = 2, daemon::FailureLimits limits = kSoon,
                  std::shared_ptr<FakeWorld> fake_world = std::make_shared<FakeWorld>());

  // Ranks and a dispatcher anew.
  void Dispatch(daemon::ThreadRanks::Options ranks, daemon::Watchdog* watchdog = nullptr);

  std::optional<daemon::Answer> Handle(const protocol::LineReader::Line& line);
  // The answer to a request line; requires that it is one line of JSON without a sentinel.
  Json Ask(const std::string& line);
  Json Send(const Json& request) { return Ask(request.dump()); }
  Json Run(const Json& params = Json::object()) {
    return Send(Json{{"op", "run"}, {"case", "fake"}, {"params", params}});
  }

  std::shared_ptr<FakeWorld> fake;
  daemon::World world;
  daemon::CaseRegistry registry;
  daemon::UnderWay under_way;
  std::unique_ptr<daemon::ThreadRanks> ranks;
  std::unique_ptr<daemon::Dispatcher> dispatcher;
  bool last_fatal = false;
  bool last_shutdown = false;
};

}  // namespace cppool::test
