// The command `cppool`: one file per subcommand, each with its options, its work and its output; `run` has three.
#pragma once

#include <chrono>
#include <ostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <cppool/pool.h>

namespace cppool::command {

struct Streams {
  std::ostream& out;               // results
  std::ostream& err;               // progress and complaints
  bool terminal;                   // whether `err` is one: no progress elsewhere
  std::string program = "cppool";  // as it was called: how a repeating command begins
};

// The exit codes.
inline constexpr int kSuccess = 0;
inline constexpr int kFailure = 1;  // a case failed, or nothing ran
inline constexpr int kUsage = 2;

// Everything behind main(): parses the words after the program's name, runs, returns the exit code.
int Main(const std::vector<std::string>& words, const Streams& streams);

// Each adds its subcommand, which sets *exit_code when it is chosen. It may throw UsageError.
void AddRun(CLI::App& app, const Streams& streams, int* exit_code);
void AddBench(CLI::App& app, const Streams& streams, int* exit_code);
void AddDoctor(CLI::App& app, const Streams& streams, int* exit_code);

// The options with which every subcommand chooses its daemon.
struct DaemonArguments {
  std::string daemon;
  std::string backend = "auto";
  std::string transport = "auto";
  std::vector<std::string> devices;
  std::vector<std::string> libraries;  // of further cases
};
void AddDaemonOptions(CLI::App& app, DaemonArguments* arguments);
PoolOptions ToPoolOptions(const DaemonArguments& arguments);
// The same, as words of a command line, to repeat a case.
std::vector<std::string> ToWords(const DaemonArguments& arguments);

// An option that takes one value each time that it is given.
CLI::Option* AddRepeatable(CLI::App& app, const std::string& name, std::vector<std::string>* values,
                           const std::string& help);

// Limits are given in seconds on the command line.
void AddDeadline(CLI::App& app, double* seconds, const std::string& help);
std::vector<std::string> DeadlineWords(double seconds);  // the same, to repeat a case
std::chrono::milliseconds ToMilliseconds(double seconds);

// A check of CLI11 for what is sent as JSON: "", or what is wrong.
std::string IsUtf8(const std::string& text);

// "backend cuda, transport nccl, 2 x NVIDIA H200", from the answer to `hello`; where ranks share devices, "6 ranks on
// 4 x NVIDIA H200".
std::string DescribeWorld(const Json& hello);

}  // namespace cppool::command
