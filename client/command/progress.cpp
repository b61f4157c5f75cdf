#include "client/command/progress.h"

#include <signal.h>

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <sstream>
#include <system_error>

namespace cppool::command {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kClearLine[] = "\r\033[K";
// A long line is cut at the edge of the terminal: a wrapped one could not be cleared.
constexpr char kNoWrap[] = "\033[?7l";
constexpr char kWrap[] = "\033[?7h";

std::string Minutes(Clock::duration time) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time).count();
  std::ostringstream text;
  text << seconds / 60 << ":" << std::setfill('0') << std::setw(2) << seconds % 60;
  return text.str();
}

// Steps in this time: "3.2/s", or "17.1/min" where there is less than one in a second.
std::string Rate(double steps, Clock::duration time) {
  const double per_second = steps / std::max(std::chrono::duration<double>(time).count(), 1e-3);
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << (per_second < 1 ? per_second * 60 : per_second)
       << (per_second < 1 ? "/min" : "/s");
  return text.str();
}

}  // namespace

Progress::Progress(std::ostream& err, bool terminal, std::size_t total, std::chrono::milliseconds heartbeat)
    : err_(err),
      terminal_(terminal),
      total_(total),
      interval_(terminal ? std::chrono::milliseconds(1000) : heartbeat),
      next_(start_ + interval_) {
  if (interval_ <= std::chrono::milliseconds(0)) return;
  // Signals are for the other threads: see Interruption.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { Beat(); });
  } catch (const std::system_error&) {  // without a thread it shows less
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Progress::~Progress() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Progress::Show(int done, int failed, const std::string& doing, double share) {
  const std::lock_guard lock(mutex_);
  shown_ = true;
  if (done < done_) start_ = Clock::now();
  done_ = done;
  failed_ = failed;
  share_ = share;
  doing_ = doing;
  if (terminal_) Write();
}

void Progress::Clear() {
  const std::lock_guard lock(mutex_);
  if (terminal_ && shown_) err_ << kClearLine << std::flush;
  shown_ = false;
}

std::string Progress::Line() const {
  const Clock::duration spent = Clock::now() - start_;
  const double steps = done_ + share_;
  std::ostringstream line;
  line << "[" << done_ + 1 << "/" << total_ << "] " << Minutes(spent) << ", ";
  if (steps > 0) {
    const double left = (static_cast<double>(total_) - steps) / steps;
    line << Rate(steps, spent) << ", " << Minutes(std::chrono::duration_cast<Clock::duration>(spent * left))
         << " left, ";
  }
  line << failed_ << " failed, " << doing_;
  return line.str();
}

void Progress::Write() {
  if (terminal_)
    err_ << kClearLine << kNoWrap << Line() << kWrap << std::flush;
  else
    err_ << "cppool: " << Line() << "\n" << std::flush;
}

void Progress::Beat() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_until(lock, next_, [this] { return over_; })) {
    if (shown_) Write();
    next_ = Clock::now() + interval_;
  }
}

std::string DescribeInterruption(int signal, int done, std::size_t total, const std::string& steps) {
  return std::string("interrupted (") + strsignal(signal) + ") with " + std::to_string(done) + " of " +
         std::to_string(total) + " " + steps + " done";
}

}  // namespace cppool::command
