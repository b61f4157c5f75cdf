#include "daemon/library_store.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/digest.h"
#include "daemon/library.h"
#include "protocol/kernel_words.h"

namespace cppool::daemon {
namespace {

constexpr base::FileCache::Limits kCopies{256, std::uint64_t{2} << 30};

std::string CopyName(const std::string& path, const std::string& digest) {  // stacks show it
  return base::FileCache::Name(path, digest, ".so");
}

}  // namespace

const std::string* LibraryStore::KnownDigest(const std::string& path) const {
  const auto known = known_.find(path);
  if (known == known_.end() || !(known->second.identity == base::IdentityOf(path))) return nullptr;
  return &known->second.digest;
}

const base::FileCache& LibraryStore::Cache() {
  if (!cache_) cache_.emplace("libraries", kCopies);
  return *cache_;
}

std::optional<std::string> LibraryStore::ReadCopy(const std::string& path, const std::string& digest) {
  try {
    std::optional<std::string> bytes = Cache().Read(CopyName(path, digest));
    if (bytes && base::Digest(*bytes) == digest) return bytes;
  } catch (const base::FileError&) {  // the file itself may have the content
  }
  return std::nullopt;
}

std::string LibraryStore::MakeCopy(const std::string& path, const std::string& digest,
                                   const std::string& bytes) {
  const std::string name = CopyName(path, digest);
  try {
    const base::FileCache& cache = Cache();
    // A copy that is there may have been damaged since.
    if (cache.Read(name) == bytes) return cache.Path(name);
    cache.Write(name, bytes);
    cache.Prune();
    return cache.Path(name);
  } catch (const base::FileError& error) {
    throw LibraryError(path + ": no copy of it could be made: " + error.what());
  }
}

LibraryStore::Opening::Opening(LibraryStore& store, const LoadedLibrary& library) : store_(store) {
  const std::lock_guard lock(store_.mutex_);
  store_.named_[library.copy] = library.path;
  store_.opening_ = library.path;
}

LibraryStore::Opening::~Opening() {
  const std::lock_guard lock(store_.mutex_);
  store_.opening_.clear();
}

std::string LibraryStore::BeingOpened() const {
  const std::lock_guard lock(mutex_);
  return opening_;
}

std::string LibraryStore::Named(const std::string& copy) const {
  const std::lock_guard lock(mutex_);
  const auto found = named_.find(copy);
  return found == named_.end() ? "" : found->second;
}

const LoadedLibrary& LibraryStore::Load(const std::string& path, LibraryKind kind, Clock::time_point until,
                                        const std::string& wanted) {
  const auto is_ready = [&](const std::string& digest) {
    return loaded_.count(digest) != 0 && tried_.count({digest, kind}) != 0;
  };
  if (is_ready(wanted)) return loaded_.at(wanted);
  const bool any = wanted.empty();
  base::WholeFile file;
  try {
    if (const std::string* digest = any ? KnownDigest(path) : nullptr; digest && is_ready(*digest))
      return loaded_.at(*digest);
    // Of another daemon, or of the one before this, when the file was built again since.
    const auto copy = any ? std::nullopt : ReadCopy(path, wanted);
    file = copy ? base::WholeFile{*copy, {}} : base::ReadWhole(path);
  } catch (const base::FileError& error) {
    std::string text = error.what();
    std::error_code ignored;
    if (kind == LibraryKind::kKernels &&
        !std::filesystem::exists(path, ignored))  // it may be a misspelt name
      text += std::string(" (kernels are ") + protocol::kKernelWordsAllowed + ")";
    throw LibraryError(text);
  }
  CheckElf(path, file.bytes);
  const std::string digest = base::Digest(file.bytes);
  known_.erase(path);
  if (file.settled) known_[path] = {file.identity, digest};
  if (!any && digest != wanted)
    throw LibraryError(path + ": its content now has the digest " + digest + ", not " + wanted +
                       " as the request wants it, and there is no copy of that: leave \"digests\" out, or "
                       "start the run again");
  if (is_ready(digest)) return loaded_.at(digest);
  const auto there = loaded_.find(digest);
  if (there == loaded_.end() && full())
    throw LibraryError(path + ": this daemon has loaded " + std::to_string(size()) +
                       " libraries, which it cannot unload, and loads no more: use another daemon");
  LoadedLibrary library{path, digest, MakeCopy(path, digest, file.bytes), nullptr};
  ProbeLibrary(options_.program, kind, library.copy, path,
               std::min(until, Clock::now() + options_.try_limit));
  const Opening opening(*this, library);
  library.handle = there == loaded_.end() ? OpenLibrary(library.copy, path) : there->second.handle;
  CheckTable(kind, library.handle, library.copy, path);
  tried_.insert({digest, kind});
  return loaded_.emplace(digest, std::move(library)).first->second;
}

}  // namespace cppool::daemon
