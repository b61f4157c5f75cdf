// The command `cppool`: one file per subcommand, each with its options, its work and its output; `run` has
// three.
#pragma once

#include <chrono>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include <cppool/pool.h>

namespace cppool::command {

struct Streams {
  std::ostream& out;               // results
  std::ostream& err;               // progress and errors
  bool terminal;                   // whether `err` is one: progress is shown on terminals only
  std::string program = "cppool";  // as it was called, for the commands that repeat a case
};

inline constexpr int kSuccess = 0;
inline constexpr int kFailure = 1;  // a case failed, or nothing ran
inline constexpr int kUsage = 2;
inline constexpr int kSlower = 3;       // bench: slower than the baseline
inline constexpr int kNotCompared = 4;  // bench: the baseline has no row, or no two rounds of one

// Everything behind main(): parses the words after the program's name, runs, returns the exit code.
int Main(const std::vector<std::string>& words, const Streams& streams);

// Each adds a subcommand, which sets *exit_code when it runs and may throw UsageError.
void AddRun(CLI::App& app, const Streams& streams, int* exit_code);
void AddBench(CLI::App& app, const Streams& streams, int* exit_code);
void AddList(CLI::App& app, const Streams& streams, int* exit_code);
void AddDoctor(CLI::App& app, const Streams& streams, int* exit_code);
void AddServe(CLI::App& app, const Streams& streams, int* exit_code);  // and `ps` and `stop`
void AddPipe(CLI::App& app, const Streams& streams, int* exit_code);
void AddTorchrun(CLI::App& app, const Streams& streams, int* exit_code);  // and `shims`
void AddDiff(CLI::App& app, const Streams& streams, int* exit_code);
void AddReport(CLI::App& app, const Streams& streams, int* exit_code);

// These options of every subcommand choose its daemon.
struct DaemonArguments {
  PoolOptions pool;
  // With further cases, or their sources. Requests name them: a warm daemon then loads what was rebuilt.
  std::vector<std::string> libraries;
};
void AddDaemonOptions(CLI::App& app, DaemonArguments* arguments);
// --case. Empty: the only case of the libraries of --load, else attention.
CLI::Option* AddCase(CLI::App& app, std::string* name, const std::string& help);

// Adds an option that takes one value each time that it is given.
CLI::Option* AddRepeatable(CLI::App& app, const std::string& name, std::vector<std::string>* values,
                           const std::string& help);

// --leaks warn|error. `errors`: whether a case that leaves something behind has failed.
void AddLeaks(CLI::App& app, bool* errors);

// Limits are given in seconds on the command line, from 0.001 to a day.
CLI::Option* AddSeconds(CLI::App& app, const std::string& name, double* seconds, const std::string& help);
void AddDeadline(CLI::App& app, double* seconds, const std::string& help);
std::chrono::milliseconds ToMilliseconds(double seconds);

// Validates text that is sent as JSON, for CLI11: returns "" or what is wrong.
std::string IsUtf8(const std::string& text);

// Likewise refuses what no server can listen at: the values of PoolOptions::attach, or "".
std::string IsServer(const std::string& attach);

void AddLaunch(CLI::App& app, std::optional<std::string>* launch);

// Likewise refuses a path that is empty.
std::string IsPath(const std::string& text);

// "cannot write out.xml: No such file or directory", from errno right after the failed call.
std::string CannotWrite(const std::string& path);

// Throws UsageError with the reason when no file can be made, or replaced, there. `option` names it.
void CheckCanWrite(const std::string& option, const std::string& file);

// "backend cuda, transport nccl, 2 x NVIDIA H200" from the answer to `hello`; "6 ranks on 4 x NVIDIA H200"
// where ranks share devices.
std::string DescribeWorld(const Json& hello);

// When and where a command ran: 2026-11-24T13:52:06, in UTC, and the machine's name.
std::string UtcText(std::chrono::system_clock::time_point time);
std::string HostName();
// Members of a summary that say so: `begin`, `host` and `version`.
Json DescribeOrigin(std::chrono::system_clock::time_point begin);

// --html FILE.
CLI::Option* AddHtml(CLI::App& app, std::string* file);

// Returns whether `features` of the answer to `hello` has this name.
bool HasFeature(const Json& hello, std::string_view feature);
// Throws UsageError when it has not.
void Require(const Json& hello, const std::string& feature);

std::string FirstLine(const std::string& text);
void PrintJson(std::ostream& out, const Json& value);  // one line, at once
std::string Fixed(double value, int digits);           // "-" when it is not finite

}  // namespace cppool::command
