#include "daemon/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/version.h>

#include "base/words.h"
#include "kernels/build_id.h"
#include "protocol/framing.h"
#include "protocol/parameters.h"
#include "protocol/start.h"

namespace cppool::daemon {

std::string Version() {
  const std::string commit = kernels::Commit();
  return CPPOOL_VERSION + (commit.empty() ? "" : "+" + commit);
}

std::string DescribeInstallation() {
  std::string module;
  try {
    module = kernels::CudaModuleFile();
  } catch (const std::exception& error) {
    module = error.what();
  }
  return "cppoold " + Version() + "\nCUDA module: " + module;
}

namespace {

// In the orders of BackendChoice and kernels::Transport.
constexpr std::array kBackends = {"auto", "cuda", "host"};
constexpr std::array kTransports = {"auto", "nccl", "peer"};

// The value of a word that CLI11 has checked.
template <typename Enum>
Enum FromWord(const std::array<const char*, 3>& words, const std::string& word) {
  return static_cast<Enum>(std::ranges::find(words, word) - words.begin());
}

// Makes "a; b" of "a\nb\n".
std::string OneLine(const std::string& text) {
  std::vector<std::string> lines = base::Split(text, '\n');
  std::erase(lines, "");
  return base::Join(lines, "; ");
}

// What ranks of agents do not have.
void CheckLaunch(const CLI::App& app, const Options& options, const std::string& transport) {
  const auto given = app.get_options([](const CLI::Option* option) { return option->count() > 0; });
  if (!options.agent.empty() && given.size() > 1)
    throw CLI::ValidationError("--agent", "has no other options beside it: the head says what they are");
  if (!options.launch) return;
  if (transport == "peer")
    throw CLI::ValidationError("--transport",
                               "peer is for ranks of one process: with --launch it is auto or nccl");
}

// What ranks that are processes do not have.
void CheckPython(const CLI::App& app, const Options& options, const std::string& backend,
                 const std::string& transport) {
  if (!options.python) {
    if (app.count("--preload") > 0)
      throw CLI::ValidationError("--preload", "is for ranks that are processes: it needs --python");
    return;
  }
  for (const char* option : {"--case", "--kernels", "--allow-faults"})
    if (app.count(option) > 0)
      throw CLI::ValidationError(option, "is for ranks that are threads, and --python makes them processes");
  if (transport == "peer")
    throw CLI::ValidationError("--transport",
                               "peer is for ranks that are threads: with --python it is auto or nccl");
  if (transport == "nccl" && backend == "host")
    throw CLI::ValidationError("--transport", "nccl needs the backend cuda, and this is host");
}

}  // namespace

const char* NameOf(BackendChoice backend) { return kBackends.at(static_cast<std::size_t>(backend)); }
const char* NameOf(kernels::Transport transport) {
  return kTransports.at(static_cast<std::size_t>(transport));
}

ParsedOptions ParseOptions(int argc, const char* const* argv) {
  Options options;
  options.sentinel = protocol::kDefaultSentinel;
  options.log_level = "info";

  CLI::App app{
      "Keeps the devices of this machine warm for one world size: reads JSON requests from stdin, one per "
      "line, and answers on stdout.\n"
      "It ends when stdin ends, or when its parent process dies.",
      "cppoold"};
  std::string backend = "auto", transport = "auto";
  app.add_option("--world-size", options.world_size, "Number of ranks; required")
      ->check(CLI::Range(1, protocol::kMaxWorldSize));
  app.add_option("--backend", backend, "auto is cuda when CUDA sees a device, and host when it sees none")
      ->check(CLI::IsMember(kBackends))
      ->capture_default_str();
  app.add_option(
         "--transport", transport,
         "How ranks on cuda exchange data: nccl (a device for each rank), peer (copies; ranks may share a "
         "device), or auto: nccl where each rank has a device, else peer")
      ->check(CLI::IsMember(kTransports))
      ->capture_default_str();
  app.add_option("--sentinel", options.sentinel, "What every answer begins with; '' for bare JSON lines")
      ->check([](const std::string& text) {
        return text.find('\n') == std::string::npos ? "" : "must have no newline: an answer is one line";
      })
      ->capture_default_str();
  app.add_option("--case", options.case_files, "Shared libraries with cases of your own (see cppool/case.h)");
  app.add_option_function<std::string>(
      "--kernels",
      [&options](const std::string& words) {
        try {
          options.kernels = protocol::ParseKernels(words);
        } catch (const protocol::InvalidRequest& error) {
          throw CLI::ValidationError("--kernels", error.what());
        }
      },
      "Whose attention kernels a request without \"kernels\" runs on: cppool, cudnn, a library "
      "(cppool/attention.h), or FILE.so,NAME");
  app.add_option_function<std::string>(
         "--python", [&options](const std::string& path) { options.python = path; },
         "Ranks are processes of this Python, and run requests with \"python\". Without PATH: "
         "$CPPOOL_PYTHON, the one of "
         "$VIRTUAL_ENV, or python3")
      ->expected(0, 1)
      ->type_name("[PATH]");
  app.add_option("--preload", options.preload,
                 "Modules that Python has imported before it forks the ranks: a,b")
      ->delimiter(',');
  app.add_option_function<std::string>(
      "--launch", [&options](const std::string& words) { options.launch = words; },
      "Ranks are those of agents that this launcher starts, on several machines: \"srun -N 2 "
      "--ntasks-per-node=1\", \"mpirun -N 1 --hostfile hosts\"");
  app.add_option("--agent", options.agent, "What a launcher starts: HOST:PORT of the cppoold with --launch");
  app.add_option("--log-level", options.log_level, "What goes to stderr")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "critical", "off"}))
      ->capture_default_str();
  app.add_flag("--allow-faults", options.allow_faults,
               "Takes requests with \"fault\", which make a rank crash, stall, corrupt data, ...: for tests");
  app.add_option("--idle-exit", options.idle_exit_s,
                 "Exits after so many seconds without a request, 0.001 to 1e6, and so frees the devices")
      ->check([](const std::string& text) {  // CLI::Range takes NaN
        const double seconds = std::strtod(text.c_str(), nullptr);
        return seconds >= 0.001 && seconds <= 1e6 ? "" : "from 0.001 to 1e6 seconds, not " + text;
      });
  app.set_version_flag("--version", DescribeInstallation);

  // CLI11 takes "--sentinel=" and "--launch=" for options without their values.
  std::vector<std::string> words;
  for (int i = argc - 1; i > 0; --i) {  // it takes them from the back
    const std::string_view word = argv[i];
    if (word == "--sentinel=" || word == "--launch=") {
      words.insert(words.end(), {"", std::string(word.substr(0, word.size() - 1))});
    } else {
      words.emplace_back(word);
    }
  }

  ParsedOptions parsed;
  try {
    app.parse(std::move(words));
    // required() is not used: an unknown option, which may be a misspelt --world-size, is named first.
    CheckLaunch(app, options, transport);
    if (app.count("--world-size") == 0 && options.agent.empty()) throw CLI::RequiredError("--world-size");
    CheckPython(app, options, backend, transport);
    options.backend = FromWord<BackendChoice>(kBackends, backend);
    options.transport = FromWord<kernels::Transport>(kTransports, transport);
    parsed.options = std::move(options);
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, err;
    parsed.exit_code = app.exit(error, out, err) == 0 ? 0 : 2;
    parsed.text = parsed.exit_code == 0 ? out.str() : err.str();
    if (parsed.exit_code != 0) parsed.text = OneLine(parsed.text);
  }
  return parsed;
}

}  // namespace cppool::daemon
