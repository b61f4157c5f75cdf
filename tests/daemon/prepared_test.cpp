// The object that a case's `validate` prepares for the ranks: one for all ranks, released once.
#include <atomic>
#include <iterator>
#include <mutex>
#include <set>
#include <string_view>

#include "tests/daemon/fake_case.h"

namespace cppool::test {
namespace {

const cppool_parameter kParameters[] = {
    {"action", CPPOOL_TYPE_STRING, "\"once\"", nullptr, 0, 0, 0, "what validate does"}};

struct Kept {
  int number = 42;
};
std::atomic<int> made, released;
std::mutex mutex;
std::set<const void*> seen;  // the ranks' values of `prepared`

void Keep(cppool_validation* v) {
  ++made;
  v->prepare(v, new Kept, [](void* object) {
    ++released;
    delete static_cast<Kept*>(object);
  });
}

cppool_status Validate(cppool_validation* v) {
  const std::string_view action = v->string(v, "action");
  if (action != "never") Keep(v);
  if (action == "twice") Keep(v);
  if (action == "for good") v->prepare(v, &made, nullptr);
  return action == "refuse" ? CPPOOL_INVALID_REQUEST : CPPOOL_OK;
}

cppool_status Run(cppool_case_context* c) {
  const std::string_view action = c->string(c, "action");
  const std::lock_guard lock(mutex);
  seen.insert(c->prepared);
  if (action == "never") return c->prepared ? CPPOOL_INTERNAL : CPPOOL_OK;
  if (action == "for good") return c->prepared == &made ? CPPOOL_OK : CPPOOL_INTERNAL;
  // Only the object that the ranks use has not been released.
  const bool whole = made == released + 1 && static_cast<const Kept*>(c->prepared)->number == 42;
  return whole ? CPPOOL_OK : CPPOOL_INTERNAL;
}

}  // namespace

TEST_CASE(
    "the object that validate prepares is the same for every rank, and is released once, at the end of its "
    "request") {
  static const cppool_case definition{CPPOOL_CASE_ABI,
                                      sizeof(cppool_case),
                                      "keeps",
                                      "keeps an object",
                                      kParameters,
                                      std::size(kParameters),
                                      &Validate,
                                      &Run,
                                      0};
  Inside inside(4);
  inside.registry.Add(&definition, "a test");
  const auto ask = [&](const char* op, const char* action) {
    made = released = 0;
    seen.clear();
    return inside.Send({{"op", op}, {"case", "keeps"}, {"params", {{"action", action}}}});
  };
  CHECK(ask("run", "once")["ok"] == true);
  CHECK(seen.size() == 1);
  CHECK((made == 1 && released == 1));
  CHECK(ask("run", "twice")["ok"] == true);
  CHECK((made == 2 && released == 2));
  CHECK(ask("run", "for good")["ok"] == true);
  CHECK((made == 1 && released == 1));
  CHECK(ask("run", "never")["ok"] == true);
  CHECK(seen == std::set<const void*>{nullptr});
  CHECK(ask("validate", "once")["runs"] == true);
  CHECK((made == 1 && released == 1));
  CHECK(ask("run", "refuse")["failure"]["kind"] == "invalid_request");
  CHECK((made == 1 && released == 1));
  CHECK(seen.empty());
}

}  // namespace cppool::test
