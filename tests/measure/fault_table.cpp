// Injects every kind of fault on every schedule and prints the outcomes as a Markdown table:
//
//     fault_table --backend host --world-size 2,4
//     fault_table --backend cuda --transport peer --world-size 2,4 --kind trap,out_of_bounds
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "tests/end_to_end/fault_grid.h"

namespace {

struct Row {
  std::map<std::string, int> ended;
  std::vector<std::string> wrong;
  std::vector<double> seconds;
  int hung = 0, stayed = 0, next_passed = 0;

  void Add(const cppool::test::FaultCell& cell, const cppool::test::FaultOutcome& outcome) {
    ++ended[outcome.ended];
    seconds.push_back(outcome.time.count());
    hung += outcome.hung;
    stayed += outcome.stayed;
    next_passed += outcome.next == "passed";
    const std::string where =
        cell.kind + ", " + cell.schedule + ", world size " + std::to_string(cell.world_size);
    if (!outcome.wrong.empty()) wrong.push_back(where + " " + outcome.wrong);
    if (outcome.next != "passed") wrong.push_back(where + ", the next case: " + outcome.next);
  }

  void Print(const std::string& name) {
    std::sort(seconds.begin(), seconds.end());
    std::string ends;
    for (const auto& [end, count] : ended) ends += (ends.empty() ? "" : ", ") + end;
    std::printf("| %s | %s | %zu | %zu | %d | %d | %d | %.0f | %.0f |\n", name.c_str(), ends.c_str(),
                seconds.size(), seconds.size() - static_cast<std::size_t>(hung), hung, next_passed, stayed,
                seconds[seconds.size() / 2] * 1e3, seconds.back() * 1e3);
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  std::string backend = "auto", transport = "auto";
  std::vector<int> world_sizes = {2, 4};
  std::vector<std::string> kinds = cppool::test::FaultKinds();
  CLI::App app("Injects faults and prints how each ended");
  app.add_option("--backend", backend, "auto, cuda or host")->capture_default_str();
  app.add_option("--transport", transport, "auto, nccl or peer")->capture_default_str();
  app.add_option("--world-size", world_sizes, "Ranks")->delimiter(',')->capture_default_str();
  app.add_option("--kind", kinds, "Kinds of fault")->delimiter(',')->check(CLI::IsMember(kinds));
  CLI11_PARSE(app, argc, argv);

  try {
    cppool::Pools pools(cppool::test::FaultPoolOptions(backend, transport));
    for (const int world_size : world_sizes) {
      const cppool::Json hello = pools.At(world_size).Hello();
      std::printf("%s world size %d: backend %s, transport %s", world_size == world_sizes.front() ? "" : ";",
                  world_size, hello.at("backend").get<std::string>().c_str(),
                  hello.at("transport").get<std::string>().c_str());
    }
    std::printf(
        "\n\n| fault | ended in | injected | answered | hung | next passed | warm | median ms | worst ms |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    Row all;
    for (const std::string& kind : kinds) {
      Row row;
      for (const auto& cell : cppool::test::FaultGrid({kind}, world_sizes)) {
        const auto outcome = cppool::test::Inject(pools.At(cell.world_size), cell);
        row.Add(cell, outcome);
        all.Add(cell, outcome);
      }
      row.Print(kind);
    }
    all.Print("all");
    for (const std::string& wrong : all.wrong) std::fprintf(stderr, "wrong: %s\n", wrong.c_str());
    return all.wrong.empty() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fault_table: %s\n", error.what());
    return 2;
  }
}
