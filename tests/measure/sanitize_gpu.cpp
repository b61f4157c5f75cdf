// Runs small cells of every feature with every schedule on GPUs, with daemons under compute-sanitizer. A cell
// fails if a tool reports something while it runs. scripts/sanitize_gpu builds and runs this program.
//
//     sanitize_gpu                          # memcheck, racecheck, initcheck; one GPU, and two if there are
//     sanitize_gpu --tool racecheck --transport peer --filter cp_comm_type=a2a
//
// `peer`: world sizes 2 and 4 on one GPU. `nccl`: world size 2 on two GPUs. The last line is `N passed, N
// failed`; the exit code is 0 when at least one cell ran and none failed.
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <cppool/compile.h>
#include <cppool/pool.h>

#include "client/src/shell.h"
#include "client/suite/cell.h"
#include "client/suite/suite.h"
#include "client/suite/value_text.h"

namespace {

using cppool::Json;
using cppool::Pool;
using cppool::PoolError;
using cppool::Result;
using cppool::client::ShellQuote;
using cppool::suite::Cell;

// fp8: each head dim with each kind of products and of casts; with one scale for each tensor the step that
// finds dS's scale comes first. Three blocks of keys of most kernels.
constexpr const char* kFp8Cells = R"({
 "rows": {"d64": {"head_dim_qk": 64, "head_dim_v": 64}, "d128": {"head_dim_qk": 128, "head_dim_v": 128},
          "d128_64": {"head_dim_qk": 128, "head_dim_v": 64}, "d192_128": {"head_dim_qk": 192, "head_dim_v": 128},
          "d256": {"head_dim_qk": 256, "head_dim_v": 256}},
 "axes": {
  "small": [{"set": {"dtype": "fp8", "fp8_dpa": true, "batch_size": 1, "num_heads": 4, "num_gqa_groups": 2,
                     "max_seqlen_q": 384, "max_seqlen_kv": 384, "attn_mask_type": "causal"}}],
  "recipe": [
   {"set": {"scaling_mode": "delayed", "fp8_mha": true, "fp8_products": "native", "cp_comm_type": "a2a"}},
   {"set": {"scaling_mode": "current", "fp8_bwd": false, "fp8_products": "native", "cp_comm_type": "p2p",
            "attn_mask_type": "no_mask", "return_max_logit": true}},
   {"set": {"scaling_mode": "current", "fp8_products": "bf16", "cp_comm_type": "all_gather"}},
   {"set": {"scaling_mode": "mxfp8", "cp_comm_type": "p2p"}}],
  "recipe with a bias": [{"set": {"scaling_mode": "current"}}, {"set": {"scaling_mode": "mxfp8"}}],
  "bias": [{"set": {"cp_comm_type": "a2a", "attn_bias_type": "post_scale_bias", "bias_shape": "1hss"}}],
  "packed": [{"set": {"scaling_mode": "delayed", "fp8_products": "native", "cp_comm_type": "p2p",
                      "qkv_format": "thd", "attn_mask_type": "padding_causal", "pad_between_seqs": true}}],
  "groups": [{"set": {"scaling_mode": "delayed", "fp8_products": "native", "cp_comm_type": "a2a+p2p"}}]
 },
 "cells": [
  {"rows": ["d*"], "world_size": 2, "over": ["small", "recipe"]},
  {"rows": ["d192_128"], "world_size": 2, "over": ["small", "recipe with a bias", "bias"]},
  {"rows": ["d128"], "world_size": 2, "over": ["small", "packed"]},
  {"rows": ["d128"], "world_size": 4, "over": ["small", "groups"]}
 ]
})";

constexpr std::chrono::minutes kLong{
    10};  // an instrumented kernel takes a hundred times as long, and the start of a daemon a minute

struct Options {
  std::vector<std::string> tools = {"memcheck", "racecheck", "initcheck"};
  std::vector<std::string> transports = {"peer", "nccl"};
  std::vector<std::string> filters;
  std::string daemon, sanitizer = "compute-sanitizer", folder;
  std::int64_t max_seqlen = 128;  // two tiles of most kernels
};

// Options of each tool. The tools check only the project's kernels, because NCCL's poll memory that other
// devices write.
const std::map<std::string, std::string> kToolOptions = {
    {"memcheck", "--report-api-errors no"},  // the daemon checks every call's error itself
    // racecheck and initcheck need blocking launches: they treat memory freed on a stream as new at once,
    // while the last kernel may still use it, and they miss some of many concurrent launches.
    {"racecheck", "--force-blocking-launches"},
    // Copies read whole buffers, including padding that no kernel wrote.
    {"initcheck", "--force-blocking-launches --check-api-memory-access no"},
};

