// Faults on request: makes one rank fail at one mark of a case, to test the watchdog and the recovery.
// Written once for every runtime: it stands between the case and the rank's table.
//
// Threads: everything is for the rank's thread.
#pragma once

#include <cppool/runtime.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/backend.h"

namespace cppool::kernels {

enum class FaultKind {
  // These happen on the rank's thread, in the call of `mark`.
  kThrow,        // a C++ exception
  kSegfault,     // writes to a page that may not be written
  kAbort,        // std::abort
  kExit,         // std::exit(kFaultExitCode)
  kStallHost,    // does not return
  kOutOfMemory,  // takes device memory until it is refused, and fails with that
  kFlood,        // 12 MB to stdout and as many to stderr, answers among them
  kHalfLine,     // half an answer, without its end, to stdout
  kHalfAnswer,   // the same to the stream of the daemon's answers
  // These happen on the stream, after the mark.
  kStall,        // work that does not end
  kTrap,         // an illegal instruction of the device; on the host SIGTRAP
  kOutOfBounds,  // a write past the end of device memory
  // These happen to the rank's next communication call after the mark.
  kSkipCollective,  // is not made
  kWrongSize,       // has half of its size
  kFlipBit,         // sends one element, in the middle, with its highest exponent bit flipped
};

inline constexpr int kFaultExitCode = 42;

std::string_view NameOf(FaultKind kind);           // "throw", "skip_collective", ...
const std::vector<std::string>& FaultKindNames();  // in the order of the enum
std::optional<FaultKind> FaultKindOf(std::string_view name);

struct Fault {
  FaultKind kind = FaultKind::kThrow;
  int rank = 0;
  std::string stage;        // the name of a mark, or its beginning; empty: any mark of the iterations
  int count = 1;            // the fault happens at this one of those marks, from 1
  std::string half_answer;  // how the daemon's answer begins
  std::function<void(std::string_view)> write_answer;  // writes where answers go; empty: to stdout
};

class FaultInjector {
 public:
  // Both must outlive it.
  FaultInjector(const Fault& fault, RankRuntime& runtime);
  FaultInjector(const FaultInjector&) = delete;
  FaultInjector& operator=(const FaultInjector&) = delete;

  // The rank's table, with the fault in it, once. Its handles and errors are those of the runtime's own
  // table.
  cppool_runtime* seam() { return &table_; }
  // Marks count only within iterations when the fault names no stage.
  void InIterations(bool in) { in_iterations_ = in; }
  // Empty once the fault has happened; else why it has not, with the stages that the rank has marked.
  std::string WhyNot() const;

 private:
  struct Table : cppool_runtime {
    FaultInjector* owner;
  };
  static FaultInjector& Of(cppool_runtime* rt) { return *static_cast<Table*>(rt)->owner; }
  void FillTable();

  cppool_status Mark(cppool_stream stream, const char* stage);
  bool IsTheMark(const std::string& stage);
  cppool_status Happen(cppool_stream stream);
  cppool_status ExhaustMemory(cppool_stream stream);
  // For the next communication call after the mark. `sent`: the device memory that it reads, with its bytes.
  bool Skips();
  std::size_t Size(std::size_t size);
  void Spoil(const void* sent, std::size_t bytes, cppool_stream stream);

  const Fault& fault_;
  RankRuntime& runtime_;
  cppool_runtime* const inner_;
  Table table_;
  bool in_iterations_ = false;
  int seen_ = 0;  // marks that match
  bool reached_ = false, happened_ = false;
  std::string reached_stage_;
  std::set<std::string> marked_;
};

}  // namespace cppool::kernels
