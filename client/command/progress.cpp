#include "client/command/progress.h"

#include <cstring>
#include <iomanip>
#include <sstream>

namespace cppool::command {
namespace {

constexpr char kClearLine[] = "\r\033[K";
// A long line is cut at the edge of the terminal: a wrapped one could not be cleared.
constexpr char kNoWrap[] = "\033[?7l";
constexpr char kWrap[] = "\033[?7h";

}  // namespace

void Progress::Show(int done, int failed, const std::string& doing) {
  if (!terminal_) return;
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start_).count();
  std::ostringstream line;
  line << "[" << done + 1 << "/" << total_ << "] " << seconds / 60 << ":" << std::setfill('0') << std::setw(2)
       << seconds % 60 << ", " << failed << " failed, " << doing;
  err_ << kClearLine << kNoWrap << line.str() << kWrap << std::flush;
}

void Progress::Clear() {
  if (terminal_) err_ << kClearLine << std::flush;
}

std::string DescribeInterruption(int signal, int done, std::size_t total, const std::string& steps) {
  return std::string("interrupted (") + strsignal(signal) + ") with " + std::to_string(done) + " of " +
         std::to_string(total) + " " + steps + " done";
}

}  // namespace cppool::command