// Writes a script that runs cppoold under the tool, with one log file per process, and returns its path.
std::string WriteWrapper(const Options& options, const std::string& tool, const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::string path = folder + "/cppoold";
  std::ofstream script(path);
  script << "#!/bin/sh\n"
         << "unset CPPOOL_PARENT_PID  # the daemon's parent is the tool\n"
         << "exec " << ShellQuote(options.sanitizer) << " --tool " << tool << " " << kToolOptions.at(tool)
         << " --kernel-name kns=cppool --log-file " << ShellQuote(folder) << "/$$.log "
         << ShellQuote(options.daemon) << " \"$@\"\n";
  script.close();
  if (!script || chmod(path.c_str(), 0755) != 0) throw std::runtime_error("cannot write " + path);
  return path;
}

// The new lines in the tool's log files of all processes, without banners and empty summaries. `seen` holds
// the number of lines read so far of each file.
std::vector<std::string> NewFindings(const std::string& folder, std::map<std::string, std::size_t>* seen) {
  std::vector<std::string> findings;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".log") continue;
    std::ifstream log(entry.path());
    std::size_t& read = (*seen)[entry.path()];
    std::size_t number = 0;
    for (std::string line; std::getline(log, line);) {
      // A line without a newline is not complete yet.
      if (log.eof() || ++number <= read) continue;
      read = number;
      const bool bookkeeping = line.find("COMPUTE-SANITIZER") != std::string::npos ||
                               line.find("SUMMARY: 0 ") != std::string::npos || line == "=========" ||
                               line.empty();
      if (!bookkeeping) findings.push_back(line);
    }
  }
  return findings;
}

// Reduces query and KV heads by a common factor, because every head runs the same code and the fp64 oracle is
// slow under a tool. At least two KV heads remain where there were several, and the number of query heads
// stays divisible by the world size.
void ThinOut(Json* params, int world_size) {
  const auto heads = params->at("num_heads").get<std::int64_t>();
  const auto groups = params->at("num_gqa_groups").get<std::int64_t>();
  for (std::int64_t factor = groups / 2; factor > 1; --factor) {
    if (heads % factor != 0 || groups % factor != 0 || heads / factor % world_size != 0) continue;
    (*params)["num_heads"] = heads / factor;
    (*params)["num_gqa_groups"] = groups / factor;
    return;
  }
}

// Every feature with every schedule (cppool's own cells of the matrix), the kernels without features (the
// smoke suite), and those of fp8.
std::vector<Cell> CellsFor(const Options& options, int world_size) {
  std::vector<cppool::suite::Filter> filters;
  for (const std::string& text : options.filters) {
    auto [key, value] = cppool::suite::SplitAssignment(text, "--filter");
    filters.push_back({key, value});
  }
  std::vector<Cell> all = cppool::suite::LoadSuite("smoke"), chosen;
  for (Cell& cell : cppool::suite::LoadSuite("matrix"))
    if (cell.suite == "own") all.push_back(std::move(cell));
  for (Cell& cell : cppool::suite::CellsOfFile("fp8", Json::parse(kFp8Cells))) all.push_back(std::move(cell));
  for (Cell& cell : cppool::suite::Select(all, filters)) {
    if (cell.world_size != world_size) continue;
    cppool::suite::Shrink(&cell.params, options.max_seqlen * (cell.suite == "fp8" ? 3 : 1), world_size);
    ThinOut(&cell.params, world_size);
    chosen.push_back(std::move(cell));
  }
  return chosen;
}

class Sanitize {
 public:
  explicit Sanitize(const Options& options) : options_(options) {}

  int Run() {
    for (const std::string& tool : options_.tools) {
      for (const std::string& transport : options_.transports) {
        RunWorld(tool, transport, 2);
        if (transport == "peer") RunWorld(tool, transport, 4);
      }
    }
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return passed_ > 0 && failed_ == 0 ? 0 : 1;
  }

