#include "daemon/library_store.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "base/digest.h"
#include "daemon/library.h"
#include "protocol/kernel_choice.h"

namespace cppool::daemon {
namespace {

constexpr base::FileCache::Limits kCopies{256, std::uint64_t{2} << 30};

std::string CopyName(const std::string& path, const std::string& digest) {  // stacks show it
  return base::FileCache::Name(path, digest, ".so");
}

}  // namespace

const base::FileCache& LibraryStore::Cache() {
  if (!cache_) cache_.emplace("libraries", kCopies);
  return *cache_;
}

std::optional<LibraryStore::Content> LibraryStore::ReadCopy(const std::string& path,
                                                            const std::string& digest) {
  try {
    std::optional<std::string> bytes = Cache().Read(CopyName(path, digest));
    if (bytes && base::Digest(*bytes) == digest) return Content{std::move(*bytes), digest};
  } catch (const base::FileError&) {  // the file itself may have the content
  }
  return std::nullopt;
}

std::string LibraryStore::MakeCopy(const std::string& path, const Content& content) {
  const std::string name = CopyName(path, content.digest);
  try {
    const base::FileCache& cache = Cache();
    // A copy that is there may have been damaged since.
    if (cache.Read(name) == content.bytes) return cache.Path(name);
    cache.Write(name, content.bytes);
    cache.Prune();
    return cache.Path(name);
  } catch (const base::FileError& error) {
    // The request is right, and so is the library.
    throw kernels::RuntimeError(CPPOOL_INTERNAL, path + ": no copy of it could be made: " + error.what());
  }
}

LibraryStore::Opening::Opening(LibraryStore& store, const std::string& path, const std::string& copy)
    : store_(store) {
  ++store_.opened_;
  const std::lock_guard lock(store_.mutex_);
  store_.named_[copy] = path;
  store_.opening_ = path;
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
  const auto ready = [&](const std::string& digest) -> const LoadedLibrary* {
    const auto found = loaded_.find(digest);
    if (found == loaded_.end()) return nullptr;
    const LoadedLibrary& library = found->second;
    return (kind == LibraryKind::kCases ? library.has_cases : library.kernels.has_value()) ? &library
                                                                                           : nullptr;
  };
  if (const LoadedLibrary* library = ready(wanted)) return *library;
  const bool any = wanted.empty();
  Content content;
  try {
    if (const LoadedLibrary* library = any ? ready(digests_.Known(path)) : nullptr) return *library;
    // Another daemon, or the one before this, may have made it, and the file was built again since.
    const auto copy = any ? std::nullopt : ReadCopy(path, wanted);
    content = copy ? *copy : digests_.Read(path);
  } catch (const base::FileError& error) {
    std::string text = error.what();
    std::error_code ignored;
    if (kind == LibraryKind::kKernels &&
        !std::filesystem::exists(path, ignored))  // it may be a misspelt name
      text += std::string(" (kernels are ") + protocol::kKernelWordsAllowed + ")";
    throw LibraryError(text);
  }
  const std::string& digest = content.digest;
  if (!any && digest != wanted)
    throw LibraryError(path + ": its content now has the digest " + digest + ", not " + wanted +
                       " as the request wants it, and there is no copy of that: leave \"digests\" out, or "
                       "start the run again");
  if (const LoadedLibrary* library = ready(digest)) return *library;
  const auto there = loaded_.find(digest);
  if (there == loaded_.end() && full())
    throw LibraryError(path + ": this daemon has loaded " + std::to_string(size()) +
                       " libraries, which it cannot unload, and loads no more: use another daemon");
  const std::string copy = MakeCopy(path, content);
  ProbeLibrary(options_.program, kind, copy, path, options_.try_limit, until);
  const Opening opening(*this, path, copy);
  void* const handle = there == loaded_.end() ? OpenLibrary(copy, path) : there->second.handle;
  auto kernels = CheckTable(kind, handle, path);
  LoadedLibrary& library =
      loaded_.try_emplace(digest, LoadedLibrary{path, digest, copy, handle, false, {}}).first->second;
  if (kind == LibraryKind::kCases)
    library.has_cases = true;
  else
    library.kernels = std::move(kernels);
  return library;
}

bool LibraryStore::Has(const std::string& path, const std::string& digest) {
  return loaded_.count(digest) > 0 || ReadCopy(path, digest).has_value();
}

void LibraryStore::Keep(const std::string& path, std::string bytes) {
  CheckElf(path, bytes);
  std::string digest = base::Digest(bytes);
  MakeCopy(path, {std::move(bytes), std::move(digest)});
}

const LoadedLibrary& LibraryStore::LoadCudnn() try {
  const std::string path = kernels::CudnnModule();
  std::string digest = digests_.Of(path);
  if (cudnn_ && (cudnn_->path != path || cudnn_->digest != digest))
    throw LibraryError(
        "kernels of " + path +
        ": it has changed since it was opened: start the daemon again, or give it another name");
  if (cudnn_) return *cudnn_;
  const Opening opening(*this, path, path);
  void* const handle = OpenLibrary(path, path);
  return cudnn_.emplace(
      LoadedLibrary{path, digest, "", handle, false, CheckTable(LibraryKind::kKernels, handle, path)});
} catch (const base::FileError& error) {
  throw LibraryError(error.what());
}

}  // namespace cppool::daemon
