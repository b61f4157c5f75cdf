// A harness with a busy pool of OpenMP threads, and many other threads, spawns daemons, forks, and continues
// to compute.
#include <omp.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/client/support.h"

using namespace cppool::test;
using cppool::Pool;

namespace {

double Sum(int n) {
  double sum = 0;
#pragma omp parallel for reduction(+ : sum) num_threads(4)
  for (int i = 1; i <= n; ++i) sum += 1.0 / i;
  return sum;
}

int Threads() {
  int threads = 0;
#pragma omp parallel num_threads(4) reduction(+ : threads)
  threads += 1;
  return threads;
}

}  // namespace

TEST_CASE("a process with a busy OpenMP pool and many threads can spawn daemons and fork") {
  LeavesNothing([] {
    const double expected = Sum(10000);
    std::atomic<bool> stop{false};
    std::atomic<long> rounds{0}, wrong{0};
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
      while (!stop) {
        if (std::abs(Sum(10000) - expected) > 1e-9) ++wrong;
        ++rounds;
      }
    });
#ifndef CPPOOL_TEST_ASAN  // unlike the C library's, its allocator does not support a fork while other threads
                          // allocate
    for (int i = 0; i < 32; ++i) {  // each takes the allocator's locks again and again
      threads.emplace_back([&] {
        while (!stop) {
          std::vector<std::string> some(64, std::string(100, 'x'));
          std::this_thread::sleep_for(std::chrono::microseconds(some.size() * 10));
        }
      });
    }
#endif
    const long before = rounds;
    {
      Pool kept(FakeOptions());
      CHECK(kept.Run().ok());
      const int pid = kept.Hello()["pid"];
      for (int i = 0; i < 20; ++i) {
        Pool pool(FakeOptions());
        CHECK(pool.Run().ok());
        CHECK(InChild([&] { return kept.Run().ok() && kept.Hello()["pid"] != pid ? 0 : 1; }) == 0);
      }
      CHECK(kept.Hello()["pid"] == pid);
      CHECK(Eventually([&] { return rounds > before; }));
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(Threads() == 4);  // the pool has all its threads
    CHECK(std::abs(Sum(10000) - expected) < 1e-9);
  });
}
