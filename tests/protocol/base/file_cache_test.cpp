#include "base/file_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "base/new_file.h"
#include "tests/catch.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

namespace fs = std::filesystem;
using base::FileCache;
using Catch::Matchers::ContainsSubstring;

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string Refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const base::FileError& error) {
    return error.what();
  }
  return "";
}

constexpr const char* kDigest = "0123456789abcdef";

// Unused for an hour.
void Age(const fs::path& path, int hours = 1) {
  fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(hours));
}

std::size_t CountFiles(const std::string& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// As another user, for whom permissions hold.
class Nobody {
 public:
  Nobody() : before_(geteuid()) { changed_ = before_ == 0 && seteuid(65534) == 0; }
  ~Nobody() {
    if (changed_ && seteuid(before_) != 0) std::abort();
  }

 private:
  uid_t before_;
  bool changed_ = false;
};

}  // namespace

TEST_CASE(
    "a new file replaces a link, and nothing is written through it or through one at its temporary name") {
  const TemporaryFolder folder;
  const std::string file = folder.File("file"), other = folder.File("other");
  Write(other, "kept");
  fs::create_symlink(other, file);
  fs::create_symlink(other, file + "." + std::to_string(getpid()) + ".part");
  base::NewFile made(file);
  made.Write("new");
  made.Commit();
  CHECK(ReadFile(file) == "new");
  CHECK_FALSE(fs::is_symlink(file));
  CHECK(ReadFile(other) == "kept");
}

TEST_CASE("a file is read whole, and what cannot be read is named with what to do") {
  const TemporaryFolder folder;
  const std::string file = folder.File("file");
  const std::string text(100000, 'x');
  Write(file, text);
  const auto whole = base::ReadWhole(file);
  CHECK(whole.bytes == text);
  CHECK(whole.identity == base::IdentityOf(file));
  CHECK_FALSE(whole.settled);  // written just now
  CHECK(Refusal([&] { base::ReadWhole(folder.File("none")); }) ==
        folder.File("none") + ": there is no such file: check the path");
  CHECK(Has(Refusal([&] { base::ReadWhole(folder.path().string()); }), "is a folder"));
  CHECK(Has(Refusal([&] { base::ReadWhole(file + "/below"); }), "no such file"));
  REQUIRE(mkfifo(folder.File("pipe").c_str(), 0600) == 0);
  CHECK(Has(Refusal([&] { base::ReadWhole(folder.File("pipe")); }), "no regular file"));
  fs::permissions(folder.path(), fs::perms::all);
  fs::permissions(file, fs::perms::none);
  {
    const Nobody nobody;
    CHECK(Has(Refusal([&] { base::ReadWhole(file); }), file + ": may not be read: check the permissions"));
  }
  Write(folder.File("changed"), "a");
  const auto before = base::IdentityOf(folder.File("changed"));
  Write(folder.File("changed"), "ab");
  CHECK_FALSE(base::IdentityOf(folder.File("changed")) == before);
}

TEST_CASE("a file that changes while it is read is refused") {
  const TemporaryFolder folder;
  const std::string file = folder.File("file");
  Write(file, std::string(32 << 20, 'x'));
  std::atomic<bool> done{false};
  std::thread writer([&] {
    std::fstream stream(file, std::ios::binary | std::ios::in | std::ios::out);
    while (!done) stream.seekp(0).write("y", 1).flush();
  });
  std::string refusal;
  for (int i = 0; i < 100 && refusal.empty(); ++i) refusal = Refusal([&] { base::ReadWhole(file); });
  done = true;
  writer.join();
  CHECK(refusal == file + ": changed while it was read: wait until it has been built, and try again");
}

