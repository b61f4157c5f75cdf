// The libraries that requests name. Each content that a file has had is copied into a cache under a name with
// its digest, tried in a process of its own (library_probe.h), loaded, and never closed. A file that was
// rebuilt is a new library. cuDNN's module, which comes with cppool, is loaded as it is.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "base/file_cache.h"
#include "daemon/library.h"
#include "daemon/library_probe.h"

namespace cppool::daemon {

struct LoadedLibrary {
  std::string path;    // as the request that loaded it named it
  std::string digest;  // base/digest.h
  std::string copy;    // the file that was loaded; empty: `path`
  void* handle = nullptr;
  bool has_cases = false;                         // its table of cases is good
  std::optional<kernels::KernelLibrary> kernels;  // its table of kernels, which is good
};

// For one thread, but for the functions that name another rule.
class LibraryStore {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    std::size_t most = 64;                       // libraries that are loaded
    std::chrono::milliseconds try_limit{10000};  // for the process that tries a library
    std::string program = "/proc/self/exe";      // a cppoold
  };
  explicit LibraryStore(Options options) : options_(std::move(options)) {}

  // The library with the content that the file has now or, where `wanted` is not empty, with this digest: of
  // a copy, when the file has another content by now. Loads it when no request before has named this content.
  // The ranks must be idle. Throws LibraryError, also when the library was not tried successfully by `until`,
  // and RuntimeError when no copy can be made.
  // The reference is valid as long as the store.
  const LoadedLibrary& Load(const std::string& path, LibraryKind kind, Clock::time_point until,
                            const std::string& wanted = "");

  // For a file that is on another machine: whether its content with this digest is loaded or has a copy here;
  // and the same from now on. Throws likewise.
  bool Has(const std::string& path, const std::string& digest);
  void Keep(const std::string& path, std::string bytes);

  // cuDNN's module with its kernels. Throws LibraryError, also when its file has changed since it was loaded.
  const LoadedLibrary& LoadCudnn();

  std::size_t size() const { return loaded_.size(); }  // without cuDNN's
  bool full() const { return size() >= options_.most; }
  std::size_t opened() const { return opened_; }  // with cuDNN's, and with those that could not be used

  // Any thread. The path of the library of which `copy` is the copy; of the one that is being opened. Empty:
  // none.
  std::string Named(const std::string& copy) const;
  std::string BeingOpened() const;

 private:
  using Content = base::FileDigests::Content;
  // While it lives, BeingOpened() is this library.
  class Opening {
   public:
    Opening(LibraryStore& store, const std::string& path, const std::string& copy);
    ~Opening();
    Opening(const Opening&) = delete;
    Opening& operator=(const Opening&) = delete;

   private:
    LibraryStore& store_;
  };
  const base::FileCache& Cache();  // throws FileError
  // Nothing when there is none, or it is damaged.
  std::optional<Content> ReadCopy(const std::string& path, const std::string& digest);
  std::string MakeCopy(const std::string& path, const Content& content);

  const Options options_;
  std::optional<base::FileCache> cache_;  // made with the first copy
  base::FileDigests digests_{LibraryDigest};
  std::map<std::string, LoadedLibrary> loaded_;  // by digest
  std::optional<LoadedLibrary> cudnn_;
  std::size_t opened_ = 0;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> named_;  // under mutex_: paths by copy
  std::string opening_;                       // under mutex_
};

}  // namespace cppool::daemon
