// Measures the fixed times of a pool: from the spawn to the answer to `hello`, a round trip of `hello` on a
// warm daemon, and the smallest case without and with checks.
//
//     pool_latency --world-size 2 --backend cuda
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
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

}  // namespace

int main(int argc, char** argv) {
  cppool::PoolOptions options;
  int spawns = 5, round_trips = 1000, runs = 300;
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
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pool_latency: %s\n", error.what());
    return 1;
  }
}
