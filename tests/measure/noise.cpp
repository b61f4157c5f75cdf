// Measures the time that output on stdout or stderr adds to a case, compared with reading the same bytes from
// a pipe into which the same function writes.
//
//     noise --bytes 100000000
//
// `cppoold` runs a case whose library writes the output; cppoold redirects stdout to stderr. `unruly` is this
// program as a daemon that writes the output to the pipe of its answers.
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <cppool/pool.h>

#include "tests/measure/chatter.h"
#include "tests/measure/samples.h"

namespace {

using cppool::Json;
using cppool::measure::Median;
using cppool::measure::Milliseconds;

// A daemon that writes the output of the case `noisy` itself, and answers without a protocol library.
int BeUnruly() {
  for (std::string line; std::getline(std::cin, line);) {
    const Json request = Json::parse(line);
    Json answer = {{"ok", true}, {"id", request["id"]}, {"protocol", 1}, {"world_size", 1}};
    if (request["op"] == "run") {
      const Json& params = request["params"];
      const bool all = WriteChatter(params["stream"] == "stdout" ? 1 : 2, params["bytes"].get<long long>(),
                                    params["blocks"]);
      answer.update({{"status", all ? "passed" : "failed"}, {"ok", all}, {"wall_ms", 0}});
    }
    std::cout << "[CP_POOL_RESP] " << answer.dump() << std::endl;
  }
  return 0;
}

// A child writes the output; this process reads and discards it.
void ReadChatter(long long bytes, bool blocks) {
  int fds[2];
  if (pipe(fds) != 0) throw std::runtime_error("no pipe");
  const pid_t child = fork();
  if (child == 0) {
    close(fds[0]);
    _exit(WriteChatter(fds[1], bytes, blocks) ? 0 : 1);
  }
  close(fds[1]);
  char buffer[65536];
  for (ssize_t count = 1; count > 0;) {
    count = read(fds[0], buffer, sizeof buffer);
    bytes -= std::max<ssize_t>(count, 0);
  }
  close(fds[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0 || bytes != 0) throw std::runtime_error("the pipe lost something");
}

void RunChecked(cppool::Pool& pool, const Json& params) {
  cppool::RunOptions run;
  run.case_name = "noisy";
  const cppool::Result result = pool.Run(params, run);
  if (!result.ok() || result.attempts != 1)
    throw std::runtime_error("the answer is wrong: " + result.json.dump());
}

}  // namespace

int main(int argc, char** argv) {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  cppool::PoolOptions options;
  options.world_size = 1;
  long long bytes = 100'000'000;
  int repeat = 5;
  bool unruly = false;
  std::string case_file = self.parent_path() / CPPOOL_NOISY_CASE;
  CLI::App app("Measures the time that output during a case adds");
  app.allow_extras();  // the arguments that a Pool passes to its daemon
  app.add_option("--bytes", bytes, "Bytes on one stream during one case")->capture_default_str();
  app.add_option("--repeat", repeat, "Measurements for each median")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--backend", options.backend, "auto, cuda or host")->capture_default_str();
  app.add_option("--daemon", options.daemon, "Path of cppoold");
  app.add_option("--case", case_file, "Path of the noisy case")->capture_default_str();
  app.add_flag("--be-unruly", unruly, "Run as the unruly daemon");
  CLI11_PARSE(app, argc, argv);
  if (unruly) return BeUnruly();

  try {
    std::printf("%lld bytes in lines of 64, medians of %d\n\n", bytes, repeat);
    std::printf(
        "| daemon | stream | a write is | quiet case ms | noisy case ms | added ms | merely reading ms | "
        "ratio |\n");
    std::printf("| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (const char* daemon : {"cppoold", "unruly"}) {
      cppool::PoolOptions its = options;
      its.case_files = {case_file};
      if (daemon == std::string("unruly")) {
        its.daemon = self;
        its.case_files.clear();
        its.arguments = {"--be-unruly"};
      }
      cppool::Pool pool(its);
      for (const char* stream : {"stdout", "stderr"}) {
        for (const bool blocks : {false, true}) {
          Json params = {{"stream", stream}, {"blocks", blocks}, {"bytes", 0}};
          RunChecked(pool, params);
          std::vector<double> quiet, noisy, reading;
          for (int i = 0; i < repeat; ++i) {
            params["bytes"] = 0;
            quiet.push_back(Milliseconds([&] { RunChecked(pool, params); }));
            params["bytes"] = bytes;
            noisy.push_back(Milliseconds([&] { RunChecked(pool, params); }));
            reading.push_back(Milliseconds([&] { ReadChatter(bytes, blocks); }));
          }
          const double added = Median(noisy) - Median(quiet);
          std::printf("| %s | %s | %s | %.2f | %.1f | %.1f | %.1f | %.2f |\n", daemon, stream,
                      blocks ? "64,000 bytes" : "a line", Median(quiet), Median(noisy), added,
                      Median(reading), added / Median(reading));
          std::fflush(stdout);
        }
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "noise: %s\n", error.what());
    return 1;
  }
}
