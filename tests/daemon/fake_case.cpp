#include "tests/daemon/fake_case.h"

#include <chrono>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string_view>
#include <thread>

namespace cppool::test {
namespace {

const cppool_parameter kParameters[] = {
    {"action", CPPOOL_TYPE_STRING, "\"pass\"", nullptr, 0, 0, 0, "what to do"},
    {"rank", CPPOOL_TYPE_INTEGER, "0", nullptr, 0, 63, 0, "the rank that does it; the other ranks pass"},
    {"number", CPPOOL_TYPE_NUMBER, "0.5", nullptr, 0, 1, 0, "read back"},
    {"flag", CPPOOL_TYPE_BOOLEAN, "false", nullptr, 0, 0, 0, "read back"},
    {"maybe", CPPOOL_TYPE_STRING, "null", R"(["yes", "no"])", 0, 0, 0, "may be null"},
    {"needs", CPPOOL_TYPE_NUMBER, "0", nullptr, 0, 1e18, 0, "bytes per rank"},
    {"seed", CPPOOL_TYPE_INTEGER, "1234", nullptr, 0, 9.2e18, 0, "echoed"},
};

cppool_status Validate(cppool_validation* v) {
  const std::string_view action = v->string(v, "action");
  if (action == "validate throws") throw std::runtime_error("from validate");
  if (action == "invalid") return v->fail(v, "flag and number do not go together"), CPPOOL_INVALID_REQUEST;
  if (action == "unsupported") return v->fail(v, "not on Sundays"), CPPOOL_UNSUPPORTED;
  if (action == "inapplicable") return v->fail(v, "needs three ranks"), CPPOOL_INAPPLICABLE;
  if (action == "replace") v->replace_params(v, R"({"action": "replaced", "rank": 0, "number": 0.25})");
  if (action == "work") v->kernels(v, R"({"name": "fake", "version": "7", "family": "none", "more": 1})");
  if (action == "name badly") v->kernels(v, R"({"name": "fake"})");
  if (action == "replace badly") v->replace_params(v, "[1]");
  if (action == "validate misuses") v->integer(v, "nonsense");
  if (action == "dump" && (!v->dump || std::string_view(v->dump) != "some/folder" || v->inputs))
    return CPPOOL_INTERNAL;
  if (action == "given" && (v->given(v, "flag") || v->given(v, "maybe") || !v->given(v, "number")))
    return CPPOOL_INTERNAL;
  if (action == "ask for room" && !v->has_room(v, v->number(v, "needs")))
    return v->fail(v, "no room"), CPPOOL_UNSUPPORTED;
  v->needs(v, v->number(v, "needs"));
  return CPPOOL_OK;
}

void WaitForAbort(cppool_case_context* c) { static_cast<FakeWorld*>(c->runtime->self)->WaitForAbort(); }

cppool_status Act(cppool_case_context* c, std::string_view action) {
  const cppool_check good{"out", "no_cp", 0.001, 0.002, 0.01, 1, 0};
  const cppool_check bad{"dq", "oracle", 0.5, 0.25, 0.01, 0, 0.5};
  const cppool_check not_a_number{"out", "no_cp", std::nan(""), 0, 0.01, 1, 0};
  constexpr std::string_view kInGroup = "begin a group, ";
  if (action.starts_with(kInGroup)) {
    c->runtime->group_start(c->runtime);
    return Act(c, action.substr(kInGroup.size()));
  }
  if (action == "pass") c->check(c, &good);
  if (action == "read back") {
    const bool right = c->number(c, "number") == 0.25 && c->boolean(c, "flag") && !c->string(c, "maybe") &&
                       c->integer(c, "seed") == 7 && c->checks == 0 && c->runtime->world_size == 2;
    if (!right) return CPPOOL_INTERNAL;
  }
  if (action == "dump" && (!c->dump || std::string_view(c->dump) != "some/folder" || c->inputs))
    return CPPOOL_INTERNAL;
  if (action == "no dump" && (c->dump || c->inputs)) return CPPOOL_INTERNAL;
  if (action == "replaced" && c->number(c, "number") != 0.25) return CPPOOL_INTERNAL;
  if (action == "check fails") c->check(c, &good), c->check(c, &bad);
  if (action == "work, a failed check and an error")
    return c->work(c, "forward", 4e9), c->check(c, &bad), c->fail(c, "a consequence"), CPPOOL_INTERNAL;
  if (action == "check fails and returns an error")
    return c->check(c, &bad), c->fail(c, "a consequence"), CPPOOL_INTERNAL;
  if (action == "nan") c->check(c, &not_a_number);
  if (action == "mismatch") return c->fail(c, "7 is not 8"), CPPOOL_MISMATCH;
  if (action == "last error") return CPPOOL_INTERNAL;
  if (action == "a communicator fails, then the rank itself") {
    // The other ranks get the communicator's error before this rank reports its own.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return c->fail(c, "an illegal address"), CPPOOL_CUDA;
  }
  if (action == "nothing, then a mismatch") {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return c->fail(c, "7 is not 8"), CPPOOL_MISMATCH;
  }
  if (action == "memory") return c->fail(c, "no room"), CPPOOL_OUT_OF_MEMORY;
  if (action == "fail") return c->fail(c, "it broke"), CPPOOL_INTERNAL;
  if (action == "quote") return c->fail(c, "not this: the runtime's last error"), CPPOOL_CUDA;
  if (action == "fail by 2") return c->fail_by(c, "rank 2 broke it", 2), CPPOOL_CUDA;
  if (action == "fail by itself") return c->fail_by(c, "it broke", c->runtime->rank), CPPOOL_INTERNAL;
  if (action == "fail by nobody") return c->fail_by(c, "it broke", 9), CPPOOL_INTERNAL;
  if (action == "cuda") return c->fail(c, "an illegal address"), CPPOOL_CUDA;
  if (action == "cannot") return c->fail(c, "no kernel"), CPPOOL_UNSUPPORTED;
  if (action == "does not fit") return c->fail(c, "needs three ranks"), CPPOOL_INAPPLICABLE;
  if (action == "throw") throw std::runtime_error("thrown by a case");
  if (action == "throw 7") throw 7;
  if (action == "misuse") c->number(c, "action");
  if (action == "hang") WaitForAbort(c);
  if (action == "work") {
    c->work(c, "forward", 4e9 * (c->runtime->rank + 1));
    c->result(c, "bandwidth", R"({"GB/s": 3.5})");
  }
  if (action == "bad result") c->result(c, "x", "{");
  if (action == "result ok") c->result(c, "ok", "1");
  if (action == "iterate") {
    while (c->next_iteration(c)) {
    }
    if (c->next_iteration(c)) return CPPOOL_INTERNAL;
  }
  if (action == "iterate, then check") {
    while (c->next_iteration(c)) {
    }
    c->check(c, &good);
  }
  return CPPOOL_OK;
}

cppool_status Run(cppool_case_context* c) {
  const std::string_view action = c->string(c, "action");
  if (action == "dump" || action == "no dump" || action == "work" || action == "replaced" ||
      action == "read back")
    return Act(c, action);
  if (action == "iterate together") return Act(c, "iterate");
  if (action == "iterate, then check") return Act(c, action);
  if (c->runtime->rank == c->integer(c, "rank")) {
    return Act(c, action.substr(0, action.find(" while others")));
  }
  if (action.ends_with(" while others wait")) WaitForAbort(c);  // as in a collective
  if (action.ends_with(" while others begin")) {
    while (c->next_iteration(c)) WaitForAbort(c);
  }
  if (action.ends_with(" while others iterate")) return Act(c, "iterate");
  if (action.ends_with(" while others say so")) return CPPOOL_NCCL;     // with the runtime's last failure
  if (action.ends_with(" while others point")) return CPPOOL_INTERNAL;  // the same
  if (action.ends_with(" while others are stuck"))
    static_cast<FakeWorld*>(c->runtime->self)->WaitForRelease();
  if (action.ends_with(" while others add work")) {  // as a rank that is stuck in a loop
    auto* world = static_cast<FakeWorld*>(c->runtime->self);
    for (int i = 0; !world->Released(); ++i)
      c->work(c, ("some kernel or other " + std::to_string(i)).c_str(), 1);
  }
  if (action.ends_with(" while others are busy")) std::this_thread::sleep_for(std::chrono::milliseconds(150));
  return CPPOOL_OK;
}

}  // namespace

const cppool_case* FakeCase() {
  static const cppool_case definition{
      CPPOOL_CASE_ABI,        sizeof(cppool_case), "fake", "does what `action` names", kParameters,
      std::size(kParameters), &Validate,           &Run,   CPPOOL_CASE_DUMPS};
  return &definition;
}

Inside::Inside(int world_size, daemon::FailureLimits limits, std::shared_ptr<FakeWorld> fake_world)
    : fake(std::move(fake_world)), world(std::make_unique<FakeBackend>(fake, world_size)) {
  world.Open(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  registry.Add(FakeCase(), "a test");
  daemon::ThreadRanks::Options options;
  options.limits = limits;
  Dispatch(std::move(options));
}

void Inside::Dispatch(daemon::ThreadRanks::Options options, daemon::Watchdog* watchdog) {
  ranks = std::make_unique<daemon::ThreadRanks>(world, registry, under_way, std::move(options));
  daemon::Dispatcher::Options answers;
  answers.sentinel = "";
  dispatcher = std::make_unique<daemon::Dispatcher>(*ranks, under_way, watchdog, std::move(answers));
}

std::optional<daemon::Answer> Inside::Handle(const protocol::LineReader::Line& line) {
  return dispatcher->Handle(std::make_shared<protocol::IncomingRequest>(line));
}

Json Inside::Ask(const std::string& line) {
  const auto answer = Handle({line, false, 0});
  REQUIRE(answer);
  REQUIRE(answer->text.find('\n') == answer->text.size() - 1);
  last_fatal = answer->fatal;
  last_shutdown = answer->shutdown;
  dispatcher->WhileIdle();
  return Json::parse(answer->text);
}

}  // namespace cppool::test
