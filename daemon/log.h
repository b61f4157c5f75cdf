// Log lines on stderr, tagged with the rank and the request that the calling thread works for: "[rank 1] [request 7] ...".
#pragma once

#include <spdlog/spdlog.h>

#include <string>

namespace cppool::daemon {

// Makes spdlog's default logger write to stderr. `level`: trace, debug, info, warn, error, critical, off; false for another word.
bool SetUpLog(const std::string& level);

// While it lives, the calling thread's lines carry these tags.
class LogTags {
 public:
  LogTags(int rank, const std::string& request);  // rank -1, an empty request: no tag
  ~LogTags();
  LogTags(const LogTags&) = delete;
  LogTags& operator=(const LogTags&) = delete;

 private:
  std::string before_;
};

}  // namespace cppool::daemon
