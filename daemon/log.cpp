#include "daemon/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <memory>
#include <utility>

namespace cppool::daemon {
namespace {

thread_local std::string tags;

class TagsFormatter : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg&, const std::tm&, spdlog::memory_buf_t& to) override {
    to.append(tags.data(), tags.data() + tags.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<TagsFormatter>(); }
};

spdlog::level::level_enum LevelOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::critical;
}

}  // namespace

bool SetUpLog(const std::string& level) {
  const auto parsed = spdlog::level::from_str(level);
  if (parsed == spdlog::level::off && level != "off") return false;
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<TagsFormatter>('*').set_pattern("[%H:%M:%S.%e] [cppoold %P] [%l] %*%v");
  auto logger =
      std::make_shared<spdlog::logger>("cppoold", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_formatter(std::move(formatter));
  logger->set_level(parsed);
  spdlog::set_default_logger(std::move(logger));
  return true;
}

bool Logs(LogLevel level) { return spdlog::should_log(LevelOf(level)); }

void Log(LogLevel level, const std::string& line) {
  spdlog::default_logger_raw()->log(LevelOf(level), spdlog::string_view_t(line));
}

std::string Rounded(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

LogTags::LogTags(int rank, const std::string& request) : before_(tags) {
  tags.clear();
  if (rank >= 0) tags += "[rank " + std::to_string(rank) + "] ";
  if (!request.empty()) tags += "[request " + request + "] ";
}

LogTags::~LogTags() { tags = std::move(before_); }

}  // namespace cppool::daemon
