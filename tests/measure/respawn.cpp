// Measures the time from SIGKILL, and from the exit of the daemon, to the next passed case, alternately with
// the same time for a fresh daemon.
//
//     respawn --world-size 2 --backend cuda
//
// | row                  | from                                                | to                   |
// | fresh spawn          | the call of a Pool without a daemon                 | its passed case      |
// | killed between cases | SIGKILL                                             | the next passed case |
// | killed in mid-case   | SIGKILL, which makes the running case an error      | the next passed case |
#include <signal.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <cppool/pool.h>

#include "tests/measure/samples.h"

namespace {

using cppool::measure::Median;
using Clock = std::chrono::steady_clock;

double Since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

// Kills the process and measures the time until it has exited, which the kernel and the driver determine and
// cppool cannot shorten.
class Killer {
 public:
  explicit Killer(pid_t pid, std::chrono::milliseconds delay = {})
      : thread_([this, pid, delay] {
          std::this_thread::sleep_for(delay);
          killed_ = Clock::now();
          kill(pid, SIGKILL);
          siginfo_t end;
          // If the Pool reaps the process first, waitid fails with ECHILD, which also means that it has
          // exited.
          while (waitid(P_PID, static_cast<id_t>(pid), &end, WEXITED | WNOWAIT) < 0 && errno == EINTR) {
          }
          took_ = Since(killed_);
        }) {}
  ~Killer() { Wait(); }
  void Wait() {
    if (thread_.joinable()) thread_.join();
  }
  Clock::time_point killed() const { return killed_; }  // after Wait
  double took() const { return took_; }                 // ms until it has exited, after Wait

 private:
  Clock::time_point killed_;
  double took_ = 0;
  std::thread thread_;
};

std::vector<double> Differences(const std::vector<double>& ms, const std::vector<double>& less) {
  std::vector<double> result(ms.size());
  std::transform(ms.begin(), ms.end(), less.begin(), result.begin(), std::minus<>());
  return result;
}

void Print(const char* what, std::vector<double> ms, double fresh) {
  std::sort(ms.begin(), ms.end());
  std::printf("| %s | %zu | %.1f | %.1f | %.1f | %.3f |\n", what, ms.size(), ms.front(), Median(ms),
              ms.back(), Median(ms) / fresh);
}

void RunSmallest(cppool::Pool& pool) {
  const cppool::Result result = pool.Run({{"batch_size", 1},
                                          {"max_seqlen_q", 16},
                                          {"max_seqlen_kv", 16},
                                          {"num_heads", 1},
                                          {"num_gqa_groups", 1},
                                          {"head_dim_qk", 64},
                                          {"head_dim_v", 64}});
  if (!result.ok() || result.attempts != 1) throw std::runtime_error("not passed: " + result.json.dump());
}

// Starts a case that runs much longer than the delay until the kill.
void RunLong(cppool::Pool& pool) {
  cppool::RunOptions run;
  run.repeat = 10000;
  run.checks = false;
  const cppool::Result result =
      pool.Run({{"batch_size", 1}, {"max_seqlen_q", 4096}, {"max_seqlen_kv", 4096}, {"num_heads", 8}}, run);
  throw std::runtime_error("the long case ended before it was killed: " + result.json.dump());
}

}  // namespace

int main(int argc, char** argv) {
  cppool::PoolOptions options;
  int rounds = 7;
  CLI::App app("Measures the time from the kill of a daemon to the next passed case");
  app.add_option("--world-size", options.world_size, "Ranks")->capture_default_str();
  app.add_option("--backend", options.backend, "auto, cuda or host")->capture_default_str();
  app.add_option("--transport", options.transport, "auto, nccl or peer")->capture_default_str();
  app.add_option("--daemon", options.daemon, "Path of cppoold");
  app.add_option("--rounds", rounds, "Measurements of each kind")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  options.retries = 0;

  try {
    cppool::Pool pool(options);
    const cppool::Json hello = pool.Hello();
    std::vector<double> fresh, between, end, during, busy_end, answer;
    for (int i = 0; i < rounds; ++i) {
      pool.Stop();
      const auto begin = Clock::now();
      RunSmallest(pool);
      fresh.push_back(Since(begin));

      {
        Killer killer(pool.Hello().at("pid").get<pid_t>());
        killer.Wait();
        RunSmallest(pool);
        between.push_back(Since(killer.killed()));
        end.push_back(killer.took());
      }
      Killer killer(pool.Hello().at("pid").get<pid_t>(), std::chrono::milliseconds(200));
      try {
        RunLong(pool);
      } catch (const cppool::PoolError& error) {
        if (error.kind() != cppool::PoolError::Kind::kDied) throw;
        killer.Wait();
      }
      answer.push_back(Since(killer.killed()));
      RunSmallest(pool);
      during.push_back(Since(killer.killed()));
      busy_end.push_back(killer.took());
    }
    std::printf("world size %d, backend %s, transport %s\n\n", options.world_size,
                hello.at("backend").get<std::string>().c_str(),
                hello.at("transport").get<std::string>().c_str());
    std::printf("| to the next passed case | n | min ms | median ms | max ms | median / fresh |\n");
    std::printf("| --- | --- | --- | --- | --- | --- |\n");
    Print("fresh spawn", fresh, Median(fresh));
    Print("killed between cases", between, Median(fresh));
    Print("of it, to the exit of the process", end, Median(fresh));
    Print("of it, from the exit", Differences(between, end), Median(fresh));
    Print("killed in mid-case", during, Median(fresh));
    Print("of it, to the exit of the process", busy_end, Median(fresh));
    Print("of it, from the exit", Differences(during, busy_end), Median(fresh));
    Print("of it, to the error of the killed case", answer, Median(fresh));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "respawn: %s\n", error.what());
    return 1;
  }
}
