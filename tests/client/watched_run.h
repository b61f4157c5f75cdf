// `cppool run --watch`, or another command, as a process, and what every source goes through in it, on either
// runtime.
#pragma once

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "client/src/process.h"
#include "tests/catch.h"
#include "tests/files.h"

namespace cppool::test {

class WatchedRun {
 public:
  // `arguments` follow `cppool` and `command`. It is killed at destruction.
  explicit WatchedRun(const std::vector<std::string>& arguments,
                      const std::vector<std::string>& command = {"run", "--watch", "--verbose"})
      : process_(client::Process::Spawn({CPPOOL_COMMAND, Words(command, arguments), {}})),
        errors_(process_->TakeErrors()) {}

  // Reads both of its streams until it has written `part`. False: that does not come within a minute.
  bool ReadUntil(const std::string& part) {
    const auto until = client::Clock::now() + std::chrono::seconds(60);
    while (text_.find(part) == std::string::npos && client::Clock::now() < until) {
      pollfd fds[2] = {{process_->output(), POLLIN, 0}, {errors_.get(), POLLIN, 0}};
      poll(fds, 2, 100);
      for (const pollfd& fd : fds) {
        char buffer[4096];
        const ssize_t count = fd.revents != 0 ? read(fd.fd, buffer, sizeof buffer) : 0;
        if (count > 0) text_.append(buffer, static_cast<std::size_t>(count));
      }
    }
    const auto at = text_.find(part);
    seen_ += at == std::string::npos ? text_ : text_.substr(0, at + part.size());
    text_.erase(0, at == std::string::npos ? at : at + part.size());
    return at != std::string::npos;
  }
  const std::string& seen() const { return seen_; }  // what ReadUntil() has read
  void Signal(int number) { kill(process_->pid(), number); }
  bool End() { return process_->Terminate(std::chrono::seconds(5), std::chrono::seconds(5)); }

 private:
  static std::vector<std::string> Words(std::vector<std::string> words,
                                        const std::vector<std::string>& arguments) {
    words.insert(words.end(), arguments.begin(), arguments.end());
    return words;
  }

  std::unique_ptr<client::Process> process_;
  base::UniqueFd errors_;
  std::string text_, seen_;
};

// `source` passes as it is, and `wrong` is a text of it that compiles and fails a check.
inline void CheckWatchRounds(WatchedRun& run, const std::string& source, const std::string& wrong) {
  const std::string right = ReadFile(source);
  const auto passes = [&] {
    const bool passed =
        run.ReadUntil(" passed, 0 failed, ") && run.ReadUntil("waiting for a save of " + source);
    INFO(run.seen());
    REQUIRE(passed);
  };
  passes();
  CHECK(run.seen().find(" -shared ") != std::string::npos);  // the command of the compiler
  CHECK(run.seen().find("\n0 passed") == std::string::npos);
  WriteFile(source, "int main( {\n");
  CHECK(run.ReadUntil(source + ": does not compile"));
  CHECK(run.ReadUntil("waiting for a save"));
  WriteFile(source, wrong);
  CHECK(run.ReadUntil("FAILED "));
  CHECK(run.ReadUntil("waiting for a save"));
  WriteFile(source, right);
  passes();
}

}  // namespace cppool::test
