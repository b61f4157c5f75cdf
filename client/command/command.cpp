#include "client/command/command.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <set>

#include <cppool/version.h>

#include "base/new_file.h"
#include "base/utf8.h"
#include "base/words.h"
#include "client/src/attach.h"
#include "client/src/daemon.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::command {

namespace {

// CLI11's own message does not say which commands there are.
void CheckSubcommand(const CLI::App& app, const std::vector<std::string>& words) {
  if (!words.empty() && words[0].starts_with("-")) return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  if (words.empty())
    throw suite::UsageError("a command is missing (known: " + base::Join(names) + "): see `cppool --help`");
  if (std::ranges::find(names, words[0]) != names.end()) return;
  throw suite::UsageError(protocol::Unknown("command", words[0], names));
}

// Likewise which options there are.
std::string TextOf(const CLI::ExtrasError& error, const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  const CLI::App& command = chosen.empty() ? app : *chosen.front();
  const auto words = command.remaining();
  const auto word = std::ranges::find_if(words, [](const auto& text) { return text.starts_with("-"); });
  if (word == words.end()) return error.what();
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  return protocol::Unknown("option", word->substr(0, word->find('=')), known);
}

}  // namespace

int Main(const std::vector<std::string>& words, const Streams& streams) {
  CLI::App app{"Runs multi-GPU cases in a warm pool: see `cppool COMMAND --help`", "cppool"};
  app.set_version_flag("--version", std::string("cppool ") + CPPOOL_VERSION);
  app.require_subcommand(1);
  int exit_code = kUsage;
  AddRun(app, streams, &exit_code);
  AddBench(app, streams, &exit_code);
  AddList(app, streams, &exit_code);
  AddDoctor(app, streams, &exit_code);
  AddServe(app, streams, &exit_code);
  AddPipe(app, streams, &exit_code);
  AddTorchrun(app, streams, &exit_code);
  AddDiff(app, streams, &exit_code);
  AddReport(app, streams, &exit_code);
  try {
    CheckSubcommand(app, words);
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 expects the last word first
    return exit_code;
  } catch (const CLI::ExtrasError& error) {
    streams.err << "cppool: " << TextOf(error, app) << "\n";
    return kUsage;
  } catch (const CLI::ParseError& error) {  // --help and --version among them
    if (error.get_exit_code() == 0) return app.exit(error, streams.out, streams.err);
    streams.err << "cppool: " << error.what() << "\n";
    return kUsage;
  } catch (const suite::UsageError& error) {
    streams.err << "cppool: " << error.what() << "\n";
    return kUsage;
  }
}

void AddDaemonOptions(CLI::App& app, DaemonArguments* arguments) {
  app.add_option("--backend", arguments->pool.backend, "auto takes cuda where CUDA sees a device, else host")
      ->check(CLI::IsMember({"auto", "cuda", "host"}))
      ->capture_default_str();
  app.add_option(
         "--transport", arguments->pool.transport,
         "How ranks on cuda exchange data: nccl (a GPU for each rank), peer (ranks may share GPUs), or auto: "
         "nccl where each rank has a GPU, else peer")
      ->check(CLI::IsMember({"auto", "nccl", "peer"}))
      ->capture_default_str();
  app.add_option("--devices", arguments->pool.devices,
                 "GPUs to use, N,M,...: indices or UUIDs, as in CUDA_VISIBLE_DEVICES; auto is then cuda")
      ->delimiter(',');
  AddLaunch(app, &arguments->pool.launch);
  app.add_option("--daemon", arguments->pool.daemon,
                 "The cppoold to spawn (default: $CPPOOL_DAEMON, else the one beside cppool)");
  AddRepeatable(app, "--load", &arguments->libraries,
                "A shared library with cases of your own or, but for doctor, its source (.cu, .cpp, .cc, "
                ".cxx, or .c), which is compiled")
      ->type_name("FILE");
  app.add_option_function<std::string>(
         "--attach",
         [arguments](const std::string& socket) {
           arguments->pool.attach = socket.empty() ? "default" : socket;
         },
         "Use the daemons of a server, which stay: see `cppool serve`")
      ->expected(0, 1)
      ->envname("CPPOOL_ATTACH")
      ->check(IsServer)
      ->type_name("[SOCKET]");
}

void AddLaunch(CLI::App& app, std::optional<std::string>* launch) {
  app.add_option_function<std::string>(
         "--launch", [launch](const std::string& words) { *launch = words; },
         "Ranks are on several machines, in agents that this launcher starts: \"srun -N 2 "
         "--ntasks-per-node=1\", \"mpirun -N 1 --hostfile hosts -x CPPOOL_SECRET\"")
      ->check([](const std::string& words) {
        return words.find_first_not_of(" \t\n") != std::string::npos ? "" : "give the words of a launcher";
      })
      ->type_name("WORDS");
}

std::string IsServer(const std::string& attach) try {
  client::SocketAddress(client::SocketPath(attach.empty() ? "default" : attach));
  return "";
} catch (const std::invalid_argument& error) {
  return error.what();
}

