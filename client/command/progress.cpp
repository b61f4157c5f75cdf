#include "client/command/progress.h"

#include <cmath>
#include <cstring>
#include <iomanip>
#include <sstream>

namespace cppool::command {
namespace {

constexpr char kClearLine[] = "\r\033[K";
// A long line is cut at the edge of the terminal: a wrapped one could not be cleared.
constexpr char kNoWrap[] = "\033[?7l";
constexpr char kWrap[] = "\033[?7h";

std::string Clock(double seconds) {
  const auto whole = std::llround(seconds);
  std::ostringstream text;
  text << whole / 60 << ":" << std::setfill('0') << std::setw(2) << whole % 60;
  return text.str();
}

}  // namespace

void Progress::Show(int done, int failed, const std::string& doing, double share) {
  if (!terminal_) return;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  const double steps = done + share;
  std::ostringstream line;
  line << "[" << done + 1 << "/" << total_ << "] " << Clock(std::floor(seconds)) << ", ";
  if (steps > 0) line << Clock(seconds * (static_cast<double>(total_) - steps) / steps) << " left, ";
  line << failed << " failed, " << doing;
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
