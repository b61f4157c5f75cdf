// The queue of requests and their reader: what is read ahead, what overtakes, and when nothing is read.
#include "protocol/request_reader.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <condition_variable>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "tests/files.h"
#include "tests/pipe.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;
using base::UniqueFd;
using protocol::IncomingRequest;
using protocol::Json;
using protocol::RequestQueue;

RequestQueue::Entry Parsed(const std::string& line) {
  return std::make_shared<IncomingRequest>(protocol::LineReader::Line{line});
}

// A reader of a pipe, and what it does.
struct Requests {
  explicit Requests(std::optional<std::chrono::milliseconds> idle_limit = {}) {
    Pipe pipe;
    input = std::move(pipe.write_end);
    reader.emplace(std::move(pipe.read_end), stop.get(), queue, Events(), idle_limit);
  }
  protocol::RequestReader::Events Events() {
    return {[this](const IncomingRequest& request) {
              const std::lock_guard lock(mutex);
              overtaken.push_back(*request.id());
              changed.notify_all();
            },
            [this] {
              const std::lock_guard lock(mutex);
              ++ticks;
              changed.notify_all();
            },
            5ms};
  }

  void Put(const std::string& text) {
    REQUIRE(write(input.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  }
  // The id of the next request; null: there is none, or it has none.
  Json Next() {
    const auto next = reader->Next();
    return next ? next->id().value_or(Json()) : Json();
  }
  template <typename Condition>
  void Await(Condition condition) {
    std::unique_lock lock(mutex);
    REQUIRE(changed.wait_for(lock, 60s, condition));
  }

  const UniqueFd stop{eventfd(0, EFD_CLOEXEC)};
  UniqueFd input;
  RequestQueue queue;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Json> overtaken;
  int ticks = 0;
  std::optional<protocol::RequestReader> reader;  // last: its thread uses the others
};

// Another request may want to overtake it.
std::string Run(int id) { return Json{{"op", "run"}, {"id", id}}.dump() + "\n"; }
std::string Hello(int id) { return Json{{"op", "hello"}, {"id", id}}.dump() + "\n"; }
std::string Status(int id) { return Json{{"op", "status"}, {"id", id}}.dump() + "\n"; }

}  // namespace

TEST_CASE("requests are read as they arrive, to the end of input, and empty lines are none") {
  Requests requests;
  requests.Put(Hello(1) + "{\"op\": \"hel");
  CHECK(requests.Next() == 1);
  requests.Put("lo\", \"id\": 2}\n\n \t\r\n{\"id\": 3}");
  requests.input.Reset();
  CHECK(requests.Next() == 2);
  const auto bad = requests.reader->Next();
  REQUIRE(bad);
  CHECK_FALSE(bad->request());
  CHECK(bad->id() == Json(3));
  CHECK_FALSE(requests.reader->Next());
  CHECK_FALSE(requests.reader->Next());
}

TEST_CASE("after a stop the reader returns the requests that it has read, but no part of a line") {
  Requests requests;
  requests.Put(Hello(1) + Hello(2) + "{\"op\"");
  CHECK(requests.Next() == 1);
  REQUIRE(eventfd_write(requests.stop.get(), 1) == 0);
  CHECK(requests.Next() == 2);
  CHECK_FALSE(requests.reader->Next());
  CHECK_FALSE(requests.reader->Next());
}

TEST_CASE("a request that overtakes is answered while another one is under way, the rest keeps its order") {
  Requests requests;
  requests.Put(Run(1));
  CHECK(requests.Next() == 1);
  requests.Put(Hello(2) + Status(3) + "bad\n" + Hello(4));
  requests.Await([&] { return requests.overtaken == std::vector<Json>{3}; });
  requests.Put(Status(5) + Hello(6) + "{\"op\": \"hello\", \"id\": 7}");
  requests.input.Reset();
  requests.Await([&] { return requests.overtaken.size() == 2; });
  CHECK(requests.Next() == 2);
  CHECK(requests.Next().is_null());  // the bad line, in its place
  CHECK(requests.Next() == 4);
  CHECK(requests.Next() == 6);
  CHECK(requests.Next() == 7);
  CHECK_FALSE(requests.reader->Next());
}

TEST_CASE("requests that overtake in the same lines are answered before the first is handled") {
  Requests requests;
  requests.Put(Status(1) + Hello(2) + Status(3) + Hello(4));
  CHECK(requests.Next() == 2);
  CHECK(requests.overtaken == std::vector<Json>{1, 3});
}

TEST_CASE("at most 64 requests are read ahead, the rest waits in the pipe") {
  Requests requests;
  requests.Put(Run(0));
  CHECK(requests.Next() == 0);
  for (int i = 1; i <= 100; ++i) requests.Put(Hello(i));
  requests.Put(Status(101));  // behind them: it is not read
  while (requests.queue.waiting() < RequestQueue::kMost) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(20ms);
  CHECK(requests.queue.waiting() == 64);
  CHECK(requests.overtaken.empty());
  for (int i = 1; i <= 100; ++i) CHECK(requests.Next() == i);
  requests.Await([&] { return requests.overtaken == std::vector<Json>{101}; });
}

TEST_CASE("requests of a file are read ahead, too") {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "requests") << Hello(1) + Status(2) + Hello(3);
  Requests requests;
  requests.reader.emplace(UniqueFd(open((folder.path() / "requests").c_str(), O_RDONLY)), -1, requests.queue,
                          requests.Events());
  CHECK(requests.Next() == 1);
  CHECK(requests.overtaken == std::vector<Json>{2});
  CHECK(requests.Next() == 3);
  CHECK_FALSE(requests.reader->Next());
}