TEST_CASE("the cache's folder is where the environment says, and belongs to its user") {
  const TemporaryFolder folder;
  const Environment home("HOME", folder.File("home"));
  const Environment system("XDG_CACHE_HOME", "");
  {
    const Environment chosen("CPPOOL_CACHE", folder.File("a/b"));
    CHECK(base::CacheFolder() == folder.File("a/b"));
    CHECK(fs::is_directory(folder.File("a/b")));
    for (const fs::perms others : {fs::perms::group_write, fs::perms::others_write}) {
      fs::permissions(folder.File("a/b"), fs::perms::owner_all | others);
      CHECK(Has(Refusal([] { base::CacheFolder(); }), "can be changed by other users"));
    }
  }
  Write(folder.File("file"), "");
  {
    const Environment chosen("CPPOOL_CACHE", folder.File("file/below"));
    const std::string refusal = Refusal([] { base::CacheFolder(); });
    CHECK(Has(refusal, "CPPOOL_CACHE: " + folder.File("file/below") + " cannot be made"));
    CHECK(Has(refusal, "set CPPOOL_CACHE to a folder that can be written"));
  }
  const Environment none("CPPOOL_CACHE", "");
  CHECK(base::CacheFolder() == folder.File("home/.cache/cppool"));
  {
    const Environment caches("XDG_CACHE_HOME", folder.File("caches"));
    CHECK(base::CacheFolder() == folder.File("caches/cppool"));
  }
  const Environment no_home("HOME", folder.File("file"));
  const Environment temporary("TMPDIR", folder.path().string());
  CHECK(base::CacheFolder() == folder.File("cppool-" + std::to_string(geteuid())));
}

TEST_CASE("the folders and files of a cache are their user's alone, whatever the umask is or was") {
  const TemporaryFolder folder;
  const Environment none("CPPOOL_CACHE", ""), system("XDG_CACHE_HOME", folder.File("caches"));
  const auto others_may = [&](const std::string& path) {
    return (fs::status(path).permissions() & (fs::perms::group_write | fs::perms::others_write)) !=
           fs::perms::none;
  };
  const std::string name = FileCache::Name("mine", kDigest, ".so");
  const mode_t before = umask(0);
  const FileCache made("things", {3, 1000});
  made.Write(name, "content");
  umask(before);
  for (const std::string& path :
       {folder.File("caches"), folder.File("caches/cppool"), made.folder(), made.Path(name)})
    CHECK_FALSE(others_may(path));
  for (const std::string& path : {folder.File("caches/cppool"), made.folder(), made.Path(name)})
    fs::permissions(path, fs::perms::all);
  const FileCache mended("things", {3, 1000});
  CHECK_FALSE(others_may(folder.File("caches/cppool")));
  CHECK_FALSE(others_may(mended.folder()));
  CHECK_FALSE(mended.Use(name));  // somebody may have changed it
  mended.Write(name, "content");
  CHECK(mended.Use(name));
}

TEST_CASE("a folder that others could change loses that permission alone") {
  const TemporaryFolder folder;
  const Environment chosen("CPPOOL_CACHE", folder.path().string());
  fs::create_directory(folder / "things");
  fs::permissions(folder / "things", static_cast<fs::perms>(0775));
  const FileCache cache("things", {3, 1000});
  CHECK(fs::status(folder / "things").permissions() == static_cast<fs::perms>(0755));
}

