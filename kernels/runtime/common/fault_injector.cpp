#include "kernels/fault_injector.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <thread>

#include "kernels/runtime/common/collective_call.h"

namespace cppool::kernels {
namespace {

constexpr std::size_t kFloodBytes = std::size_t{12} << 20;
constexpr std::size_t kSmallestChunk = std::size_t{2} << 20;  // device memory is full when this is refused
constexpr std::size_t kSmallestSpoilt = 64;  // bytes: a smaller message is a barrier, not a tensor

// In the order of the enumerators.
constexpr auto kNames = std::to_array<std::string_view>(
    {"throw", "segfault", "abort", "exit", "stall_host", "out_of_memory", "flood", "half_line", "half_answer",
     "stall", "trap", "out_of_bounds", "skip_collective", "wrong_size", "flip_bit"});
static_assert(kNames.size() == static_cast<std::size_t>(FaultKind::kFlipBit) + 1);

// Through a pointer, as broken code would: the processor raises the signal.
void WriteToReadOnlyPage() {
  void* const page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *static_cast<volatile char*>(page) = 1;
}

// Does not end: that is the fault. The daemon's watchdog ends the process at the deadline.
[[noreturn]] void SleepForEver() {
  for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

void Flood(const std::string& half_answer) {
  const std::string line = "a library that talks too much: " + std::string(224, '.') + "\n";
  const std::string answer = half_answer + "}\n";
  for (std::size_t written = 0, lines = 0; written < kFloodBytes; written += line.size(), ++lines) {
    for (std::FILE* file : {stdout, stderr}) std::fputs((lines % 1024 ? line : answer).c_str(), file);
  }
  std::fflush(stdout);
}

}  // namespace

std::string_view NameOf(FaultKind kind) { return kNames.at(static_cast<std::size_t>(kind)); }

const std::vector<std::string>& FaultKindNames() {
  static const std::vector<std::string> names(kNames.begin(), kNames.end());
  return names;
}

std::optional<FaultKind> FaultKindOf(std::string_view name) {
  const auto known = std::find(kNames.begin(), kNames.end(), name);
  if (known == kNames.end()) return std::nullopt;
  return static_cast<FaultKind>(known - kNames.begin());
}

FaultInjector::FaultInjector(const Fault& fault, RankRuntime& runtime)
    : fault_(fault), runtime_(runtime), inner_(runtime.seam()), table_{{*runtime.seam()}, this} {
  FillTable();
}

// The other functions are the runtime's own: they find it in `self`, whichever table they are called through.
void FaultInjector::FillTable() {
  using Rt = cppool_runtime;
  cppool_runtime& seam = table_;
  seam.mark = [](Rt* rt, cppool_stream stream, const char* stage) { return Of(rt).Mark(stream, stage); };
  seam.send = [](Rt* rt, const void* buffer, std::size_t bytes, int peer, cppool_comm comm,
                 cppool_stream stream) {
    FaultInjector& at = Of(rt);
    at.Spoil(buffer, bytes, stream);
    return at.Skips() ? CPPOOL_OK : at.inner_->send(at.inner_, buffer, at.Size(bytes), peer, comm, stream);
  };
  seam.recv = [](Rt* rt, void* buffer, std::size_t bytes, int peer, cppool_comm comm, cppool_stream stream) {
    FaultInjector& at = Of(rt);
    return at.Skips() ? CPPOOL_OK : at.inner_->recv(at.inner_, buffer, at.Size(bytes), peer, comm, stream);
  };
  SetCollectives<[](Rt* rt, CollectiveCall call, cppool_comm comm, cppool_stream stream) {
    FaultInjector& at = Of(rt);
    at.Spoil(call.in, call.bytes(), stream);  // of reduce_scatter, the first rank's part
    call.count = at.Size(call.count);
    return at.Skips() ? CPPOOL_OK : MakeCall(at.inner_, call, comm, stream);
  }>(seam);
}

std::string FaultInjector::WhyNot() const {
  if (happened_) return "";
  const std::string rank = "rank " + std::to_string(inner_->rank);
  const std::string text = "the fault " + std::string(NameOf(fault_.kind)) + " did not happen: ";
  if (reached_) {
    return text + rank + " made no communication call that the fault applies to after its mark '" +
           reached_stage_ + "'";
  }
  std::string marked;
  for (const std::string& stage : marked_) marked += (marked.empty() ? "'" : ", '") + stage + "'";
  const std::string which =
      fault_.stage.empty() ? "a mark in its iterations" : "a mark that begins with '" + fault_.stage + "'";
  return text + rank + " reached " + which + " " + std::to_string(seen_) +
         " times, and the fault is for time " + std::to_string(fault_.count) +
         (marked.empty() ? "; it marked nothing" : "; it marked " + marked);
}

// ---- at the mark

cppool_status FaultInjector::Mark(cppool_stream stream, const char* stage) {
  const cppool_status status = inner_->mark(inner_, stream, stage);
  if (status != CPPOOL_OK || !stage || !IsTheMark(stage)) return status;
  reached_ = true;
  reached_stage_ = stage;
  return Happen(stream);
}

bool FaultInjector::IsTheMark(const std::string& stage) {
  if (reached_) return false;
  marked_.insert(stage);
  const bool fits = fault_.stage.empty() ? in_iterations_ : stage.rfind(fault_.stage, 0) == 0;
  return fits && ++seen_ == fault_.count;
}

cppool_status FaultInjector::Happen(cppool_stream stream) {
  happened_ = true;  // except for faults of communication, below: the call is still to come
  switch (fault_.kind) {
    case FaultKind::kThrow:
      throw std::runtime_error("a fault was asked for: throw, at the mark '" + reached_stage_ + "' of rank " +
                               std::to_string(inner_->rank));
    case FaultKind::kSegfault:
      WriteToReadOnlyPage();
      break;
    case FaultKind::kAbort:
      std::abort();
    case FaultKind::kExit:
      std::exit(kFaultExitCode);
    case FaultKind::kStallHost:
      SleepForEver();
    case FaultKind::kOutOfMemory:
      return ExhaustMemory(stream);
    case FaultKind::kFlood:
      Flood(fault_.half_answer);
      break;
    case FaultKind::kHalfLine:
      std::fputs(fault_.half_answer.c_str(), stdout);
      std::fflush(stdout);
      break;
    case FaultKind::kHalfAnswer:
      if (fault_.write_answer) fault_.write_answer(fault_.half_answer);
      break;
    case FaultKind::kStall:
      runtime_.Break(DeviceFault::kStall, nullptr, stream);
      break;
    case FaultKind::kTrap:
      runtime_.Break(DeviceFault::kTrap, nullptr, stream);
      break;
    case FaultKind::kOutOfBounds:
      runtime_.Break(DeviceFault::kOutOfBounds, nullptr, stream);
      break;
    case FaultKind::kSkipCollective:
    case FaultKind::kWrongSize:
    case FaultKind::kFlipBit:
      happened_ = false;
      break;
  }
  return CPPOOL_OK;
}

cppool_status FaultInjector::ExhaustMemory(cppool_stream stream) {
  // On the host a single request for more than there is: memory that is really taken would be missing in
  // other processes.
  const bool host = std::string_view(inner_->backend) == "host";
  const std::size_t smallest = host ? std::numeric_limits<std::size_t>::max() : kSmallestChunk;
  std::vector<void*> taken;
  cppool_status status = CPPOOL_OK;
  for (std::size_t bytes = runtime_.Memory().free_bytes * 2 + kSmallestChunk;;) {
    void* chunk = nullptr;
    status = inner_->alloc(inner_, bytes, stream, &chunk);
    if (status == CPPOOL_OK) {
      taken.push_back(chunk);
    } else if (status != CPPOOL_OUT_OF_MEMORY || bytes <= smallest) {
      break;
    } else {
      bytes = std::max(bytes / 2, smallest);
    }
  }
  for (void* chunk : taken) inner_->free(inner_, chunk, stream);  // last_error remains that of the refusal
  return status;
}

// ---- the next communication

bool FaultInjector::Skips() {
  if (fault_.kind != FaultKind::kSkipCollective || !reached_ || happened_) return false;
  happened_ = true;
  return true;
}

std::size_t FaultInjector::Size(std::size_t size) {
  if (fault_.kind != FaultKind::kWrongSize || !reached_ || happened_ || size < 2) return size;
  happened_ = true;
  return size / 2;
}

void FaultInjector::Spoil(const void* sent, std::size_t bytes, cppool_stream stream) {
  if (fault_.kind != FaultKind::kFlipBit || !reached_ || happened_ || bytes < kSmallestSpoilt) return;
  happened_ = true;
  // The last byte of a little-endian float32 is also the last one of the second of two half-precision
  // elements.
  auto* const byte = static_cast<unsigned char*>(const_cast<void*>(sent)) + bytes / 2 / 8 * 8 + 7;
  runtime_.Break(DeviceFault::kFlipBit, byte, stream);
}

}  // namespace cppool::kernels
