// `cppool torchrun`: a script for torchrun, on warm ranks. `cppool shims`: the folder with a `torchrun` that
// is this command.
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "client/command/command.h"
#include "client/src/shell.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"
#include "protocol/start.h"

extern char** environ;

namespace cppool::command {
namespace {

using Words = std::vector<std::string>;

constexpr char kHelp[] =
    "Usage: cppool torchrun [OPTIONS] --nproc-per-node N SCRIPT [ARGUMENTS...]\n"
    "Runs a script as torchrun does, on Python processes that have torch imported and their process group "
    "made.\n\n"
    "  --nproc-per-node N  Ranks; --nnodes 1, --standalone, --master-addr and --master-port have no effect\n"
    "  --deadline SECONDS  Of the script (default: 3600)\n"
    "  --preload MODULES   What is imported before the ranks are forked, a,b (default: torch)\n"
    "  --attach [=SOCKET]  The server whose ranks it uses (default: $CPPOOL_ATTACH; without one the ranks "
    "end with "
    "the script)\n\n"
    "Other options go to the real torchrun. PATH=$(cppool shims):$PATH makes this the torchrun of other "
    "programs.\n"
    "The Python is $CPPOOL_PYTHON, that of $VIRTUAL_ENV, or python3.\n";

struct Torchrun {
  int ranks = 1;
  double deadline = 3600;
  std::string preload = "torch", attach, script;
  Words arguments;
  std::string unsupported;  // an option that only the real one has
};

// "--nproc_per_node=4" has the name "--nproc-per-node", as torchrun takes both.
std::pair<std::string, std::optional<std::string>> Split(const std::string& word) {
  const std::size_t equals = word.find('=');
  std::string name = word.substr(0, equals);
  for (char& character : name)
    if (character == '_') character = '-';
  if (equals == std::string::npos) return {name, std::nullopt};
  return {name, word.substr(equals + 1)};
}

Torchrun Parse(const Words& words) {
  Torchrun run;
  const char* attach = std::getenv("CPPOOL_ATTACH");
  run.attach = attach ? attach : "";
  std::string own;  // an option that the real one has not
  std::size_t i = 0;
  const auto note_own = [&](const std::string& name) {
    for (const char* option : {"--attach", "--deadline", "--preload"})
      if (name == option) own = name;
  };
  const auto unsupported = [&](const std::string& option) {
    while (own.empty() && ++i < words.size() && words[i].starts_with("-")) note_own(Split(words[i]).first);
    if (!own.empty())
      throw suite::UsageError(own + " is for warm ranks, and " + option +
                              " for the real torchrun, which has no " + own + ": leave one of them out");
    run.unsupported = option;
    return run;
  };
  for (; i < words.size(); ++i) {
    if (!words[i].starts_with("-")) {
      run.script = words[i];
      run.arguments.assign(words.begin() + static_cast<std::ptrdiff_t>(i) + 1, words.end());
      return run;
    }
    auto [name, given] = Split(words[i]);
    if (name == "--standalone") continue;
    note_own(name);
    if (name == "--attach") {
      run.attach = given && !given->empty() ? *given : "default";
      continue;
    }
    static const Words valued = {"--nproc-per-node", "--nnodes",   "--master-addr",
                                 "--master-port",    "--deadline", "--preload"};
    if (std::ranges::find(valued, name) == valued.end()) return unsupported(words[i]);
    if (!given && i + 1 == words.size()) throw suite::UsageError(name + " has no value");
    const std::string value = given ? *given : words[++i];
    if (name == "--preload") {
      run.preload = value;
    } else if (name == "--deadline") {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), run.deadline);
      const bool whole = error == std::errc() && end == value.data() + value.size();
      if (!whole || !(run.deadline >= 0.001 && run.deadline <= 86400))
        throw suite::UsageError("--deadline is a number of seconds from 0.001 to 86400, not '" + value + "'");
    } else if (name == "--nproc-per-node") {
      const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), run.ranks);
      if (error != std::errc() || end != value.data() + value.size())
        return unsupported(name + " " + value);  // gpu, auto
      if (run.ranks < 1 || run.ranks > protocol::kMaxWorldSize)
        throw suite::UsageError(name + " is from 1 to " + std::to_string(protocol::kMaxWorldSize) + ", not " +
                                value);
    } else if (name == "--nnodes" && value != "1" && value != "1:1") {
      return unsupported(name + " " + value);
    }
  }
  if (words.empty()) throw suite::UsageError("torchrun needs a script: see `cppool torchrun --help`");
  throw suite::UsageError("torchrun needs a script after its options");
}

