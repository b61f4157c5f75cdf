// Iterations until the medians are precise enough, decided for all ranks at once.
#include "daemon/sampling.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "tests/daemon/fake_case.h"

namespace cppool::test {

using daemon::Sampling;
using daemon::SamplingRule;
using kernels::StageSamples;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLong{3600000};

// Runs a rule on one rank whose iteration i takes time(i). Returns the numbers of iterations at the
// decisions.
template <typename Time>
std::vector<std::int64_t> Decisions(const SamplingRule& rule, const Time& time, std::string* stopped) {
  Sampling sampling(rule, 1);
  std::vector<std::int64_t> decisions = {sampling.Start()};
  std::vector<double> times;
  for (;;) {
    while (static_cast<std::int64_t>(times.size()) < decisions.back())
      times.push_back(time(static_cast<int>(times.size())));
    const std::int64_t next = sampling.Decide({{"forward", times}});
    if (next == decisions.back()) break;
    decisions.push_back(next);
  }
  *stopped = sampling.stopped();
  return decisions;
}

}  // namespace

TEST_CASE("sampling: ends as soon as the median is precise, and not before it can be judged") {
  std::string stopped;
  CHECK(Decisions(
            {0.01, kLong, 1000}, [](int) { return 3.0; }, &stopped) == std::vector<std::int64_t>{1, 6});
  CHECK(stopped == "precision");
  // Every other iteration takes 10 % longer: the interval stays between the two values.
  const auto noisy = [](int i) { return i % 2 ? 1.1 : 1.0; };
  CHECK(Decisions({0.01, kLong, 30}, noisy, &stopped) == std::vector<std::int64_t>{1, 6, 8, 12, 16, 24, 30});
  CHECK(stopped == "repeat");
  CHECK(Decisions({0.05, kLong, 30}, noisy, &stopped) == std::vector<std::int64_t>{1, 6});
  CHECK(stopped == "precision");
  CHECK(Decisions({0.01, kLong, 1}, noisy, &stopped) == std::vector<std::int64_t>{1});
  CHECK(stopped == "repeat");
}

TEST_CASE("sampling: ends when the time is over, and does not begin what does not fit") {
  std::string stopped;
  const auto slow = [](int i) {
    std::this_thread::sleep_for(milliseconds(50));
    return i % 2 ? 100.0 : 50.0;
  };
  const auto decisions = Decisions({0.001, milliseconds(180), 1000}, slow, &stopped);
  CHECK(stopped == "max_ms");
  CHECK(decisions.back() <= 5);  // and not 6, after which the median could first be judged
}

TEST_CASE("sampling: all ranks get the same decision, for the slowest rank of each iteration") {
  // Each rank alone is perfectly steady in the median; together half of the iterations are slow.
  Sampling sampling({0.01, kLong, 8}, 2);
  const auto rank = [&](int number) {
    std::vector<std::int64_t> decisions = {sampling.Start()};
    std::vector<double> times;
    for (;;) {
      while (static_cast<std::int64_t>(times.size()) < decisions.back())
        times.push_back(static_cast<int>(times.size() % 4) == number ? 2.0 : 1.0);
      decisions.push_back(sampling.Decide({{"forward", times}}));
      if (decisions.back() == *(decisions.end() - 2)) return decisions;
    }
  };
  auto other = std::async(std::launch::async, rank, 1);
  CHECK(rank(0) == std::vector<std::int64_t>{1, 6, 8, 8});
  CHECK(other.get() == std::vector<std::int64_t>{1, 6, 8, 8});
  CHECK(sampling.stopped() == "repeat");
}

TEST_CASE("sampling: a rank that has left is not waited for") {
  Sampling sampling({0.01, kLong, 100}, 3);
  sampling.Start();
  auto waiting = std::async(std::launch::async, [&] { return sampling.Decide({{"forward", {1.0}}}); });
  CHECK(waiting.wait_for(milliseconds(20)) == std::future_status::timeout);
  sampling.Leave();
  CHECK(waiting.get() == 1);
  CHECK(sampling.Decide({{"forward", {1.0}}}) == 1);
  CHECK(sampling.stopped().empty());
}

