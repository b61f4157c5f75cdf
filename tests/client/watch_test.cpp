// --watch: which saves end a wait, and what a watched run survives.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "client/command/watch.h"
#include "tests/catch.h"
#include "tests/client/compile_support.h"
#include "tests/client/watched_run.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;

// What a wait returns during which this is done.
std::string Saved(command::FileWatch& watch, const std::function<void()>& save) {
  std::thread saver([&] {
    std::this_thread::sleep_for(20ms);
    save();
  });
  std::string name = watch.Wait();
  saver.join();
  return name;
}

void AwaitFile(const fs::path& file) {
  const auto limit = std::chrono::steady_clock::now() + 60s;
  while (!fs::exists(file) && std::chrono::steady_clock::now() < limit) std::this_thread::sleep_for(5ms);
}

void Link(const fs::path& target, const fs::path& link) {
  fs::create_symlink(target, link.string() + "~");
  fs::rename(link.string() + "~", link);
}

}  // namespace

TEST_CASE("a save is noticed, however it is made, and nothing else is") {
  const TemporaryFolder folder;
  const std::string file = folder.File("mine.cu"), included = folder.File("mine.h");
  Write(file, "1");
  command::FileWatch watch;
  watch.Add({file, included, folder.File("none/none.h")});
  watch.Add({file});
  const auto saved = [&](const std::function<void()>& save) {
    Write(folder / "other.cu", "not watched");
    return Saved(watch, save);
  };
  CHECK(saved([&] { Write(file, "2"); }) == file);
  CHECK(saved([&] { Write(included, "made later"); }) == included);
  CHECK(saved([&] {
          Write(folder / "mine.cu~", "3");
          fs::rename(folder / "mine.cu~", file);
        }) == file);
  Write(file, "4");  // before the wait
  CHECK(watch.Wait() == file);
}

TEST_CASE("a save is noticed through symbolic links, and when a folder on the way is replaced") {
  const TemporaryFolder folder;
  for (const char* name : {"one", "two", "real"}) fs::create_directories(folder / name / "src");
  Write(folder / "real/src/mine.cu", "1");
  fs::create_symlink("../../real/src/mine.cu", folder / "one/src/mine.cu");
  fs::create_symlink(folder / "one", folder / "link");
  const std::string file = folder.File("link/src/mine.cu"), none = folder.File("none/deep/mine.h");
  command::FileWatch watch;
  watch.Add({file, none});
  CHECK(Saved(watch, [&] { Write(folder / "real/src/mine.cu", "22"); }) == file);
  Write(folder / "two/src/mine.cu", "333");
  CHECK(Saved(watch, [&] { Link(folder / "two/src/mine.cu", folder / "one/src/mine.cu"); }) == file);
  CHECK(Saved(watch, [&] { Write(folder / "two/src/mine.cu", "4444"); }) == file);
  CHECK(Saved(watch, [&] { Link(folder / "real", folder / "link"); }) == file);
  CHECK(Saved(watch, [&] { Write(folder / "real/src/mine.cu", "55555"); }) == file);
  fs::rename(folder / "real", folder / "away");
  CHECK(Saved(watch, [&] { fs::rename(folder / "two", folder / "real"); }) == file);
  CHECK(Saved(watch, [&] { Write(folder / "real/src/mine.cu", "666666"); }) == file);
  CHECK(Saved(watch, [&] {
          fs::remove_all(folder / "real");
          fs::create_directories(folder / "real/src");
          Write(folder / "real/src/mine.cu", "7777777");
        }) == file);
  CHECK(Saved(watch, [&] {
          fs::create_directories(folder / "none/deep");
          Write(none, "made with its folders");
        }) == none);
}

TEST_CASE(
    "in a folder where something else is saved all the time a save ends the wait, and nothing else does") {
  const TemporaryFolder folder;
  const std::string file = folder.File("mine.cu");
  Write(file, "1");
  command::FileWatch watch;
  watch.Add({file});
  std::atomic<bool> done{false}, saved{false};
  const auto save_others = [&](const char* name) {
    // Not cut off first: file systems may wait for the disk then.
    while (!done) std::ofstream(folder / name, std::ios::app) << "saved\n";
  };
  std::thread one(save_others, "one"), another(save_others, "another"), third(save_others, "third");
  CHECK(Saved(watch, [&] {
          std::this_thread::sleep_for(200ms);
          saved = true;
          Write(file, "22");
        }) == file);
  CHECK(saved);
  done = true;
  for (std::thread* thread : {&one, &another, &third}) thread->join();
}

