#include "base/spawn.h"

#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>

#include <algorithm>
#include <string_view>
#include <system_error>

extern char** environ;

namespace cppool::base {
namespace {

void Check(int error, const char* what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

struct Actions {
  posix_spawn_file_actions_t value;
  Actions() { Check(posix_spawn_file_actions_init(&value), "posix_spawn_file_actions_init"); }
  ~Actions() { posix_spawn_file_actions_destroy(&value); }
  Actions(const Actions&) = delete;
  Actions& operator=(const Actions&) = delete;
};

struct Attributes {
  posix_spawnattr_t value;
  Attributes() { Check(posix_spawnattr_init(&value), "posix_spawnattr_init"); }
  ~Attributes() { posix_spawnattr_destroy(&value); }
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;
};

std::vector<std::string> Environment(const std::vector<std::string>& changes) {
  std::vector<std::string> result;
  auto name = [](std::string_view entry) { return entry.substr(0, entry.find('=')); };
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    bool changed =
        std::ranges::any_of(changes, [&](const std::string& change) { return name(change) == name(*entry); });
    if (!changed) result.emplace_back(*entry);
  }
  result.insert(result.end(), changes.begin(), changes.end());
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  result.reserve(strings.size() + 1);
  for (std::string& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

pid_t Spawn(const SpawnCommand& command, int input, int output, int errors) {
  Actions actions;
  Check(posix_spawn_file_actions_adddup2(&actions.value, input, 0), "posix_spawn");
  Check(posix_spawn_file_actions_adddup2(&actions.value, output, 1), "posix_spawn");
  Check(posix_spawn_file_actions_adddup2(&actions.value, errors, 2), "posix_spawn");
  Check(posix_spawn_file_actions_addclosefrom_np(&actions.value, 3), "posix_spawn");

  Attributes attributes;
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  sigdelset(&all, SIGKILL);
  sigdelset(&all, SIGSTOP);
  Check(posix_spawnattr_setsigmask(&attributes.value, &none), "posix_spawn");
  Check(posix_spawnattr_setsigdefault(&attributes.value, &all), "posix_spawn");
  Check(posix_spawnattr_setpgroup(&attributes.value, 0), "posix_spawn");
  const int group = command.own_group ? POSIX_SPAWN_SETPGROUP : 0;
  Check(posix_spawnattr_setflags(&attributes.value,
                                 static_cast<short>(group | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF)),
        "posix_spawn");

  std::vector<std::string> arguments = command.arguments;
  arguments.insert(arguments.begin(), command.path);
  std::vector<std::string> environment = Environment(command.environment);
  std::vector<char*> argv = Pointers(arguments);
  std::vector<char*> envp = Pointers(environment);
  pid_t pid = -1;
  Check(posix_spawn(&pid, command.path.c_str(), &actions.value, &attributes.value, argv.data(), envp.data()),
        command.path.c_str());
  return pid;
}

std::string DescribeExit(int code) { return "exited with code " + std::to_string(code); }

std::string DescribeSignal(int signal) {
  const char* name = sigdescr_np(signal);
  return "was killed by signal " + std::to_string(signal) + (name ? " (" + std::string(name) + ")" : "");
}

std::string DescribeStatus(int status) {
  return WIFSIGNALED(status) ? DescribeSignal(WTERMSIG(status)) : DescribeExit(WEXITSTATUS(status));
}

}  // namespace cppool::base