// The Python that the daemon would take.
std::string Python() {
  for (const char* variable : {"CPPOOL_PYTHON", "VIRTUAL_ENV"}) {
    const char* const value = std::getenv(variable);
    if (value && *value)
      return variable == std::string_view("VIRTUAL_ENV") ? std::string(value) + "/bin/python" : value;
  }
  return "python3";
}

// Does not return, unless it cannot be started.
int ExecTorchrun(const Torchrun& run, const Words& words, const Streams& streams) {
  streams.err << "cppool torchrun: " << run.unsupported
              << " is for the real torchrun, which runs this in processes of its own" << std::endl;
  Words command = {Python(), "-m", "torch.distributed.run"};
  command.insert(command.end(), words.begin(), words.end());
  std::vector<char*> argv;
  for (std::string& word : command) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  streams.err << "cppool: " << command[0] << ": " << std::strerror(errno) << "\n";
  return kFailure;
}

// This process's variables, but for those that the ranks have of their own.
Json Environment() {
  Json env = Json::object();
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view text = *entry;
    const std::string name(text.substr(0, text.find('=')));
    static const Words own = {"RANK",
                              "LOCAL_RANK",
                              "WORLD_SIZE",
                              "LOCAL_WORLD_SIZE",
                              "GROUP_RANK",
                              "GROUP_WORLD_SIZE",
                              "ROLE_NAME",
                              "ROLE_RANK",
                              "ROLE_WORLD_SIZE",
                              "MASTER_ADDR",
                              "MASTER_PORT",
                              "TORCHELASTIC_RUN_ID",
                              "TORCHELASTIC_RESTART_COUNT",
                              "TORCHELASTIC_MAX_RESTARTS",
                              "TORCHELASTIC_USE_AGENT_STORE",
                              "TORCHELASTIC_ERROR_FILE",
                              "OMP_NUM_THREADS",
                              "CUDA_VISIBLE_DEVICES",
                              "PYTEST_CURRENT_TEST"};
    if (name.empty() || std::ranges::find(own, name) != own.end() || !IsUtf8(std::string(text)).empty())
      continue;
    env[name] = std::string(text.substr(name.size() + 1));
  }
  return env;
}

// What the ranks write is the script's output; the other lines of the daemon's stderr are the daemon's. On a
// thread of its own, so that what the reader of this program's output has not taken yet is not lost.
class ScriptOutput {
 public:
  explicit ScriptOutput(const Streams& streams) : streams_(streams), thread_([this] { Write(); }) {}
  ~ScriptOutput() {  // when all is written
    Change([this] { over_ = true; });
    thread_.join();
    for (const auto& [rank, part] : parts_) streams_.out << part << std::flush;
  }

  // One thread.
  void Take(std::string_view line) {
    const std::size_t end = line.starts_with("[rank ") ? line.find("] ") : std::string_view::npos;
    if (end == std::string_view::npos) return Change([&] { err_.append(line) += '\n'; });
    std::string_view rank = line.substr(0, end);
    const bool goes_on = rank.ends_with('+');
    if (goes_on) rank.remove_suffix(1);
    std::string& part = parts_[std::string(rank)];
    part += line.substr(end + 2);
    if (goes_on) return;
    Change([&] { out_.append(part) += '\n'; });
    part.clear();
  }

 private:
  template <typename Function>
  void Change(Function change) {
    const std::lock_guard lock(mutex_);
    change();
    changed_.notify_one();
  }
  void Write() {
    for (std::unique_lock lock(mutex_);;) {
      changed_.wait(lock, [this] { return over_ || !out_.empty() || !err_.empty(); });
      const std::string out = std::exchange(out_, ""), err = std::exchange(err_, "");
      if (out.empty() && err.empty()) return;
      lock.unlock();
      streams_.out << out << std::flush;
      streams_.err << err << std::flush;
      lock.lock();
    }
  }