TEST_CASE("sampling: a run iterates until its answer is precise, on all ranks alike") {
  Inside inside(2);
  std::atomic<int> slow{0};
  inside.fake->samples = [&](int rank) {
    const std::lock_guard lock(inside.fake->mutex);
    const std::string own = std::to_string(rank) + " iteration ";
    const auto timed = std::count_if(
        inside.fake->calls.begin(), inside.fake->calls.end(),
        [&](const auto& call) { return call.rfind(own, 0) == 0 && call.find('-') == std::string::npos; });
    std::vector<double> times;
    for (int i = 0; i < timed; ++i) times.push_back(rank == 1 && i < slow ? 5.0 : 1.0);
    return StageSamples{{"forward", times}};
  };
  Json request = {{"op", "run"},
                  {"case", "fake"},
                  {"warmup", 1},
                  {"params", {{"action", "iterate together"}}},
                  {"sampling", {{"precision", 0.02}}}};
  Json answer = inside.Send(request);
  CHECK(answer.at("status") == "passed");
  CHECK(answer.at("stopped") == "precision");
  CHECK(answer.at("ranks").at(1).at("samples").at("forward") == Json{1.0, 1.0, 1.0, 1.0, 1.0, 1.0});

  inside.fake->ForgetCalls();
  slow = 3;  // the interval leaves out three of twelve values at each end, four of sixteen
  answer = inside.Send(request);
  CHECK(answer.at("stopped") == "precision");
  const std::size_t count = answer.at("ranks").at(0).at("samples").at("forward").size();
  CHECK(count == 16);
  CHECK(answer.at("ranks").at(1).at("samples").at("forward").size() == count);

  slow = 100000;
  inside.fake->ForgetCalls();
  request["repeat"] = 1;
  answer = inside.Send(request);
  CHECK(answer.at("stopped") == "repeat");
  CHECK(answer.at("ranks").at(0).at("samples").at("forward").size() == 1);

  // Without sampling: as many as asked for, and their times.
  inside.fake->ForgetCalls();
  request.erase("sampling");
  request["repeat"] = 4;
  answer = inside.Send(request);
  CHECK_FALSE(answer.contains("stopped"));
  CHECK(answer.at("ranks").at(0).at("samples").at("forward").size() == 4);
  inside.fake->ForgetCalls();
  request["repeat"] = 1;
  CHECK_FALSE(inside.Send(request).at("ranks").at(0).contains("samples"));
}

TEST_CASE("sampling: a rank that fails releases those that wait for a decision") {
  Inside inside(2);
  inside.fake->samples = [&](int rank) -> StageSamples {
    if (rank == 1) throw kernels::RuntimeError(CPPOOL_CUDA, "the work failed");
    return {{"forward", {1.0}}};
  };
  const Json answer = inside.Send(Json{{"op", "run"},
                                       {"case", "fake"},
                                       {"params", {{"action", "iterate together"}}},
                                       {"sampling", Json::object()}});
  CHECK(answer.at("status") == "error");
  CHECK(answer.at("failure").at("rank") == 1);
  CHECK(answer.at("failure").at("kind") == "cuda");
}

TEST_CASE("profile: one range from the first timed iteration to the end of the last") {
  Inside inside(2);
  const Json answer = inside.Send(Json{{"op", "run"},
                                       {"case", "fake"},
                                       {"warmup", 1},
                                       {"repeat", 2},
                                       {"profile", true},
                                       {"params", {{"action", "iterate together"}}}});
  CHECK(answer.at("status") == "passed");
  const std::lock_guard lock(inside.fake->mutex);
  const auto& calls = inside.fake->calls;
  const auto at = [&](const std::string& call) {
    CHECK(std::count(calls.begin(), calls.end(), call) == 1);
    return std::find(calls.begin(), calls.end(), call) - calls.begin();
  };
  CHECK(at("profile") < std::min(at("0 iteration 0"), at("1 iteration 0")));
  CHECK(at("end of profile") > std::max(at("0 samples"), at("1 samples")));
}

TEST_CASE("a request has either waits or a fault") {
  Inside inside(2);
  const Json answer =
      inside.Send(Json{{"op", "run"}, {"case", "fake"}, {"waits", true}, {"fault", {{"kind", "throw"}}}});
  CHECK(answer.at("failure").at("kind") == "invalid_request");
  CHECK(answer.at("error").get<std::string>().find("\"waits\"") != std::string::npos);
}

}  // namespace cppool::test
