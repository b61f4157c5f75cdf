#include "daemon/leftovers.h"

#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <thread>
#include <utility>

#include "daemon/log.h"
#include "daemon/process.h"

namespace cppool::daemon {
namespace {

constexpr std::chrono::milliseconds kGrace{200};
constexpr int kRunsInARow = 5;
constexpr std::uint64_t kGrowth = 16 << 20;  // bytes of host memory in each of these runs
constexpr std::size_t kMostNames = 4;
constexpr int kFreeNumbers = 16;

std::string Megabytes(std::uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

std::string Count(std::size_t count, const char* what, const char* end = "s") {
  return std::to_string(count) + " " + what + (count == 1 ? "" : end);
}

std::string NameOfThread(int thread) {
  std::string name;
  std::getline(std::ifstream("/proc/self/task/" + std::to_string(thread) + "/comm"), name);
  return name;
}

// Empty: it has been closed.
std::string TargetOf(int fd) {
  char target[256];
  const ssize_t length = readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<std::size_t>(length)) : "";
}

bool HasChildren() {
  siginfo_t info{};
  return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 || errno != ECHILD;
}

// OpenMP's threads wait for the next parallel region of the thread that has made them.
// Wheels carry copies under names such as libgomp-a34b3233.so.1.
bool HasOpenMP() {
  const auto is_openmp = [](dl_phdr_info* library, std::size_t, void*) -> int {
    std::string_view name = library->dlpi_name;
    name.remove_prefix(name.rfind('/') + 1);
    return name.starts_with("libgomp") || name.starts_with("libomp") || name.starts_with("libiomp");
  };
  return dl_iterate_phdr(is_openmp, nullptr) != 0;
}

}  // namespace

ProcNumbers::ProcNumbers(const char* folder) : folder_(opendir(folder)) { List(); }

std::size_t ProcNumbers::Count() const {
  struct stat status {};
  if (!folder_ || fstat(dirfd(folder_.get()), &status) != 0) return 0;
  // A folder of tasks has a link for each, one of descriptors has their number as its size.
  return static_cast<std::size_t>(status.st_size > 0 ? status.st_size : status.st_nlink - 2);
}

const std::set<int>& ProcNumbers::List() {
  last_.clear();
  if (!folder_) return last_;
  rewinddir(folder_.get());
  while (const dirent* entry = readdir(folder_.get())) {
    int number = 0;
    const char* const end = entry->d_name + std::strlen(entry->d_name);
    if (std::from_chars(entry->d_name, end, number).ptr == end) last_.insert(number);
  }
  return last_;
}

Leftovers::Leftovers(World& world)
    : world_(world),
      on_cuda_(world.backend().name() == "cuda"),
      threads_("/proc/self/task"),
      fds_("/proc/self/fd"),
      memory_(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)) {
  Forget();
  host_bytes_ = HostBytes();
}

void Leftovers::BeginRun(std::size_t opened) {
  if (std::exchange(opened_, opened) != opened || MayHaveLeft()) Forget();
}

void Leftovers::Forget() {
  known_threads_ = threads_.List();
  known_fds_ = fds_.List();
  known_processes_ = HasChildren() ? ChildProcesses() : std::set<int>();
  known_groups_ = Groups();
}

std::size_t Leftovers::Groups() const {
  return on_cuda_ ? world_.rank(world_.place().first).Groups().size() : 0;
}

bool Leftovers::MayHaveLeft() const {
  if (threads_.Count() != threads_.last().size() || HasChildren()) return true;
  if (const std::size_t count = fds_.Count(); count > 0) return count != fds_.last().size();
  // What is opened gets the lowest free number. What was open beside it for a time may have had the first of
  // them.
  int free = 0;
  for (int fd = 0; free < kFreeNumbers; ++fd) {
    if (fds_.last().contains(fd)) continue;
    if (fcntl(fd, F_GETFD) >= 0) return true;
    ++free;
  }
  return false;
}

