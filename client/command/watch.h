// Waits until a file is saved.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "protocol/unique_fd.h"

namespace cppool::command {

// From its construction on it notices every save of its files: written in place, or replaced by another file, as most editors do.
class FileWatch {
 public:
  FileWatch();  // throws std::system_error

  // A file that is watched already, and one whose folder is not there, changes nothing. Throws std::system_error when the system
  // allows no further watch.
  void Add(const std::vector<std::string>& files);

  // The first file that was saved since the last call, or since it was added. Waits for one without a limit, and then until nothing
  // was saved for a moment, since an editor or a build may save several.
  std::string Wait();

 private:
  std::string ReadSaved();  // one of the files; empty: others of their folders

  protocol::UniqueFd events_;
  std::map<int, std::string> folders_;        // by inotify's number
  std::map<std::string, std::string> files_;  // by absolute path: as they were named
};

}  // namespace cppool::command
