// Files named by their content that several processes share: the daemon's copies of libraries, and the
// libraries that the client has compiled. The daemon and the client use it, and neither may link the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace cppool::base {

// Its text names the file, says what is wrong with it and what to do.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Which content a path leads to, as far as the file system says it.
struct FileIdentity {
  std::uint64_t device = 0, inode = 0, bytes = 0;
  std::int64_t modified_ns = 0, changed_ns = 0;
  bool operator==(const FileIdentity&) const = default;
};
FileIdentity IdentityOf(const std::string& path);                      // throws FileError
std::optional<FileIdentity> IdentityIfThere(const std::string& path);  // nothing: it cannot be looked at
// Now, by the clock that stamps files: what is changed from here on has this `changed_ns`, or a later one.
std::int64_t FileClock();

struct WholeFile {
  std::string bytes;
  FileIdentity identity;
  // False: it was changed so shortly before that a further change could leave the identity as it is.
  bool settled = false;
};
// Throws FileError for what is no regular file, cannot be read, has more than 2 GiB, or changes while it is
// read.
WholeFile ReadWhole(const std::string& path);

// Digests of files, each of which is read once as long as it stays as it is.
class FileDigests {
 public:
  struct Content {
    std::string bytes, digest;
  };
  // What the function throws for a file is thrown by Read and Of.
  using Digest = std::function<std::string(const std::string& path, std::string_view bytes)>;
  explicit FileDigests(Digest digest) : digest_(std::move(digest)) {}

  // Thread-safe, all of these. They throw FileError.
  std::string Known(const std::string& path) const;  // without reading it; empty: it would have to be read
  Content Read(const std::string& path);
  std::string Of(const std::string& path);

 private:
  const Digest digest_;
  mutable std::mutex mutex_;
  std::map<std::string, std::pair<FileIdentity, std::string>> known_;  // what it had when it was read last
};

// $CPPOOL_CACHE when it is set; else the first of $XDG_CACHE_HOME/cppool, ~/.cache/cppool and cppool-UID in
// the system's folder for temporary files that can be written. It is made, for its user alone, where it is
// missing. Throws FileError, also when another user could change the folder that CPPOOL_CACHE names; from the
// others, that permission is taken away. A symbolic link in a folder that all users can write is not
// followed.
std::string CacheFolder();

class FileCache {
 public:
  struct Limits {
    std::size_t files;
    std::uint64_t bytes;
  };
  // `name`: a folder below CacheFolder(), which is made, for its user alone. Throws FileError.
  FileCache(const std::string& name, Limits limits);

  const std::string& folder() const { return folder_; }
  std::string Path(const std::string& file) const { return folder_ + "/" + file; }

  // "mine-0123456789abcdef.so" of "/x/mine.cu", a digest and ".so": a file's name in a cache, in plain
  // characters. `ending`: a dot and letters.
  static std::string Name(const std::string& path, const std::string& digest, std::string_view ending);

  // Marks the file as used. False: it is not there, or another user could change it.
  bool Use(const std::string& file) const;
  // Marks the file as used and returns its bytes; nothing: it is not there. Another process may use or
  // replace it meanwhile: a file's content never changes. Throws FileError.
  std::optional<std::string> Read(const std::string& file) const;
  // Writes the file, so that other processes see all of it or nothing. A folder that was removed is made
  // again. Throws FileError.
  void Write(const std::string& file, std::string_view bytes) const;
  // Removes files until the limits hold, those that have not been used for longest first, and none that was
  // used in the last ten minutes. Only files with names of Name() are counted and removed: the folder may be
  // a user's. What cannot be removed stays.
  void Prune() const;

 private:
  void MakeFolder() const;

  std::string folder_;
  Limits limits_;
};

}  // namespace cppool::base