void AddLeaks(CLI::App& app, bool* errors) {
  app.add_option_function<std::string>(
         "--leaks", [errors](const std::string& word) { *errors = word == "error"; },
         "What a case that passes and leaves memory, threads, open files or processes behind gets: a warning "
         "(warn, the default), or a failure (error)")
      ->check(CLI::IsMember({"warn", "error"}));
}

CLI::Option* AddCase(CLI::App& app, std::string* name, const std::string& help) {
  return app.add_option("--case", *name, help + " (default: the only one of --load, else attention)")
      ->check(IsUtf8);
}

CLI::Option* AddRepeatable(CLI::App& app, const std::string& name, std::vector<std::string>* values,
                           const std::string& help) {
  return app.add_option(name, *values, help + ". May be repeated")
      ->expected(1)
      ->allow_extra_args(false)
      ->take_all();
}

CLI::Option* AddSeconds(CLI::App& app, const std::string& name, double* seconds, const std::string& help) {
  return app.add_option(name, *seconds, help)
      ->check(CLI::Range(0.001, 86400.0))
      ->check([](const std::string& text) {  // CLI::Range accepts NaN
        return std::isnan(std::strtod(text.c_str(), nullptr)) ? "not a number: " + text : "";
      });
}

void AddDeadline(CLI::App& app, double* seconds, const std::string& help) {
  AddSeconds(app, "--deadline", seconds, help)->capture_default_str();
}

std::chrono::milliseconds ToMilliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

std::string IsUtf8(const std::string& text) {
  const bool valid = base::ValidUtf8Prefix(text) == text.size();
  return valid ? "" : "not UTF-8: " + protocol::Quoted(text);
}

std::string IsPath(const std::string& text) { return text.empty() ? "a path cannot be empty" : ""; }

std::string CannotWrite(const std::string& path) {
  const int error = errno;
  return "cannot write " + path + (error == 0 ? "" : std::string(": ") + std::strerror(error));
}

void CheckCanWrite(const std::string& option, const std::string& file) {
  if (const std::string why = base::WhyNotWritable(file); !why.empty())
    throw suite::UsageError(option + ": cannot write " + file + ": " + why);
}

CLI::Option* AddHtml(CLI::App& app, std::string* file) {
  return app.add_option("--html", *file, "Writes a page of the results to this file, which needs no other")
      ->check(IsPath);
}

std::string UtcText(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  return text;
}

std::string HostName() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 && name[0] ? name : "localhost";
}

Json DescribeOrigin(std::chrono::system_clock::time_point begin) {
  return {{"begin", UtcText(begin)}, {"host", HostName()}, {"version", CPPOOL_VERSION}};
}

bool HasFeature(const Json& hello, std::string_view feature) {
  const Json features = hello.value("features", Json::array());
  return std::find(features.begin(), features.end(), feature) != features.end();
}

void Require(const Json& hello, const std::string& feature) {
  if (!HasFeature(hello, feature))
    throw suite::UsageError("this cppoold has no \"" + feature + "\": install it and cppool from one build");
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

void PrintJson(std::ostream& out, const Json& value) {
  out << protocol::JsonText(value) << "\n" << std::flush;
}

std::string Fixed(double value, int digits) {
  if (!std::isfinite(value)) return "-";
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, value);
  return buffer;
}

std::string DescribeWorld(const Json& hello) {
  auto text = [&](const char* key) {
    auto found = hello.find(key);
    return found != hello.end() && found->is_string() ? found->get<std::string>() : std::string("unknown");
  };
  const Json devices = hello.value("devices", Json::array());  // one per rank
  std::vector<std::pair<std::string, int>> kinds;              // in the order of the ranks
  std::set<std::string> seen;
  bool shared = false;
  for (const Json& device : devices) {
    const std::string uuid = device.is_object() ? suite::TextFromValue(device.value("uuid", Json(""))) : "";
    if (!uuid.empty() && !seen.insert(uuid).second) {
      shared = true;
      continue;
    }
    std::string name =
        suite::TextFromValue(device.is_object() ? device.value("name", Json("unknown")) : device);
    auto same = std::ranges::find_if(kinds, [&](const auto& kind) { return kind.first == name; });
    if (same != kinds.end())
      ++same->second;
    else
      kinds.emplace_back(name, 1);
  }
  std::string world = "backend " + text("backend") + ", transport " + text("transport");
  const bool threads = seen.empty();  // ranks of the host backend share the processor, which has no uuid
  std::string before = ", ";
  if (shared || threads)
    before += std::to_string(devices.size()) + (devices.size() == 1 ? " rank on " : " ranks on ");
  for (const auto& [name, count] : kinds) {
    world += before + (threads ? name : std::to_string(count) + " x " + name);
    before = ", ";
  }
  before = ", on nodes ";
  for (const Json& node : hello.value("nodes", Json::array())) {
    world += before + suite::TextFromValue(node.is_object() ? node.value("node", Json("unknown")) : node);
    before = ", ";
  }
  return world;
}

}  // namespace cppool::command