TEST_CASE(
    "in a folder that all may write, a link to the cache's folder is followed unless it is another user's") {
  const TemporaryFolder folder;
  const Environment home("HOME", ""), caches("XDG_CACHE_HOME", "");
  const Environment temporary("TMPDIR", folder.path().string());
  const std::string name = "cppool-" + std::to_string(geteuid());
  fs::permissions(folder.path(), fs::perms::all | fs::perms::sticky_bit);  // as /tmp
  fs::create_directory(folder / "private");
  fs::create_directory_symlink(folder / "private", folder / name);
  {
    const Environment none("CPPOOL_CACHE", "");
    CHECK(base::CacheFolder() == folder.File(name));
  }
  for (const char* end : {"", "/", "//", "/."}) {
    const Environment chosen("CPPOOL_CACHE", folder.File(name) + end);
    CHECK(base::CacheFolder() == folder.File(name));
  }
  if (geteuid() != 0) return;  // only root can make others' files
  REQUIRE(lchown(folder.File(name).c_str(), 65534, static_cast<gid_t>(-1)) == 0);
  fs::permissions(folder / "private", fs::perms::all);
  {
    const Environment none("CPPOOL_CACHE", "");
    CHECK(Has(Refusal([] { base::CacheFolder(); }), name + " is another user's symbolic link"));
  }
  fs::permissions(folder / "private", fs::perms::owner_all);
  for (const char* end : {"", "/", "//", "/."}) {
    const Environment chosen("CPPOOL_CACHE", folder.File(name) + end);
    CHECK(Has(Refusal([] { base::CacheFolder(); }), name + " is another user's symbolic link"));
  }
  // In one's home a link is followed, whose ever it is.
  const Environment none("CPPOOL_CACHE", ""), own("XDG_CACHE_HOME", folder.File("caches"));
  fs::create_directory(folder / "caches");
  fs::create_directory_symlink(folder / "private", folder / "caches/cppool");
  REQUIRE(lchown(folder.File("caches/cppool").c_str(), 65534, static_cast<gid_t>(-1)) == 0);
  CHECK(base::CacheFolder() == folder.File("caches/cppool"));
}

TEST_CASE("a folder of another user is refused with the user, since no permission of it helps") {
  if (geteuid() != 0) return;  // only root can make others' files
  const TemporaryFolder folder;
  const Environment chosen("CPPOOL_CACHE", folder.File("volume"));
  fs::create_directory(folder / "volume");
  REQUIRE(chown(folder.File("volume").c_str(), 65534, static_cast<gid_t>(-1)) == 0);
  const std::string refusal = Refusal([] { base::CacheFolder(); });
  CHECK(Has(refusal, folder.File("volume") + " belongs to user 65534"));
  CHECK_FALSE(Has(refusal, "chmod"));
}

TEST_CASE("a cached file is read while other processes use it") {
  const TemporaryFolder folder;
  const Environment chosen("CPPOOL_CACHE", folder.path().string());
  const FileCache cache("things", {3, std::uint64_t{1} << 30});
  const std::string a = FileCache::Name("a", kDigest, ".so");
  CHECK_FALSE(cache.Read(a));
  const std::string content(std::size_t{4} << 20, 'x');
  cache.Write(a, content);
  std::atomic<bool> done{false};
  std::thread user([&] {
    while (!done) cache.Use(a);
  });
  int read = 0;
  for (int i = 0; i < 50; ++i) read += cache.Read(a) == content;
  done = true;
  user.join();
  CHECK(read == 50);
}

TEST_CASE("a cache keeps what is used, up to its limits") {
  const TemporaryFolder folder;
  const Environment chosen("CPPOOL_CACHE", folder.path().string());
  const FileCache cache("things", {3, 1000});
  CHECK(cache.folder() == folder.File("things"));
  const auto named = [](const std::string& stem) {
    return FileCache::Name("/x/" + stem + ".cu", kDigest, ".so");
  };
  CHECK(named("a") == std::string("a-") + kDigest + ".so");
  CHECK(named("a b\n$(x)") == std::string("a_b___x_-") + kDigest + ".so");
  CHECK_FALSE(cache.Use(named("a")));
  for (const char* name : {"a", "b", "c", "d"}) cache.Write(named(name), std::string("content of ") + name);
  CHECK(ReadFile(cache.Path(named("a"))) == "content of a");
  CHECK(CountFiles(cache.folder()) == 4);  // no unfinished one is left
  CHECK(access(cache.Path(named("a")).c_str(), X_OK) == 0);
  cache.Prune();
  CHECK(CountFiles(cache.folder()) == 4);  // all were used just now
  for (const char* name : {"a", "b", "c", "d"}) Age(cache.Path(named(name)));
  Age(cache.Path(named("b")), 2);
  CHECK(cache.Use(named("a")));
  cache.Prune();
  CHECK_FALSE(fs::exists(cache.Path(named("b"))));  // for longest
  CHECK(CountFiles(cache.folder()) == 3);
  cache.Write(named("large"), std::string(990, 'x'));
  Age(cache.Path(named("large")), 3);
  cache.Prune();
  CHECK_FALSE(fs::exists(cache.Path(named("large"))));
  CHECK(fs::exists(cache.Path(named("a"))));
  cache.Write(named("a"), "again");
  CHECK(ReadFile(cache.Path(named("a"))) == "again");
  fs::remove_all(cache.folder());
  cache.Write(named("a"), "and again");
  CHECK(cache.Read(named("a")) == "and again");
}

