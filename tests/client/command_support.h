// Calls the command as a function, and returns its output and exit code.
#pragma once

#include <pty.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "client/command/command.h"
#include "tests/client/support.h"
#include "tests/files.h"

namespace cppool::test {

struct Ran {
  int code = -1;
  std::string out, err;
  std::vector<std::string> lines;  // those of `out`

  std::string Last(std::size_t from_end = 0) const {
    return lines.size() > from_end ? lines[lines.size() - 1 - from_end] : "";
  }
  bool Prints(const std::string& text) const { return out.find(text) != std::string::npos; }
};

// `daemon`: the value of --daemon; empty: the option is not given. The test's target defines
// CPPOOL_TEST_DAEMON.
inline Ran Cppool(std::vector<std::string> words, const std::string& daemon = CPPOOL_TEST_DAEMON,
                  bool terminal = false) {
  std::ostringstream out, err;
  if (!daemon.empty()) words.insert(words.end(), {"--daemon", daemon});
  Ran ran;
  ran.code = cppool::command::Main(words, {out, err, terminal});
  ran.out = out.str();
  ran.err = err.str();
  ran.lines = Lines(ran.out);
  return ran;
}

// The program in a pseudo-terminal, which shows its stdout and stderr: `out` is both.
inline Ran OnTerminal(std::string program, std::vector<std::string> words) {
  words.insert(words.begin(), std::move(program));
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  int terminal = -1;
  const pid_t child = forkpty(&terminal, nullptr, nullptr, nullptr);
  if (child == 0) {
    execv(argv[0], argv.data());
    _exit(127);
  }
  Ran ran;
  if (child < 0) return ran;
  char buffer[4096];
  for (ssize_t n; (n = read(terminal, buffer, sizeof buffer)) > 0;)
    ran.out.append(buffer, static_cast<std::size_t>(n));
  int status = 0;
  waitpid(child, &status, 0);
  close(terminal);
  ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}

// A daemon that is the fake one with further arguments.
inline std::string Wrapped(const TemporaryFolder& folder, const std::string& arguments) {
  std::string name = folder.File("wrapped");
  std::ofstream(name) << "#!/bin/sh\nexec '" << CPPOOL_FAKE_DAEMON << "' \"$@\" " << arguments << "\n";
  chmod(name.c_str(), 0755);
  return name;
}

}  // namespace cppool::test