Leftovers::Found Leftovers::Look() {
  Found found;
  std::set<int> own;
  for (int rank = 0; rank < world_.size(); ++rank)
    own.merge(world_.rank(world_.place().first + rank).Threads());
  const bool doubtful = known_groups_ != Groups() || HasOpenMP();
  for (const int thread : threads_.List()) {
    if (known_threads_.contains(thread) || own.contains(thread)) continue;
    const std::string name = NameOfThread(thread);
    if (name.empty() || name.starts_with("cuda")) continue;  // ended, or CUDA's
    (doubtful ? found.threads.doubtful : found.threads.sure).push_back("'" + name + "'");
  }
  for (const int fd : fds_.List()) {
    const std::string target = known_fds_.contains(fd) ? "" : TargetOf(fd);
    if (target.empty()) continue;
    const bool plain =
        target.starts_with('/') && !target.starts_with("/dev/") && !target.starts_with("/memfd:");
    (on_cuda_ && !plain ? found.fds.doubtful : found.fds.sure)
        .push_back(std::to_string(fd) + " (" + target + ")");
  }
  if (!HasChildren()) return found;
  for (const int child : ChildProcesses()) {
    if (!known_processes_.contains(child)) found.processes.sure.push_back(std::to_string(child));
  }
  return found;
}

void Leftovers::Report(const cppool_case* definition, Clock::time_point until, protocol::Leaks& leaks,
                       std::vector<std::string>& warnings) {
  if (leaks.allocations > 0)
    warnings.push_back("the case left " + Count(leaks.allocations, "allocation") + " (" +
                       std::to_string(leaks.device_bytes) + " bytes of device memory, " +
                       std::to_string(leaks.host_bytes) + " of host memory), which the daemon has freed");
  Found found;
  if (MayHaveLeft()) {
    const auto limit = std::min(Clock::now() + kGrace, until);
    for (;;) {
      found = Look();
      const bool none = found.threads.sure.empty() && found.fds.sure.empty() && found.processes.sure.empty();
      if (none || Clock::now() >= limit) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    Forget();
  }
  History& history = histories_[definition];
  const auto report = [&](Kind& kind, int* in_a_row, std::uint64_t& amount, const char* what,
                          const char* end) {
    if (in_a_row) *in_a_row = kind.doubtful.empty() ? 0 : *in_a_row + 1;
    if (in_a_row && *in_a_row >= kRunsInARow)
      kind.sure.insert(kind.sure.end(), kind.doubtful.begin(), kind.doubtful.end());
    amount = kind.sure.size();
    if (kind.sure.empty()) return;
    std::string text = "the case left " + Count(kind.sure.size(), what, end) + ": ";
    for (std::size_t i = 0; i < kind.sure.size() && i < kMostNames; ++i)
      text += (i > 0 ? ", " : "") + kind.sure[i];
    warnings.push_back(text + (kind.sure.size() > kMostNames ? ", ..." : ""));
  };
  report(found.threads, &history.threads, leaks.threads, "thread", "s");
  report(found.fds, &history.fds, leaks.fds, "open descriptor", "s");
  report(found.processes, nullptr, leaks.processes, "process", "es");
  ReportHostMemory(history, leaks, warnings);
}

// Memory that the allocator keeps for the next run is there after each run: growth is what a run has beyond
// the run before it, both of this case and of any.
void Leftovers::ReportHostMemory(History& history, protocol::Leaks& leaks,
                                 std::vector<std::string>& warnings) {
  const std::uint64_t now = HostBytes();
  const std::uint64_t before = std::max(host_bytes_, history.host_bytes);
  history.host = now > before + kGrowth ? history.host + 1 : 0;
  if (history.host >= kRunsInARow) {
    leaks.host_bytes += now - before;
    warnings.push_back("the host memory grew by " + Megabytes(now - before) + ", and by over " +
                       Megabytes(kGrowth) + " in each of the last " + std::to_string(kRunsInARow) +
                       " runs of the case");
  }
  history.host_bytes = host_bytes_ = now;
}

std::uint64_t Leftovers::HostBytes() const {
  static const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  char text[128] = "";
  if (pread(memory_.get(), text, sizeof(text) - 1, 0) <= 0) return 0;
  char* end = text;
  std::strtoull(end, &end, 10);  // the address space
  const std::uint64_t resident = std::strtoull(end, &end, 10), shared = std::strtoull(end, &end, 10);
  return (resident - std::min(shared, resident)) * page;
}

}  // namespace cppool::daemon
