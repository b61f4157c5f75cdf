// Log lines on stderr, tagged with the rank and the request that the calling thread works for: "[rank 1]
// [request 7] ...".
#pragma once

#include <string>

namespace cppool::daemon {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// The least level that is written. `level`: trace, debug, info, warn, error, critical, off; false for another
// word.
bool SetUpLog(const std::string& level);

bool Logs(LogLevel level);  // whether lines of this level are written
void Log(LogLevel level, const std::string& line);

// "12.35" for (12.345678, 2).
std::string Rounded(double value, int decimals);

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
