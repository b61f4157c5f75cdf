#include "client/command/case_output.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "client/command/command.h"
#include "client/suite/value_text.h"

namespace cppool::command {
namespace {

constexpr std::size_t kLines = 200;

std::string TimeOfDay() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm local{};
  localtime_r(&seconds, &local);
  char text[32];
  std::snprintf(text, sizeof text, "%02d:%02d:%02d.%03d", local.tm_hour, local.tm_min, local.tm_sec,
                static_cast<int>(ms));
  return text;
}

}  // namespace

CaseOutput::CaseOutput(const std::string& log) {
  if (log.empty()) return;
  errno = 0;
  log_ = {log, std::ofstream(log)};
  if (!log_.file) throw suite::UsageError(CannotWrite(log));
}

void CaseOutput::CopyTo(const std::string& file) {
  const std::lock_guard lock(mutex_);
  errno = 0;
  copy_ = {file, file.empty() ? std::ofstream() : std::ofstream(file)};
  if (!copy_.file) problem_ = CannotWrite(file);
}

void CaseOutput::Write(const std::string& cell, std::string_view text) {
  std::string line = "[" + TimeOfDay() + "] ";
  if (!cell.empty()) line += "[" + cell + "] ";
  line.append(text).append("\n");
  Write(log_, line);
  Write(copy_, line);
}

void CaseOutput::Write(Log& log, std::string_view line) {
  if (!log.file.is_open() || !log.file) return;
  errno = 0;
  log.file << line << std::flush;  // it is read while the run goes on, and after a crash
  if (!log.file) problem_ = CannotWrite(log.path);
}

void CaseOutput::Add(int world_size, std::string_view line) {
  const std::lock_guard lock(mutex_);
  if (world_size != world_size_) return Write("", line);
  Write(cell_, line);
  lines_.emplace_back(line);
  if (lines_.size() <= kLines) return;
  lines_.pop_front();
  ++dropped_;
}

void CaseOutput::Begin(int world_size, const std::string& cell) {
  const std::lock_guard lock(mutex_);
  world_size_ = world_size;
  cell_ = cell;
  lines_.clear();
  dropped_ = 0;
}

void CaseOutput::Note(const std::string& text) {
  const std::lock_guard lock(mutex_);
  Write(cell_, text);
}

std::vector<std::string> CaseOutput::Take() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> lines;
  if (dropped_ > 0) lines.push_back("(" + std::to_string(dropped_) + " lines before these)");
  lines.insert(lines.end(), lines_.begin(), lines_.end());
  lines_.clear();
  dropped_ = 0;
  return lines;
}

std::string CaseOutput::Problem() {
  const std::lock_guard lock(mutex_);
  return problem_;
}

}  // namespace cppool::command
