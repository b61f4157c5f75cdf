// Waits until a file is saved.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/file_cache.h"
#include "base/unique_fd.h"

namespace cppool::command {

// From its construction on it notices every save of its files: written in place, or replaced, or a folder or
// a symbolic link on the way to them is.
class FileWatch {
 public:
  FileWatch();  // throws std::system_error

  // A file that is watched already changes nothing; one that is not there is saved when it is made. Throws
  // std::system_error when the system allows no further watch.
  void Add(const std::vector<std::string>& files);

  // Returns the first file that was saved since the last call; of a file that was added since, the save may
  // have come before. Waits for one without a limit, and then until none was saved for a moment, since an
  // editor or a build may save several. Empty: `stop` (a descriptor; -1: none) has become readable; a file
  // that was saved is the next call's.
  std::string Wait(int stop = -1);

 private:
  void Follow(const std::string& file);    // watches the folders on the way to it
  bool WasSaved(const std::string& file);  // since the last look at it
  std::string ReadSaved();                 // one of the files; empty: others of their folders
  std::set<std::string> OnTheWay(int folder, const std::string& name, bool made) const;

  base::UniqueFd events_;
  std::map<int, std::string> folders_;  // by inotify's number
  std::map<std::pair<int, std::string>, std::set<std::string>>
      on_way_;  // by folder and name: files that it leads to
  std::map<std::string, std::optional<base::FileIdentity>>
      files_;            // as they were named: what they were at the last look
  std::int64_t looked_;  // nanoseconds since 1970: when Wait() returned last
  std::string missed_;   // saved between that and when it was added
};

}  // namespace cppool::command
