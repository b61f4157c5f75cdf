// Writing answers to pipes whose reader is slow or gone.
#include "base/stdout_channel.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/pipe.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;
using base::UniqueFd;
using Clock = std::chrono::steady_clock;

}  // namespace

TEST_CASE("an answer larger than a pipe is written completely while it is read") {
  Pipe pipe;
  const std::string text(1'000'003, 'x');
  auto read_all = std::async(std::launch::async, [fd = std::move(pipe.read_end)] {
    std::string all;
    char bytes[5000];
    while (true) {
      const ssize_t count = read(fd.get(), bytes, sizeof(bytes));
      if (count <= 0) return all;
      all.append(bytes, static_cast<std::size_t>(count));
    }
  });
  {
    base::StdoutChannel channel(std::move(pipe.write_end));
    CHECK(channel.Write(text));
  }
  CHECK(read_all.get() == text);
}

TEST_CASE(
    "writing an answer fails at its deadline if it is not read, and at once if the reader has closed the "
    "pipe") {
  std::signal(SIGPIPE, SIG_IGN);
  Pipe pipe;
  base::StdoutChannel channel(std::move(pipe.write_end));
  CHECK_FALSE(channel.Write(std::string(1'000'000, 'x'), Clock::now() + 50ms));
  pipe.read_end.Reset();
  CHECK_FALSE(channel.Write("x"));
}

TEST_CASE("texts that several threads write at once are whole") {
  Pipe pipe;
  std::string all;
  std::thread reader([&] {
    char bytes[5000];
    for (ssize_t count; (count = read(pipe.read_end.get(), bytes, sizeof(bytes))) > 0;)
      all.append(bytes, static_cast<std::size_t>(count));
  });
  {
    base::StdoutChannel channel(std::move(pipe.write_end));
    std::vector<std::thread> writers;
    for (const char letter : {'a', 'b', 'c'}) {
      writers.emplace_back([&channel, letter] {
        for (int i = 0; i < 30; ++i) {
          channel.Write(std::string(20000, letter) + "\n");
          channel.Write(std::string(10, letter) + "\n", Clock::now() + 60s);
          channel.WriteIfReady(std::string(10, letter) + "\n");
        }
      });
    }
    for (std::thread& writer : writers) writer.join();
  }
  reader.join();
  int lines = 0;
  for (std::size_t at = 0; at < all.size(); ++lines) {
    const std::size_t end = all.find('\n', at);
    REQUIRE(all.find_first_not_of(all[at], at) == end);
    at = end + 1;
  }
  CHECK(lines >= 180);
}

}  // namespace cppool::test
