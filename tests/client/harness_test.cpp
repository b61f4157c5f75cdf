// A Pool in unusual harnesses: closed or many descriptors, signals, forks, SIGKILL.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "client/src/process.h"
#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::Pools;

namespace {

Json Surroundings(Pool& pool) { return pool.Run(Do("echo")).json["surroundings"]; }

// Makes pidfd_open fail as on a kernel without it. False: the system does not allow system call filters.
// ThreadSanitizer builds leave out the tests that fork.
[[maybe_unused]] bool TakePidfdOpenAway() {
  sock_filter code[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
                        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  sock_fprog program = {std::size(code), code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 &&
         syscall(SYS_pidfd_open, getpid(), 0) < 0 && errno == ENOSYS;
}

// Forks a process with this id, in its own group, that waits to be killed; -1 where process ids cannot be
// chosen.
[[maybe_unused]] pid_t ForkWithNumber(pid_t number) {
  for (int i = 0; i < 100; ++i) {
    if (!(std::ofstream("/proc/sys/kernel/ns_last_pid") << number - 1 << std::flush)) return -1;
    const pid_t child = fork();
    if (child == 0) {
      alarm(100);
      for (;;) pause();
    }
    if (child == number && setpgid(child, child) == 0) return child;
    kill(child, SIGKILL);
  }
  return -1;
}

}  // namespace

TEST_CASE(
    "the daemon inherits no descriptors, signal mask or signal dispositions, and leads its own process "
    "group") {
  std::vector<int> mine;
  for (int i = 0; i < 20; ++i) mine.push_back(open("/dev/null", O_RDONLY));  // inheritable
  sigset_t blocked, before;
  sigemptyset(&blocked);
  for (int number : {SIGTERM, SIGINT, SIGUSR1, SIGCHLD}) sigaddset(&blocked, number);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  auto old_hup = signal(SIGHUP, SIG_IGN);
  auto old_pipe = signal(SIGPIPE, SIG_IGN);
  {
    Pool pool(FakeOptions());
    Json seen = Surroundings(pool);
    CHECK(seen["open"] == Json({0, 1, 2}));
    CHECK(seen["blocked"] == Json::array());
    CHECK(seen["not_default"] == Json::array());
    CHECK(seen["group"] == seen["pid"]);
    CHECK(seen["group"] != getpgrp());
  }
  signal(SIGHUP, old_hup);
  signal(SIGPIPE, old_pipe);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  for (int fd : mine) close(fd);
}

#ifndef CPPOOL_TEST_TSAN

TEST_CASE("a Pool works in a harness whose standard descriptors are closed") {
  for (int closed = 1; closed < 8; ++closed) {
    INFO("closed: " << closed);
    CHECK(InChild([&] {
            for (int fd = 0; fd < 3; ++fd)
              if ((closed >> fd) & 1) close(fd);
            {
              Pool pool(FakeOptions());
              Json seen = Surroundings(pool);
              if (seen["open"] != Json({0, 1, 2})) return 1;
              for (int fd = 0; fd < 3; ++fd)  // not used by the Pool
                if (((closed >> fd) & 1) && fcntl(fd, F_GETFD) >= 0) return 2;
            }
            return NoChildren() ? 0 : 3;
          }) == 0);
  }
}

#ifndef CPPOOL_TEST_ASAN

TEST_CASE("without free descriptors a call is an error and leaks nothing, and a later call works") {
  CHECK(InChild([] {
          Pool pool(FakeOptions());
          rlimit limit, few;
          getrlimit(RLIMIT_NOFILE, &limit);
          int before = CountFds();
          for (rlim_t extra = 0; extra < 9; ++extra) {
            few = limit;
            few.rlim_cur = static_cast<rlim_t>(before) + extra;
            setrlimit(RLIMIT_NOFILE, &few);
            bool threw = false;
            try {
              pool.Hello();
            } catch (const cppool::PoolError& error) {
              threw = error.kind() == cppool::PoolError::Kind::kStart;
            }
            setrlimit(RLIMIT_NOFILE, &limit);
            if (extra < 5 && !threw) return 1;
            pool.Stop();
            if (CountFds() != before || !NoChildren()) return 2;
          }
          return pool.Run().ok() ? 0 : 3;
        }) == 0);
}

#endif

TEST_CASE("a Pool works if another thread reaps all children") {
  CHECK(InChild([] {
          std::atomic<bool> stop{false};
          std::thread thief([&] {
            while (!stop) {
              waitpid(-1, nullptr, WNOHANG);
              std::this_thread::sleep_for(1ms);
            }
          });
          int result = 0;
          {
            Pool pool(FakeOptions());
            for (int i = 0; i < 5 && result == 0; ++i) {
              try {
                pool.Run(Do("die"));
                result = 1;
              } catch (const cppool::PoolError& error) {
                if (error.kind() != cppool::PoolError::Kind::kDied) result = 2;
              }
              if (!pool.Run().ok()) result = 3;
            }
          }
          stop = true;
          thief.join();
          return result;
        }) == 0);
}

TEST_CASE(
    "the whole group of a daemon that the kernel reaps is killed, but no later group with the same id") {
  const int code = InChild([] {
    signal(SIGCHLD, SIG_IGN);
    {
      Pool pool(FakeOptions());
      const int group = Surroundings(pool)["group"];
      try {
        pool.Run(Do("hang_with_grandchild"), Within(50ms));
        return 1;
      } catch (const cppool::PoolError&) {
        if (!Eventually([&] { return GroupGone(group); })) return 2;
      }
      try {
        pool.Run(Do("die"));
        return 7;
      } catch (const cppool::PoolError& error) {
        if (!Has(error.what(), "SIGCHLD is ignored")) return 8;
      }
    }
    std::unique_ptr<cppool::client::Process> process;
    for (int i = 0; i < 200; ++i) {  // until Terminate returns before it has seen the end
      process = cppool::client::Process::Spawn({CPPOOL_FAKE_DAEMON, {"--start", "silent"}, {}});
      if (!process->Terminate(0ms, 0ms)) break;
      process.reset();
    }
    if (!process || !process->WaitEnd(std::chrono::steady_clock::now() + 60s)) return 3;
    const int number = process->pid();
    if (!Eventually([&] { return kill(number, 0) != 0; })) return 4;
    const pid_t other = ForkWithNumber(number);
    if (other < 0) return 77;
    if (!process->Terminate(0ms, 1s)) return 5;
    std::this_thread::sleep_for(50ms);
    const bool lives = Alive(other);
    kill(other, SIGKILL);
    return lives ? 0 : 6;
  });
  if (code == 77) WARN("skipped: process ids cannot be chosen here");
  if (code != 77) CHECK(code == 0);
}

TEST_CASE("a Pool works on a kernel without pidfd_open") {
  const int code = InChild([] {
    if (!TakePidfdOpenAway()) return 77;
    Pool pool(FakeOptions());
    if (!pool.Run().ok()) return 1;
    const int group = Surroundings(pool)["group"];
    try {
      pool.Run(Do("hang"), Within(50ms));
      return 2;
    } catch (const cppool::PoolError& error) {
      if (error.kind() != cppool::PoolError::Kind::kTimeout || !GroupGone(group)) return 3;
    }
    try {
      pool.Run(Do("grandchild"));  // the grandchild keeps the pipes open
      return 4;
    } catch (const cppool::PoolError& error) {
      if (error.kind() != cppool::PoolError::Kind::kDied) return 5;
    }
    if (!pool.Run().ok()) return 6;
    pool.Stop();
    return NoChildren() ? 0 : 7;
  });
  if (code == 77) WARN("skipped: system calls cannot be filtered here");
  if (code != 77) CHECK(code == 0);
}

TEST_CASE("a forked child has its own daemon and does not affect its parent's") {
  LeavesNothing([] {
    Pool pool(FakeOptions());
    Pools pools(FakeOptions());
    int pid = pool.Hello()["pid"];
    int second = pools.At(2).Hello()["pid"];
    CHECK(InChild([&] {
            Json seen = Surroundings(pool);
            if (seen["pid"] == pid) return 1;
            if (seen["environment"]["CPPOOL_PARENT_PID"] != std::to_string(getpid())) return 2;
            if (pools.At(2).Hello()["pid"] == second) return 3;
            if (!pools.At(4).Run().ok()) return 4;
            pool.Stop();
            pools.Stop();
            return NoChildren() ? 0 : 5;
          }) == 0);
    CHECK(pool.Hello()["pid"] == pid);
    CHECK(pools.At(2).Hello()["pid"] == second);
    // A child that destroys one Pool and stops another, without having used them.
    auto owned = std::make_unique<Pool>(FakeOptions());
    int third = owned->Hello()["pid"];
    CHECK(InChild([&] {
            int before = CountFds();
            owned.reset();
            pool.Stop();
            return CountFds() < before ? 0 : 1;  // the copies of the descriptors are closed
          }) == 0);
    CHECK(owned->Hello()["pid"] == third);
    CHECK(pool.Hello()["pid"] == pid);
  });
}

TEST_CASE("a process can fork while another of its threads is in a call") {
  LeavesNothing([] {
    cppool::PoolOptions options = FakeOptions();
    options.grace = 60s;
    Pool pool(options);
    int pid = pool.Hello()["pid"];
    std::thread busy([&] { CHECK(pool.Run({{"do", "late"}, {"ms", 500}}).ok()); });
    std::this_thread::sleep_for(100ms);  // the call holds the Pool's lock now
    CHECK(InChild([&] {
            if (Surroundings(pool)["pid"] == pid) return 1;
            pool.Stop();
            return NoChildren() ? 0 : 2;
          }) == 0);
    busy.join();
    CHECK(pool.Hello()["pid"] == pid);
  });
}

TEST_CASE("a Pool in a forked child does not close descriptors that the child has reused") {
  Pool pool(FakeOptions());
  pool.Hello();
  CHECK(InChild([&] {
          for (int fd = 3; fd < 256; ++fd) close(fd);  // as a daemonising child does
          std::vector<int> mine;
          for (int i = 0; i < 40; ++i) mine.push_back(open("/dev/null", O_RDONLY));
          pool.Stop();
          if (!pool.Run().ok()) return 1;
          for (int fd : mine)
            if (fcntl(fd, F_GETFD) < 0) return 2;
          return 0;
        }) == 0);
  CHECK(pool.Run().ok());
}

TEST_CASE("a forked sibling with copies of the descriptors does not prevent the daemon's orderly exit") {
  cppool::PoolOptions options = FakeOptions("ignore_term");  // exits at the end of its input, or by SIGKILL
  options.grace = 60s;
  auto pool = std::make_unique<Pool>(options);
  int pid = pool->Hello()["pid"];
  pid_t sibling = fork();
  if (sibling == 0) {
    alarm(100);
    pause();
    _exit(0);
  }
  auto start = std::chrono::steady_clock::now();
  pool.reset();
  CHECK(std::chrono::steady_clock::now() - start < 40s);  // it did not wait for the whole grace period
  CHECK_FALSE(Alive(pid));
  kill(sibling, SIGKILL);
  waitpid(sibling, nullptr, 0);
}

#endif

TEST_CASE(
    "the daemon's path comes from the options, else the environment, else beside the program, else PATH") {
  cppool::PoolOptions options;
  options.daemon = "/a/cppoold";
  setenv("CPPOOL_DAEMON", "/b/cppoold", 1);
  CHECK(cppool::FindDaemon(options) == "/a/cppoold");
  options.daemon.clear();
  CHECK(cppool::FindDaemon(options) == "/b/cppoold");
  unsetenv("CPPOOL_DAEMON");

  TemporaryFolder folder;
  std::string in_path = folder.File("cppoold");
  const char* search = getenv("PATH");
  std::string path = search == nullptr ? "" : search;
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  const bool beside = std::filesystem::exists(program / "cppoold");
  setenv("PATH", ("/nowhere::" + in_path.substr(0, in_path.rfind('/'))).c_str(), 1);
  // The daemon beside this program (a full build puts it there), an installed one, or none.
  std::string elsewhere = cppool::FindDaemon(options);
  CHECK(elsewhere != in_path);
  std::ofstream(in_path) << "#!/bin/sh\n";
  CHECK(cppool::FindDaemon(options) == elsewhere);  // not executable
  REQUIRE(chmod(in_path.c_str(), 0755) == 0);
  CHECK(cppool::FindDaemon(options) == (beside ? elsewhere : in_path));
  setenv("PATH", path.c_str(), 1);
}
