// Says where the process was when a case or a library ended it: a signal such as SIGSEGV, a call of exit(),
// or code that does not return at the process's end. The report is made on a thread of its own, since the one
// that crashed may hold any lock; the crashed thread waits for it for at most half a second. When several
// threads crash, the first one is reported, and the others wait for the end.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cppool::daemon {

// What a thread was doing. A member that is not known is absent or empty.
struct CrashPlace {
  std::optional<int> rank;
  std::string stage, case_name;
  std::string library;  // the file that the case is from, or that is being opened
  std::string when;     // what the daemon did: "while the daemon ended"
};

// At most one exists at a time.
class CrashReporter {
 public:
  // The reporter's thread calls these. They may get stuck: the report then lacks what they would add.
  struct Sources {
    std::function<CrashPlace(pid_t thread)> place;
    // The file that a request named and of which `file` is the copy that was loaded; empty: it is none.
    std::function<std::string(const std::string& file)> named;
  };
  // `write` gets the line of protocol/crash.h, from any thread. Installs handlers for SIGSEGV, SIGBUS,
  // SIGFPE, SIGILL, SIGABRT and SIGTRAP, which end the process as before once the line is written. An
  // overflow of its stack is reported for the calling thread and for those that have a kernels::SignalStack.
  // Children that fork() makes are not reported.
  CrashReporter(std::function<void(std::string_view)> write, Sources sources);
  ~CrashReporter();
  CrashReporter(const CrashReporter&) = delete;
  CrashReporter& operator=(const CrashReporter&) = delete;

  // Ends the process with the code, and reports that the calling thread called exit(code). Runs no exit
  // handlers.
  [[noreturn]] static void EndByExit(int code);
  // Ends the process with the code, and reports that `thread` "did not return ...", as `what` says, with its
  // stack. From another thread.
  [[noreturn]] static void EndStuck(pid_t thread, const char* what, int code);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace cppool::daemon
