// Says where the process was when a case or a library ended it: a signal such as SIGSEGV, or a call of exit(). The report is made on a
// thread of its own, since the one that crashed may hold any lock; the crashed thread waits for it for at most half a second.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cppool::daemon {

// What a thread was doing. Unknown: absent or empty.
struct CrashPlace {
  std::optional<int> rank;
  std::string stage, case_name;
  std::string library;  // the file that the case is from, or that is being opened
};

// One at a time.
class CrashReporter {
 public:
  // Called on the reporter's thread, and may get stuck: the report then lacks what they would say.
  struct Sources {
    std::function<CrashPlace(pid_t thread)> place;
    // The file that a request named and of which `file` is the copy that was loaded; empty: it is none.
    std::function<std::string(const std::string& file)> named;
  };
  // `write` gets the line of protocol/crash.h, from any thread. Installs handlers for SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT and
  // SIGTRAP, which end the process as before once the line is written.
  CrashReporter(std::function<void(std::string_view)> write, Sources sources);
  ~CrashReporter();
  CrashReporter(const CrashReporter&) = delete;
  CrashReporter& operator=(const CrashReporter&) = delete;

  // From the calling thread's exit handler: reports that it called exit(code). Returns within a little more than half a second.
  static void ReportExit(int code);

 private:
  class State;
  std::unique_ptr<State> state_;
};

// Gives the calling thread, until it ends, a stack for signal handlers, without which an overflow of its own stack cannot be reported.
void UseHandlerStack();

}  // namespace cppool::daemon
