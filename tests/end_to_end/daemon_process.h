// A real cppoold over real pipes. It uses neither the client library nor protocol/, so that tests do not rely
// on the code under test.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace cppool::test {

using Json = nlohmann::json;

inline constexpr std::chrono::seconds kPatience{60};  // a backstop against hanging

// The arguments of a daemon on the host runtime.
inline std::vector<std::string> Host(int world_size, const std::vector<std::string>& more = {}) {
  std::vector<std::string> arguments{"--world-size", std::to_string(world_size), "--backend", "host"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

class DaemonProcess {
 public:
  explicit DaemonProcess(const std::vector<std::string>& arguments,
                         const std::string& program = CPPOOL_DAEMON);
  ~DaemonProcess();  // kills it if it still runs
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Send(const std::string& line);  // adds a newline; no error if the daemon no longer reads
  void SendBytes(const std::string& text);
  void CloseInput();
  void CloseOutput();
  // The next line of its stdout, without the newline; nullopt at the end of stdout, or after the limit.
  std::optional<std::string> ReadLine(std::chrono::milliseconds limit = kPatience);
  // The answer on the next line, which must begin with the default sentinel.
  Json ReadAnswer();
  Json Ask(const Json& request);
  // Its exit code, or 1000 + the signal that ended it; -1 when it does not end. The input is closed first.
  int Wait();
  std::string Stderr() const;            // so far
  std::vector<Json> CrashLines() const;  // those of its stderr so far

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::string buffer_;
  std::string stderr_file_;
  std::optional<int> status_;
};

// Whether a process, which need not be a child, ends within kPatience.
bool EndsInTime(pid_t pid);

}  // namespace cppool::test