TEST_CASE(
    "at the idle limit no byte of a later line has been read, also after requests that were read ahead") {
  Requests requests(30ms);
  requests.Put(Run(1));
  CHECK(requests.Next() == 1);
  requests.Put(Status(2));
  requests.Await([&] { return requests.overtaken.size() == 1; });
  CHECK_FALSE(requests.reader->Arrives(5ms));
  CHECK_FALSE(requests.reader->Next());
  CHECK(requests.reader->idled());
  requests.Put(Hello(3));
  CHECK_FALSE(requests.reader->Next());
  CHECK(requests.overtaken.size() == 1);
}

TEST_CASE("ticks come while a request with progress is under way, and only then") {
  Requests requests;
  requests.Put(Hello(1) +
               R"({"op": "run", "id": 2, "progress": true})"
               "\n" +
               Hello(3));
  CHECK(requests.Next() == 1);
  std::this_thread::sleep_for(20ms);
  CHECK(requests.ticks == 0);
  CHECK(requests.Next() == 2);
  requests.Await([&] { return requests.ticks > 3; });
  CHECK(requests.Next() == 3);
  const std::unique_lock lock(requests.mutex);
  const int ticks = requests.ticks;
  std::this_thread::sleep_for(50ms);
  CHECK(requests.ticks == ticks);
}

TEST_CASE("an input that cannot be read ahead is an error of the next request") {
  UniqueFd terminal(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  REQUIRE(terminal);
  REQUIRE(grantpt(terminal.get()) == 0);
  REQUIRE(unlockpt(terminal.get()) == 0);
  UniqueFd other(open(ptsname(terminal.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  REQUIRE(write(other.get(), "{\"id\": 1}\n", 10) == 10);
  RequestQueue queue;
  protocol::RequestReader reader(std::move(terminal), -1, queue, {[](const auto&) {}, [] {}});
  CHECK(reader.Next()->id() == Json(1));
  other.Reset();  // reading the terminal fails from now on
  CHECK_THROWS_AS(reader.Next(), std::system_error);
}

TEST_CASE("a cancel takes a waiting run out of the queue, and marks the one under way") {
  RequestQueue queue;
  for (const char* line : {R"({"op": "run", "id": "a"})", R"({"op": "run", "id": "b"})", R"({"op": "run"})",
                           R"({"op": "hello", "id": "c"})", R"({"op": "validate", "id": "d"})"})
    queue.Push(Parsed(line));
  const auto under_way = queue.Pop();
  const auto waited = queue.Cancel("b");
  REQUIRE(waited.waited);
  CHECK(waited.waited->id() == Json("b"));
  CHECK(waited.error.empty());
  CHECK(queue.waiting() == 3);

  const auto running = queue.Cancel("a");
  CHECK_FALSE(running.waited);
  CHECK(running.error.empty());
  CHECK(under_way->control.cancelled());
  CHECK(queue.Cancel("a").error.empty());  // the same again

  for (const char* id : {"b", "c", "x"}) {
    INFO(id);
    CHECK(queue.Cancel(id).error ==
          "no `run` or `validate` with the id \"" + std::string(id) +
              "\" waits or runs (\"a\" runs, \"d\" waits); it is answered or unknown");
  }
  CHECK(under_way->control.Close());
  CHECK_FALSE(under_way->control.Cancel());
  CHECK_FALSE(queue.Cancel("a").error.empty());
  CHECK(queue.Cancel("d").waited);
  CHECK(queue.Cancel(Json()).error ==
        "no `run` or `validate` with the id null waits or runs: none does; it is answered or unknown");
}

TEST_CASE("a cancel of an id that two runs have cancels none, and a long list of ids is cut") {
  RequestQueue queue;
  queue.Push(Parsed(R"({"op": "run", "id": 1})"));
  queue.Push(Parsed(R"({"op": "run", "id": 1})"));
  CHECK(queue.Pop());
  CHECK(queue.Cancel(1).error == "2 requests that wait or run have the id 1: none is cancelled");
  CHECK(queue.waiting() == 1);
  for (int i = 2; i < 20; ++i) queue.Push(Parsed(Json{{"op", "run"}, {"id", i}}.dump()));
  CHECK(queue.Cancel(99).error.find(
            "(1 runs, 1 waits, 2 waits, 3 waits, 4 waits, 5 waits, 6 waits, 7 waits, and 12 "
            "more wait)") != std::string::npos);
}

TEST_CASE("ranks are stopped at the first iteration that none had begun when the cancel came") {
  protocol::RunControl control;
  int notified = 0;
  control.OnCancel([&] { ++notified; });
  CHECK(control.MayBegin(0));
  CHECK(control.MayBegin(1));
  CHECK(control.begun() == 2);
  CHECK(control.Cancel());
  CHECK(control.Cancel());
  CHECK(notified == 1);
  CHECK(control.MayBegin(1));  // of a rank that is behind
  CHECK_FALSE(control.MayBegin(2));
  CHECK(control.begun() == 2);
  control.OnCancel([&] { ++notified; });
  CHECK(notified == 2);
}

}  // namespace cppool::test