 private:
  // Runs all cells of one world size in one daemon, then stops the daemon.
  void RunWorld(const std::string& tool, const std::string& transport, int world_size) {
    const std::vector<Cell> cells = CellsFor(options_, world_size);
    if (cells.empty()) return;
    const std::string name = tool + " " + transport + " W=" + std::to_string(world_size);
    const std::string folder =
        options_.folder + "/" + tool + "_" + transport + "_" + std::to_string(world_size);
    cppool::PoolOptions pool_options;
    pool_options.daemon = WriteWrapper(options_, tool, folder);
    pool_options.world_size = world_size;
    pool_options.backend = "cuda";
    pool_options.transport = transport;
    if (transport == "peer") pool_options.devices = {FirstDevice()};
    pool_options.start_limit = kLong;
    pool_options.grace = kLong;  // the tool writes its report when the daemon exits
    pool_options.retries = 0;
    cppool::RunOptions run;
    run.deadline = kLong;

    const auto start = std::chrono::steady_clock::now();
    const int passed_before = passed_, failed_before = failed_;
    std::map<std::string, std::size_t> seen;  // lines, by file
    {
      Pool pool(pool_options);
      for (const Cell& cell : cells) {
        if (isatty(2) != 0) std::fprintf(stderr, "\r\033[K%s: %s", name.c_str(), cell.name.c_str());
        std::string wrong;
        // racecheck spends most of its time in the oracle, so the checks run only for the smoke suite.
        run.checks = tool != "racecheck" || cell.suite == "smoke";
        try {
          const Result result = pool.Run(cell.params, run);
          if (result.status == cppool::Status::kSkipped &&
              cell.params.value("fp8_products", "") == "native" &&
              cppool::CapabilitiesOf(pool.Hello()) != std::vector<std::string>{"9.0"}) {
            std::printf("%s: not run, no GPU of Hopper: %s: %s\n", name.c_str(), cell.name.c_str(),
                        result.error.c_str());
            continue;
          }
          if (!result.ok()) wrong = std::string(ToString(result.status)) + ": " + result.error;
        } catch (const PoolError& error) {
          const auto& why = error.start_failure();
          if (why && why->kind == "unsupported" && why->devices && *why->devices < world_size) {
            std::printf("%s: not run, it needs %d GPUs\n", name.c_str(), world_size);
            return;
          }
          wrong = error.what();
          if (error.kind() == PoolError::Kind::kStart) {
            Count(name, "the daemon under " + options_.sanitizer, wrong, {});
            return;
          }
        }
        Count(name, cell.name, wrong, NewFindings(folder, &seen));
      }
    }
    const std::vector<std::string> findings = NewFindings(folder, &seen);
    if (!findings.empty()) Count(name, "at the end", "", findings);
    if (Summaries(folder) == 0) Count(name, "at the end", "the tool wrote no summary: see " + folder, {});
    std::printf("%s: %d passed, %d failed in %.0f s\n", name.c_str(), passed_ - passed_before,
                failed_ - failed_before,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    std::fflush(stdout);
  }

  static std::string FirstDevice() {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == nullptr) return "0";
    const std::string list(visible);
    return list.substr(0, list.find(','));
  }

  // Counts the daemons whose log has the tool's summary. Without a summary the tool did not check the daemon.
  static int Summaries(const std::string& folder) {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      std::ifstream log(entry.path());
      for (std::string line; std::getline(log, line);) count += line.find("SUMMARY: ") != std::string::npos;
    }
    return count;
  }

  void Count(const std::string& world, const std::string& cell, const std::string& wrong,
             const std::vector<std::string>& findings) {
    if (wrong.empty() && findings.empty()) {
      ++passed_;
      return;
    }
    ++failed_;
    if (isatty(2) != 0) std::fprintf(stderr, "\r\033[K");
    std::printf("FAILED %s: %s\n", world.c_str(), cell.c_str());
    if (!wrong.empty()) std::printf("  %s\n", wrong.c_str());
    const std::size_t shown = std::min<std::size_t>(findings.size(), 40);
    for (std::size_t i = 0; i < shown; ++i) std::printf("  %s\n", findings[i].c_str());
    if (shown < findings.size())
      std::printf("  and %zu more lines in %s\n", findings.size() - shown, options_.folder.c_str());
    std::fflush(stdout);
  }

  const Options& options_;
  int passed_ = 0, failed_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  std::vector<std::string> tools = options.tools, transports = options.transports;
  CLI::App app("Runs small cells on GPUs under compute-sanitizer");
  app.add_option("--tool", options.tools, "Tools of compute-sanitizer")
      ->delimiter(',')
      ->check(CLI::IsMember(tools))
      ->capture_default_str();
  app.add_option("--transport", options.transports, "peer (on one GPU), nccl (on two GPUs)")
      ->delimiter(',')
      ->check(CLI::IsMember(transports))
      ->capture_default_str();
  app.add_option("--filter", options.filters, "Only cells with key=value, as in `cppool run`")
      ->allow_extra_args(false);
  app.add_option("--max-seqlen", options.max_seqlen,
                 "Shrinks lengths to at most this (fp8: three times this)")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--sanitizer", options.sanitizer, "The program compute-sanitizer")->capture_default_str();
  app.add_option("--daemon", options.daemon, "Path of cppoold");
  app.add_option("--logs", options.folder, "Empty folder for the tools' logs (default: a new one in /tmp)");
  CLI11_PARSE(app, argc, argv);

  try {
    if (options.daemon.empty()) options.daemon = cppool::FindDaemon({});
    if (options.daemon.empty()) throw std::runtime_error("no cppoold was found: see --daemon");
    if (options.folder.empty()) {
      char folder[] = "/tmp/cppool_sanitize_XXXXXX";
      if (mkdtemp(folder) == nullptr) throw std::runtime_error("cannot make a folder in /tmp");
      options.folder = folder;
    }
    options.daemon = std::filesystem::absolute(options.daemon);
    options.folder = std::filesystem::absolute(options.folder);
    if (std::filesystem::exists(options.folder) && !std::filesystem::is_empty(options.folder))
      throw std::runtime_error("--logs: " + options.folder +
                               " is not empty: findings of an earlier run would be counted");
    std::printf("logs in %s\n", options.folder.c_str());
    return Sanitize(options).Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sanitize_gpu: %s\n", error.what());
    return 2;
  }
}