  const Streams& streams_;
  std::map<std::string, std::string> parts_;  // of lines that have not ended, by rank
  std::mutex mutex_;                          // of the next four
  std::condition_variable changed_;
  std::string out_, err_;
  bool over_ = false;
  std::thread thread_;
};

int RunScript(const Torchrun& run, const Streams& streams) {
  const std::string cwd = std::filesystem::current_path().string();
  const std::filesystem::path script = std::filesystem::path(cwd) / run.script;
  PoolOptions options;
  options.world_size = run.ranks;
  options.python = "";
  for (std::size_t from = 0; from <= run.preload.size();) {
    const std::size_t comma = std::min(run.preload.find(',', from), run.preload.size());
    if (comma > from) options.preload.push_back(run.preload.substr(from, comma - from));
    from = comma + 1;
  }
  options.attach = run.attach;
  options.start_limit = std::chrono::seconds(120);
  RunOptions how;
  how.deadline = ToMilliseconds(run.deadline);
  how.verdict = false;
  how.python = Json{{"script", script.lexically_normal().string()},
                    {"argv", run.arguments},
                    {"path", Json::array({script.lexically_normal().parent_path().string()})},
                    {"cwd", cwd},
                    {"env", Environment()}}
                   .dump();
  options.log_level = "error";
  std::optional<Result> result;
  std::string error;
  {
    ScriptOutput output(streams);
    options.on_stderr = [&](std::string_view line) { output.Take(line); };
    try {
      Pool pool(options);
      result = pool.Run(Json::object(), how);
      pool.StderrTail();  // all has been read
    } catch (const PoolError& thrown) {
      error = thrown.what();
    }
  }
  if (!result) {
    streams.err << "cppool torchrun: " << error << "\n";
    return kFailure;
  }
  for (const std::string& warning : result->warnings)
    streams.err << "cppool torchrun: warning: " << warning << "\n";
  if (result->ok()) return kSuccess;
  streams.err << "cppool torchrun: " << result->error << "\n";
  for (const Rank& rank : result->ranks)
    if (result->failure && result->failure->rank == rank.rank) streams.err << rank.traceback;
  for (const Rank& rank : result->ranks)
    if (!rank.error.empty() && !(result->failure && result->failure->rank == rank.rank))
      streams.err << "rank " << rank.rank << ": " << rank.error << "\n";
  return kFailure;
}

}  // namespace

void AddTorchrun(CLI::App& app, const Streams& streams, int* exit_code) {
  CLI::App* torchrun = app.add_subcommand("torchrun", "Runs a script for torchrun on warm ranks");
  torchrun->set_help_flag();
  torchrun->prefix_command();
  torchrun->callback([torchrun, &streams, exit_code] {
    const Words words = torchrun->remaining();
    if (!words.empty() && (words[0] == "--help" || words[0] == "-h")) {
      streams.out << kHelp;
      *exit_code = kSuccess;
      return;
    }
    const Torchrun run = Parse(words);
    *exit_code = run.unsupported.empty() ? RunScript(run, streams) : ExecTorchrun(run, words, streams);
  });
  CLI::App* shims =
      app.add_subcommand("shims", "Prints the folder with a `torchrun` that is `cppool torchrun`, for PATH");
  shims->callback([&streams, exit_code] {
    const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
    const std::filesystem::path folder = program.parent_path().parent_path() / "share/cppool/shims";
    if (!std::filesystem::exists(folder / "torchrun")) {
      streams.err << "cppool: there is no " << (folder / "torchrun").string()
                  << ", where the installation has it\n";
      *exit_code = kFailure;
      return;
    }
    if (folder.string().find(':') != std::string::npos) {
      streams.err << "cppool: " << folder.string()
                  << " cannot be in PATH, whose entries end at a colon: install cppool elsewhere\n";
      *exit_code = kFailure;
      return;
    }
    streams.out << folder.string() << "\n";
    *exit_code = kSuccess;
  });
}

}  // namespace cppool::command
