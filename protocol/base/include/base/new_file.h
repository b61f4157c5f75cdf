// A file that appears whole or not at all: it is written under another name beside its own, and renamed. For
// files that a request or an option names, in the daemon and in the client.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "base/unique_fd.h"

namespace cppool::base {

// Why no file can be made, or replaced, at this path, and what to do. Empty: nothing that the file system
// tells in advance.
std::string WhyNotWritable(const std::string& path);

// Makes an empty file beside `path` that no other process uses, and opens it for writing: PATH.RANDOM.part,
// which becomes *part. None where it cannot be made, and errno says why.
UniqueFd MakePart(const std::string& path, mode_t mode, std::string* part);

class NewFile {
 public:
  // Throws FileError (file_cache.h), as the other functions do: its text begins with the path.
  explicit NewFile(const std::string& path);
  ~NewFile();  // removes what was not committed
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void Write(std::string_view text);
  void Commit();  // an earlier file of this name is replaced

 private:
  [[noreturn]] void Fail(int error) const;

  const std::string path_;
  std::string part_;
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::unique_ptr<std::FILE, Close> out_;
  bool committed_ = false;
};

}  // namespace cppool::base
