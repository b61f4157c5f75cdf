// Ten clients of one server at once, with faults: every answer is right and goes to its client, and the
// server's memory, threads and descriptors do not grow.
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "tests/client/serve_support.h"

using namespace cppool::test;
using cppool::Fault;
using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::PoolOptions;
using cppool::Result;
using cppool::RunOptions;

namespace {

struct Counts {
  int passed = 0, faults = 0, cancelled = 0, left = 0;
  std::vector<std::string> wrong;  // what must not happen
};

// One client: small cases, each with a seed of its own, and every twentieth with a fault.
class Besieger {
 public:
  Besieger(const Serve& server, int number) : server_(server), random_(static_cast<unsigned>(number)) {
    options_ = server.Real(1 + number % 2);
    options_.arguments = {"--allow-faults"};
    pool_ = std::make_unique<Pool>(options_);
    seed_ = 1000000 * (number + 1);
  }

  void Run(std::chrono::steady_clock::time_point until) {
    while (std::chrono::steady_clock::now() < until && counts.wrong.empty()) try {
        Step();
      } catch (const std::exception& error) {
        counts.wrong.emplace_back(error.what());
      }
  }

  Counts counts;

 private:
  Json Params() { return {{"max_seqlen_q", 64}, {"num_heads", 4}, {"seed", ++seed_}}; }

  void Step() {
    switch (random_() % 100) {
      case 0:
        return Fail("throw", "internal");
      case 1:
        return Fail("stall", "timeout");
      case 2:
        return Die("segfault");
      case 3:
        return Die("exit");
      case 4:
        return Leave();
      case 5:
        return CancelOne();
      default:
        break;
    }
    const Result result = Asked([&] { return pool_->Run(Params()); });
    if (!result.ok()) return Wrong("not passed: " + result.error);
    if (result.seed != static_cast<std::uint64_t>(seed_)) return Wrong("another one's answer");
    ++counts.passed;
  }

  // Another client's fault may end the daemon between two requests: then nobody has been asked.
  template <typename Call>
  Result Asked(Call call) {
    for (int tries = 0;; ++tries) try {
        return call();
      } catch (const PoolError& error) {
        if (tries == 5 || error.kind() != PoolError::Kind::kDied) throw;
      }
  }

  void Fail(const std::string& kind, const std::string& failure) {
    RunOptions options = Within(kind == "stall" ? 300ms : 60000ms);
    options.fault = Fault{.kind = kind, .rank = options_.world_size - 1};
    const Result result = Asked([&] { return pool_->Run(Params(), options); });
    if (!result.failure || result.failure->kind != failure) return Wrong(kind + ": " + result.json.dump());
    ++counts.faults;
  }

  void Die(const std::string& kind) {
    RunOptions options;
    options.fault = Fault{.kind = kind};
    try {
      pool_->Run(Params(), options);
    } catch (const PoolError& error) {
      if (error.kind() != PoolError::Kind::kDied) return Wrong(kind + ": " + error.what());
      ++counts.faults;
      return;
    }
    Wrong(kind + ": there is an answer");
  }

  // Goes in the middle of a request.
  void Leave() {
    RawClient raw(server_);
    if (!raw.Send(RawClient::Attach()) || !raw.Read()) return Wrong("cannot attach");
    raw.Send({{"op", "run"}, {"id", 1}, {"repeat", 10000}, {"params", Params()}});
    std::this_thread::sleep_for(std::chrono::milliseconds(random_() % 20));
    ++counts.left;
  }

  void CancelOne() {
    std::thread canceller([&] {
      while (!pool_->Cancel()) std::this_thread::sleep_for(1ms);
    });
    const Result result = Asked([&] { return pool_->Run(Params(), Long()); });
    canceller.join();
    if (!result.failure || result.failure->kind != "cancelled") return Wrong("cancel: " + result.json.dump());
    ++counts.cancelled;
  }

  void Wrong(const std::string& what) { counts.wrong.push_back(what); }

  const Serve& server_;
  std::mt19937 random_;
  PoolOptions options_;
  std::unique_ptr<Pool> pool_;
  std::int64_t seed_ = 0;
};

struct Held {
  std::size_t fds = 0;
  long threads = 0, resident_kb = 0;
};

Held HeldBy(pid_t pid) {
  Held held;
  const std::filesystem::directory_iterator fds("/proc/" + std::to_string(pid) + "/fd");
  held.fds = static_cast<std::size_t>(std::distance(begin(fds), end(fds)));
  for (const std::string& line : Lines(ReadFile("/proc/" + std::to_string(pid) + "/status"))) {
    if (line.starts_with("Threads:")) held.threads = std::stol(line.substr(8));
    if (line.starts_with("VmRSS:")) held.resident_kb = std::stol(line.substr(6));
  }
  return held;
}

void Besiege(std::chrono::milliseconds time) {
  constexpr int kClients = 10;
  const Serve server;
  const auto round = [&](std::chrono::milliseconds lasts) {
    Counts sum;
    std::vector<std::unique_ptr<Besieger>> besiegers;
    for (int i = 0; i < kClients; ++i) besiegers.push_back(std::make_unique<Besieger>(server, i));
    std::vector<std::thread> threads;
    const auto until = std::chrono::steady_clock::now() + lasts;
    for (auto& besieger : besiegers) threads.emplace_back([&, until] { besieger->Run(until); });
    for (std::thread& thread : threads) thread.join();
    for (const auto& besieger : besiegers) {
      const Counts& counts = besieger->counts;
      CHECK(counts.wrong == std::vector<std::string>());
      sum.passed += counts.passed;
      sum.faults += counts.faults;
      sum.cancelled += counts.cancelled;
      sum.left += counts.left;
    }
    return sum;
  };
  // Pools of both sizes are up, and nobody is connected.
  const auto settled = [&] {
    for (const int world_size : {1, 2}) {
      PoolOptions options = server.Real(world_size);
      options.arguments = {"--allow-faults"};
      for (PoolOptions& used : std::vector{options, server.Real()}) {
        Pool pool(used);
        CHECK(pool.Run(Small()).ok());
      }
    }
    Held held, before;
    CHECK(Eventually([&] {
      before = std::exchange(held, HeldBy(server.pid()));
      std::this_thread::sleep_for(50ms);
      return before.fds == held.fds && before.threads == held.threads;
    }));
    return held;
  };
  settled();
  round(time / 4);
  const Held before = settled();
  const Counts sum = round(time - time / 4);
  const Held after = settled();
  CHECK(sum.passed > 0);
  WARN(sum.passed << " passed, " << sum.faults << " faults, " << sum.cancelled << " cancelled, " << sum.left
                  << " clients left; " << before.resident_kb << " and " << after.resident_kb << " KiB");
  CHECK(after.fds == before.fds);
  CHECK(after.threads == before.threads);
  if (!kSanitized) CHECK(after.resident_kb < before.resident_kb + 8192);
}

}  // namespace

TEST_CASE("ten clients with faults get their own answers, for three seconds") { Besiege(3s); }

TEST_CASE("ten clients with faults get their own answers, for twenty seconds", "[long][minute]") {
  Besiege(20s);
}

// By hand: client_serve_test "*ten minutes"
TEST_CASE("ten clients with faults get their own answers, for ten minutes", "[.]") { Besiege(600s); }
