#include "client/src/process_state.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <utility>

namespace cppool::client {
namespace {

constexpr std::size_t kMostThreads = 256;      // Reading more would take too long.
constexpr std::size_t kMostCharacters = 1500;  // The description goes into an error message.

std::string ReadFile(const std::string& path) {
  const base::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char buffer[1024];
  const ssize_t count = fd.get() < 0 ? 0 : read(fd.get(), buffer, sizeof buffer);
  return {buffer, static_cast<std::size_t>(std::max<ssize_t>(count, 0))};
}

// False: the thread has ended.
bool ReadThreadState(const std::string& folder, ThreadState* state) {
  const std::string stat = ReadFile(folder + "/stat");
  const auto begin = stat.find('('), end = stat.rfind(')');  // the name may contain parentheses
  if (begin == std::string::npos || end == std::string::npos || end < begin) return false;
  state->name = stat.substr(begin + 1, end - begin - 1);
  std::istringstream fields(stat.substr(end + 1));
  std::string field;
  fields >> state->state;
  for (int i = 4; i < 14; ++i) fields >> field;  // proc(5): utime is the 14th, stime the 15th
  double user = 0, system = 0;
  fields >> user >> system;
  state->cpu_seconds = (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
  state->waits_in = ReadFile(folder + "/wchan");
  if (state->waits_in == "0") state->waits_in.clear();
  return true;
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string StateText(const ThreadState& thread) {
  const std::string where = thread.waits_in.empty() ? "" : " in " + thread.waits_in;
  switch (thread.state) {
    case 'R':
      return "running";
    case 'S':
      return "waits" + where;
    case 'D':
      return "waits" + where + " and cannot be interrupted";
    case 'T':
      return "stopped";
    case 't':
      return "stopped by a debugger";
    case 'Z':
    case 'X':
      return "ended";
    default:
      return std::string("in state ") + thread.state;
  }
}

// CPU time since `before`; all of it for a thread that was not there.
double CpuSince(const ProcessState& before, const ThreadState& thread) {
  const auto known = std::ranges::find_if(
      before.threads, [&](const ThreadState& earlier) { return earlier.id == thread.id; });
  return known == before.threads.end() ? thread.cpu_seconds : thread.cpu_seconds - known->cpu_seconds;
}

}  // namespace

ProcessState ReadProcessState(pid_t pid) {
  ProcessState state;
  state.when = Clock::now();
  const std::string folder = "/proc/" + std::to_string(pid) + "/task";
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(opendir(folder.c_str()), &closedir);
  if (!threads) return state;
  while (const dirent* entry = readdir(threads.get())) {
    ThreadState thread;
    thread.id = std::atoi(entry->d_name);
    if (thread.id > 0 && ReadThreadState(folder + "/" + entry->d_name, &thread))
      state.threads.push_back(thread);
    if (state.threads.size() == kMostThreads) break;
  }
  return state;
}

std::string Describe(const ProcessState& before, const ProcessState& now) {
  if (now.threads.empty()) return "";
  const bool compared = !before.threads.empty();
  const bool stopped =
      std::ranges::all_of(now.threads, [](const ThreadState& t) { return t.state == 'T' || t.state == 't'; });
  double used = 0;
  // Threads with the same line are described once; those with the most CPU time come first.
  std::vector<std::pair<double, std::pair<std::string, int>>> lines;
  for (const ThreadState& thread : now.threads) {
    const double cpu = compared ? CpuSince(before, thread) : 0;
    used += cpu;
    std::string line = thread.name + ": " + StateText(thread);
    if (cpu > 0) line += ", " + Number(cpu) + " s of CPU";
    const auto same = std::ranges::find_if(lines, [&](const auto& l) { return l.second.first == line; });
    if (same != lines.end()) {
      ++same->second.second;
    } else {
      lines.emplace_back(cpu, std::pair(line, 1));
    }
  }
  std::ranges::stable_sort(lines, [](const auto& a, const auto& b) { return a.first > b.first; });

  std::string text = stopped ? "; it was stopped (by a signal or a debugger)" : "";
  if (compared) {
    text += "; in its last " + Number(std::chrono::duration<double>(now.when - before.when).count()) +
            " s it used " + Number(used) + " s of CPU";
  }
  text += "; its threads: ";
  std::size_t listed = 0;
  for (const auto& [cpu, line] : lines) {
    if (text.size() + line.first.size() > kMostCharacters) break;
    text += (listed++ ? "; " : "") + line.first;
    if (line.second > 1) text += " (" + std::to_string(line.second) + " threads)";
  }
  if (listed < lines.size()) text += "; and more";
  return text;
}

}  // namespace cppool::client