TEST_CASE("a file that was saved before it was known that it counts is not missed") {
  const TemporaryFolder folder;
  Write(folder / "old.h", "1");
  std::this_thread::sleep_for(50ms);  // more than the clock of files counts in
  command::FileWatch watch;
  std::this_thread::sleep_for(50ms);
  Write(folder / "new.h", "1");
  watch.Add({folder.File("old.h"), folder.File("new.h")});
  CHECK(watch.Wait() == folder.File("new.h"));
}

TEST_CASE(
    "run --watch runs the same again at each save, in the same warm pool, and survives what does not "
    "compile") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.cpp");
  WatchedRun run({"--load", source, "--case", "mine", "--backend", "host"});
  CheckWatchRounds(run, source, Failing(kCase));
  sources.SetVersion("version 2");  // an included file
  CHECK(run.ReadUntil("version.h was saved"));
  CHECK(run.ReadUntil("1 passed, 0 failed, 0 skipped"));
  INFO(run.seen());
  CHECK(run.End());
}

TEST_CASE("run --watch starts over with a library that was built while it ran") {
  const Sources sources;
  WatchedRun run({"--backend", "host", "--case", "mine", "--param", "n=1,3", "--load",
                  Rebuilt(sources, CaseWithStage(), kRun, Failing(CaseWithStage()))});
  CHECK(run.ReadUntil("rebuilt.so was saved"));  // the cells that have not run by then are given up
  CHECK(run.ReadUntil("0 passed, 2 failed, 0 skipped"));
  INFO(run.seen());
  CHECK(run.End());
}

TEST_CASE(
    "run --watch says at SIGQUIT where the ranks are, and gives up a case that runs when its source is "
    "saved") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.cpp");
  const fs::path runs = sources.folder / "runs";
  WriteFile(source, "#include <stdio.h>\n#include <unistd.h>\n" +
                        Replaced(kCase, "  cppool_check check",
                                 "  fclose(fopen(\"" + runs.string() +
                                     "\", \"w\"));\n  sleep(3600);\n  cppool_check check"));
  WatchedRun run({"--load", source, "--case", "mine", "--backend", "host"});
  AwaitFile(runs);
  run.Signal(SIGQUIT);
  CHECK(run.ReadUntil("cppool: rank 0: in the case's host code"));
  WriteFile(source, kCase);
  CHECK(run.ReadUntil("stopped since a file was saved again, with 0 of 1 cells done"));
  CHECK(run.ReadUntil("mine.cpp was saved"));
  CHECK(run.ReadUntil("1 passed, 0 failed, 0 skipped"));
  INFO(run.seen());
  CHECK(run.End());
}

TEST_CASE("bench says at SIGQUIT where the ranks are, and goes on") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.c");
  const fs::path runs = sources.folder / "runs", go = sources.folder / "go";
  WriteFile(source, "#include <stdio.h>\n#include <unistd.h>\n" +
                        Replaced(CaseWithStage(), "  if (c->integer(c, \"n\") == 2) abort();",
                                 "  fclose(fopen(\"" + runs.string() + "\", \"w\"));\n  while (access(\"" +
                                     go.string() + "\", F_OK) != 0) usleep(1000);"));
  WatchedRun run(
      {"--load", source, "--case", "mine", "--backend", "host", "--warmup", "0", "--repeat", "1", "--json"},
      {"bench"});
  AwaitFile(runs);
  run.Signal(SIGQUIT);
  CHECK(run.ReadUntil("cppool: rank 0: in the case's host code"));
  Write(go, "");
  CHECK(run.ReadUntil("\"ran\":"));
  CHECK_FALSE(Has(run.seen(), "\"interrupted\""));
  INFO(run.seen());
}

TEST_CASE(
    "run --watch wakes when a header is made that was missing, and when one is mended that did not compile") {
  const Sources sources;
  fs::remove(sources.folder / "version.h");
  WatchedRun run({"--load", sources.folder.File("mine.cpp"), "--case", "mine", "--backend", "host"});
  const auto reads = [&](const std::string& part) {
    const bool read = run.ReadUntil(part);
    INFO(run.seen());
    REQUIRE(read);
  };
  reads("does not compile");
  reads("waiting for a save");
  Write(sources.folder / "version.h", "#error not yet\n");
  reads("version.h was saved");
  reads("waiting for a save");
  sources.SetVersion("version 1");
  reads("version.h was saved");
  reads("1 passed, 0 failed, 0 skipped");
  CHECK(run.End());
}

}  // namespace cppool::test
