// What daemons write on stderr while cells run, cases' own output among it: kept for each cell, and written
// to a log.
#pragma once

#include <deque>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace cppool::command {

// Thread-safe: Add is called on the threads that read the daemons' stderr.
class CaseOutput {
 public:
  // `log`: a file that gets all lines as they come, with time and cell; empty: none. Throws UsageError when
  // it cannot be written.
  explicit CaseOutput(const std::string& log);

  // Takes a line of the daemon with this world size. Those of other world sizes than the cell's, which start
  // and end meanwhile, are for the log only.
  void Add(int world_size, std::string_view line);
  // Lines from here on are this cell's; empty: no cell's.
  void Begin(int world_size, const std::string& cell);
  void Note(const std::string& text);  // a line of the log, about the cell
  // From here on all lines of the log are written to this file, too, until the next call; empty: to none.
  void CopyTo(const std::string& file);
  // Returns the last 200 lines since Begin, the first of them saying how many came before.
  std::vector<std::string> Take();
  // Returns why the log is not complete: "cannot write run.log: No space left on device"; empty: it is, or
  // there is none.
  std::string Problem();

 private:
  void Write(const std::string& cell, std::string_view text);  // under mutex_

  std::mutex mutex_;
  struct Log {
    std::string path;
    std::ofstream file;
  };
  void Write(Log& log, std::string_view line);

  Log log_, copy_;
  std::string problem_;
  int world_size_ = 0;
  std::string cell_;
  std::deque<std::string> lines_;
  std::size_t dropped_ = 0;
};

}  // namespace cppool::command
