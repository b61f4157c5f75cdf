// Measures the fixed times of a pool: from the spawn to the answer to `hello`, a round trip of `hello` on a
// warm daemon, the smallest case without and with checks, and from Pool::Cancel to the answer of a run.
//
//     pool_latency --world-size 2 --backend cuda --tokens 32768
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

#include <cppool/pool.h>

#include "tests/measure/samples.h"

namespace {

using cppool::measure::Milliseconds;

void Print(const char* what, std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  std::printf("%-44s n %5zu  min %10.3f  median %10.3f  p99 %10.3f  max %10.3f ms\n", what, ms.size(),
              ms.front(), ms[ms.size() / 2], ms[ms.size() * 99 / 100], ms.back());
  std::fflush(stdout);
}

// Cancels runs of 1,000 iterations, each at another one. Prints what an iteration takes, too.
void MeasureCancel(cppool::Pool& pool, int tokens, int cancels) {
  const cppool::Json parameters = {{"batch_size", 1}, {"max_seqlen_q", tokens}, {"max_seqlen_kv", tokens}};
  cppool::RunOptions run;
  run.checks = false;
  const auto wall_ms = [&](int repeat) {
    run.repeat = repeat;
    const cppool::Result result = pool.Run(parameters, run);
    if (!result.ok()) throw std::runtime_error(result.error);
    return result.wall_ms;
  };
  wall_ms(2);  // warm-up
  const double one = wall_ms(1);
  std::printf("an iteration of %d tokens: %.3f ms\n", tokens, (wall_ms(11) - one) / 10);
  const cppool::Json before = pool.Hello().at("pid");
  std::vector<double> times;
  for (int i = 0; i < cancels; ++i) {
    run.repeat = 1000;
    auto runs = std::async(std::launch::async, [&] { return pool.Run(parameters, run); });
    for (int begun = 0;
         begun < 5 + i && runs.wait_for(std::chrono::seconds(0)) != std::future_status::ready;) {
      const cppool::Json status = pool.Status();
      if (status.at("running").is_object()) begun = status.at("running").value("iteration", 0);
    }
    cppool::Result cancelled;
    times.push_back(Milliseconds([&] {
      pool.Cancel();
      cancelled = runs.get();
    }));
    if (!cancelled.failure || cancelled.failure->kind != "cancelled")
      throw std::runtime_error("a cancelled run ended otherwise: " + cancelled.json.dump());
  }
  Print("cancel of 1000 iterations, to the answer", times);
  if (pool.Hello().at("pid") != before) throw std::runtime_error("the daemon did not stay");
}

}  // namespace

int main(int argc, char** argv) {
  cppool::PoolOptions options;
  int spawns = 5, round_trips = 1000, runs = 300, tokens = 64, cancels = 20;
  CLI::App app("Measures the fixed times of a pool: spawn, round trip, smallest case");
  app.add_option("--world-size", options.world_size, "Ranks")->capture_default_str();
  app.add_option("--backend", options.backend, "auto, cuda or host")->capture_default_str();
  app.add_option("--daemon", options.daemon, "Path of cppoold");
  app.add_option("--spawns", spawns, "Number of daemons to start")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--round-trips", round_trips, "Number of hello requests")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--runs", runs, "Number of run requests")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--tokens", tokens, "Tokens of the runs that are cancelled")->capture_default_str();
  app.add_option("--cancels", cancels, "Number of runs to cancel")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  try {
    std::vector<double> start, stop, hello;
    cppool::Json answer;
    cppool::Pool pool(options);
    for (int i = 0; i < spawns; ++i) {
      if (i) stop.push_back(Milliseconds([&] { pool.Stop(); }));
      start.push_back(Milliseconds([&] { answer = pool.Hello(); }));
    }
    std::printf("world size %d, backend %s, transport %s\ninit_ms %s\n", options.world_size,
                answer.at("backend").get<std::string>().c_str(),
                answer.at("transport").get<std::string>().c_str(), answer.at("init_ms").dump().c_str());
    Print("spawn to hello", start);
    if (!stop.empty()) Print("stop", stop);
    for (int i = 0; i < round_trips; ++i) hello.push_back(Milliseconds([&] { pool.Hello(); }));
    Print("hello on a warm daemon", hello);

    const cppool::Json smallest = {{"batch_size", 1}, {"max_seqlen_q", 16},  {"max_seqlen_kv", 16},
                                   {"num_heads", 1},  {"num_gqa_groups", 1}, {"head_dim_qk", 64},
                                   {"head_dim_v", 64}};
    for (const bool checks : {false, true}) {
      cppool::RunOptions run;
      run.checks = checks;
      std::vector<double> times;
      for (int i = 0; i < runs + 3; ++i) {
        const double ms = Milliseconds([&] {
          const cppool::Result result = pool.Run(smallest, run);
          if (!result.ok()) throw std::runtime_error(result.error);
        });
        if (i >= 3) times.push_back(ms);
      }
      Print(checks ? "smallest run (16 tokens, 1 head), checked" : "smallest run (16 tokens, 1 head)", times);
    }
    MeasureCancel(pool, tokens, cancels);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pool_latency: %s\n", error.what());
    return 1;
  }
}