TEST_CASE("a cache in a folder of somebody's project removes its own files alone") {
  const TemporaryFolder folder;
  const Environment chosen("CPPOOL_CACHE", folder.path().string());
  const FileCache cache("libraries", {1, 1000});
  const std::string own = std::string("mine-") + kDigest;
  const std::vector<std::string> kept = {"mine.so", "libmine.so.1",  "notes.txt",           "mine-0123.so",
                                         own,       own + ".so.old", "x" + own + ".so/file"};
  fs::create_directory(cache.Path("x" + own + ".so"));
  for (const std::string& name : kept) Write(cache.Path(name), std::string(500, 'x'));
  const std::vector<std::string> removed = {own + ".so", own + ".files", own + ".so.0123456789abcdef.part"};
  for (const std::string& name : removed) Write(cache.Path(name), std::string(500, 'x'));
  for (const auto& entry : fs::directory_iterator(cache.folder())) Age(entry.path());
  Age(cache.Path(own + ".files"), 0);  // used
  cache.Prune();
  for (const std::string& name : kept) CHECK(fs::exists(cache.Path(name)));
  CHECK(fs::exists(cache.Path(own + ".files")));
  CHECK_FALSE(fs::exists(cache.Path(own + ".so")));
  CHECK_FALSE(fs::exists(cache.Path(own + ".so.0123456789abcdef.part")));
}

TEST_CASE("a file's digest is kept as long as the file stays") {
  const TemporaryFolder folder;
  int calls = 0;
  base::FileDigests digests([&](const std::string& path, std::string_view bytes) {
    ++calls;
    if (bytes == "bad") throw std::runtime_error(path + " is bad");
    return base::Digest(bytes);
  });
  const std::string old = "/proc/self/exe", fresh = folder.File("fresh");
  CHECK(digests.Known(old).empty());
  const std::string digest = digests.Of(old);
  CHECK(digests.Of(old) == digest);
  CHECK(digests.Known(old) == digest);
  CHECK(calls == 1);
  Write(fresh, "1");  // so shortly before that it may be changed again without a sign of it
  CHECK(digests.Of(fresh) == base::Digest("1"));
  CHECK(digests.Known(fresh).empty());
  Write(fresh, "2");
  CHECK(digests.Of(fresh) == base::Digest("2"));
  CHECK(digests.Read(fresh).bytes == "2");
  CHECK(calls == 4);
  Write(fresh, "bad");
  CHECK_THROWS_WITH(digests.Of(fresh), ContainsSubstring("is bad"));
  CHECK_THROWS_AS(digests.Of(folder.File("none")), base::FileError);
}

TEST_CASE("an unfinished file has a name that no process with the same number takes") {
  const TemporaryFolder folder;
  const std::string file = folder.File("file"), others = file + "." + std::to_string(getpid()) + ".part";
  Write(others, "of a process in another container");
  {
    base::NewFile made(file);
    made.Write("content");
    made.Commit();
  }
  CHECK(ReadFile(file) == "content");
  CHECK(ReadFile(others) == "of a process in another container");
  std::string first, second;
  CHECK(base::MakePart(file, 0600, &first));
  CHECK(base::MakePart(file, 0600, &second));
  CHECK(fs::is_empty(first));
  CHECK(first != second);
}

}  // namespace cppool::test
