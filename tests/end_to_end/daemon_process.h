// A real cppoold over real pipes, spoken to by hand: the tests trust neither the client library nor the protocol's own code.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace cppool::test {

using Json = nlohmann::json;

inline constexpr std::chrono::seconds kPatience{60};  // a backstop: what takes this long hangs

class DaemonProcess {
 public:
  explicit DaemonProcess(const std::vector<std::string>& arguments,
                         const std::string& program = CPPOOL_DAEMON);
  ~DaemonProcess();  // kills it if it still runs
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Send(const std::string& line);  // with a newline; a daemon that reads no more is no error
  void SendBytes(const std::string& text);
  void CloseInput();
  void CloseOutput();
  // The next line of its stdout, without the newline; nothing at the end, or when it takes too long.
  std::optional<std::string> ReadLine(std::chrono::milliseconds limit = kPatience);
  // The next line, which must be an answer behind the default sentinel.
  Json ReadAnswer();
  Json Ask(const Json& request);
  // Its exit code, or 1000 + the signal that ended it; -1 when it does not end. The input is closed first.
  int Wait();
  std::string Stderr() const;  // so far

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  std::string buffer_;
  std::string stderr_file_;
  std::optional<int> status_;
};

// Of a process that need not be a child: gone within the limit.
bool EndsInTime(pid_t pid);

}  // namespace cppool::test
