#include "kernels/runtime/host/memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

namespace cppool::kernels::host {
namespace {

constexpr std::size_t kGuardBytes = kAlignment;  // before the memory; after it at least a quarter of this
constexpr unsigned char kGuardByte = 0xA5;       // neither 0 nor kPoison

std::size_t GuardAfter(std::size_t bytes) {
  const std::size_t end = bytes + kGuardBytes / 4;
  return (end + kAlignment - 1) / kAlignment * kAlignment - bytes;
}

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// A file that holds one number; "max", a missing file and the huge number of an unlimited v1 group are
// kUnlimited.
std::size_t NumberIn(const std::string& path) {
  std::ifstream file(path);
  unsigned long long value = 0;
  if (!(file >> value) || value >= (1ull << 62)) return kUnlimited;
  return static_cast<std::size_t>(value);
}

std::size_t MeminfoBytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size(), key) == 0 && line[key.size()] == ':') {
      return static_cast<std::size_t>(std::strtoull(line.c_str() + key.size() + 1, nullptr, 10)) * 1024;
    }
  }
  return kUnlimited;
}

// Returns the page cache of a group, which the kernel reclaims before the group runs out.
std::size_t ReclaimableIn(const std::string& folder) {
  std::ifstream file(folder + "/memory.stat");
  std::string key;
  unsigned long long value = 0;
  while (file >> key >> value) {
    if (key == "inactive_file" || key == "total_inactive_file") return static_cast<std::size_t>(value);
  }
  return 0;
}

struct Limits {
  std::size_t total = kUnlimited;
  std::size_t available = kUnlimited;
};

// Finds the smallest limit from the process's group up to the root, for cgroup v2 and v1.
Limits GroupLimits() {
  Limits limits;
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && controllers.find("memory") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    std::string group = line.substr(second + 1);
    for (;;) {
      const std::string folder = root + (group == "/" ? "" : group);
      const std::size_t limit = NumberIn(folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
      const std::size_t used = NumberIn(folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
      if (limit != kUnlimited && used != kUnlimited) {
        const std::size_t kept = used - std::min(used, ReclaimableIn(folder));
        limits.total = std::min(limits.total, limit);
        limits.available = std::min(limits.available, limit - std::min(limit, kept));
      }
      if (group.empty() || group == "/") break;
      group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
  }
  return limits;
}

}  // namespace

std::size_t TotalMemory() {
  const auto pages = static_cast<std::size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES)));
  const auto page = static_cast<std::size_t>(std::max(0L, sysconf(_SC_PAGESIZE)));
  return std::min(pages * page, GroupLimits().total);
}

std::size_t AvailableMemory() {
  std::size_t machine = MeminfoBytes("MemAvailable");
  if (machine == kUnlimited) {
    machine = static_cast<std::size_t>(std::max(0L, sysconf(_SC_AVPHYS_PAGES))) *
              static_cast<std::size_t>(std::max(0L, sysconf(_SC_PAGESIZE)));
  }
  return std::min(machine, GroupLimits().available);
}

void* AllocateGuarded(std::size_t bytes) {
  const std::size_t all = kGuardBytes + bytes + GuardAfter(bytes);
  auto* const begin = static_cast<unsigned char*>(std::aligned_alloc(kAlignment, all));
  if (!begin) return nullptr;
  std::memset(begin, kGuardByte, kGuardBytes);
  std::memset(begin + kGuardBytes + bytes, kGuardByte, GuardAfter(bytes));
  return begin + kGuardBytes;
}

void FreeGuarded(void* ptr) {
  if (ptr) std::free(static_cast<unsigned char*>(ptr) - kGuardBytes);
}

std::string DamageAround(const void* ptr, std::size_t bytes) {
  const auto* const begin = static_cast<const unsigned char*>(ptr);
  const auto size = static_cast<std::ptrdiff_t>(bytes);
  const auto damage = [begin](std::ptrdiff_t from, std::ptrdiff_t to) -> std::string {
    while (from < to && begin[from] == kGuardByte) ++from;
    while (from < to && begin[to - 1] == kGuardByte) --to;
    return from == to ? "" : "bytes " + std::to_string(from) + " to " + std::to_string(to - 1);
  };
  const std::string before = damage(-static_cast<std::ptrdiff_t>(kGuardBytes), 0);
  return before.empty() ? damage(size, size + static_cast<std::ptrdiff_t>(GuardAfter(bytes))) : before;
}

// Leaves some memory for the rest of the machine: without free pages the system kills processes.
std::int64_t MemoryGate::Usable() const {
  const std::size_t available = available_();
  return static_cast<std::int64_t>(available - available / 16);
}

bool MemoryGate::Reserve(std::size_t bytes) {
  // Sizes that could overflow a signed sum are refused here.
  if (bytes >= (std::size_t{1} << 48)) return false;
  const auto wanted = static_cast<std::int64_t>(bytes);
  for (std::int64_t left = unmeasured_.load(std::memory_order_relaxed); left >= wanted;) {
    if (!unmeasured_.compare_exchange_weak(left, left - wanted, std::memory_order_relaxed)) continue;
    untouched_.fetch_add(wanted, std::memory_order_relaxed);
    return true;
  }
  // Read before the system is asked: memory that is touched meanwhile then counts twice, and not zero times.
  // A refusal for that reason is asked again. A refused request must not count for the other ranks, whose
  // small requests fit.
  std::int64_t untouched = untouched_.load(std::memory_order_relaxed), usable = 0;
  for (;;) {
    usable = Usable();
    if (untouched <= usable - wanted) {
      if (untouched_.compare_exchange_weak(untouched, untouched + wanted, std::memory_order_relaxed)) break;
    } else {
      const std::int64_t before = std::exchange(untouched, untouched_.load(std::memory_order_relaxed));
      if (untouched >= before) return false;
    }
  }
  unmeasured_.store(std::clamp<std::int64_t>((usable - untouched - wanted) / 64, 0, 64 << 20),
                    std::memory_order_relaxed);
  return true;
}

std::size_t MemoryGate::Free() const {
  const std::int64_t untouched = untouched_.load(std::memory_order_relaxed);  // first, as in Reserve
  return static_cast<std::size_t>(std::max<std::int64_t>(0, Usable() - untouched));
}

}  // namespace cppool::kernels::host
