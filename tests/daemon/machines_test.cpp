// What a head and an agent say to each other, with somebody else at the other end: wrong secrets, garbage,
// silence.
#include <sys/socket.h>

#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "daemon/machines/agent_link.h"
#include "daemon/machines/frame_socket.h"
#include "daemon/machines/handshake.h"
#include "daemon/machines/launcher.h"
#include "daemon/machines/library_frames.h"
#include "daemon/start_error.h"
#include "tests/catch.h"

namespace cppool::test {
namespace {

using base::UniqueFd;
using Catch::Matchers::ContainsSubstring;
using daemon::FrameSocket;
using protocol::Json;
using Clock = FrameSocket::Clock;

std::pair<UniqueFd, UniqueFd> Sockets() {
  int fds[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

// What each side throws; empty: it has greeted the other.
std::pair<std::string, std::string> Greet(const std::string& heads, const std::string& agents) {
  auto [head, agent] = Sockets();
  FrameSocket at_head(std::move(head)), at_agent(std::move(agent));
  const auto limit = Clock::now() + std::chrono::seconds(2);
  const auto text = [](auto&& greet) -> std::string {
    try {
      greet();
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  };
  auto other = std::async(std::launch::async, [&] {
    return text([&] { daemon::GreetHead(at_agent, agents, {{"version", "1"}}, limit); });
  });
  Json about;
  const std::string own = text([&] { about = daemon::GreetAgent(at_head, heads, limit); });
  if (own.empty()) CHECK(about.at("version") == "1");
  if (!own.empty()) at_head.Shut();
  return {own, other.get()};
}

// Why the reader ends after these bytes.
std::string GoneAfter(const std::string& bytes) {
  auto [own, other] = Sockets();
  FrameSocket socket(std::move(own));
  std::promise<std::string> gone;
  socket.Start({[](Json frame) { frame.at("frame").get<std::string>(); },
                [&](const std::string& why) { gone.set_value(why); }});
  REQUIRE(write(other.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  other.Reset();
  auto why = gone.get_future();
  REQUIRE(why.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
  return why.get();
}

}  // namespace

TEST_CASE("machines: the words of a launcher are those of a shell, without expansion") {
  using Words = std::vector<std::string>;
  CHECK(daemon::SplitWords("srun -N 2") == Words{"srun", "-N", "2"});
  CHECK(daemon::SplitWords(" \t a  'b  c' \"d \\\" e\" f\\ g '' x'y'\"z\"\n") ==
        Words{"a", "b  c", "d \" e", "f g", "", "xyz"});
  CHECK(daemon::SplitWords("$HOME `ls` *;|&") == Words{"$HOME", "`ls`", "*;|&"});
  CHECK(daemon::SplitWords("'a\\b' \"a\\b\"") == Words{"a\\b", "a\\b"});
  CHECK_THROWS_WITH(daemon::SplitWords("a 'b"), ContainsSubstring("is not closed"));
  CHECK_THROWS_WITH(daemon::SplitWords(" \t"), ContainsSubstring("--launch is empty"));
}

TEST_CASE("machines: base64 of any bytes, and nothing else") {
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    CHECK(daemon::FromBase64(daemon::ToBase64(bytes)) == bytes);
    bytes += static_cast<char>(i * 7);
  }
  CHECK(daemon::ToBase64("foobar") == "Zm9vYmFy");
  CHECK(daemon::ToBase64("fooba") == "Zm9vYmE=");
  CHECK(daemon::ToBase64("foob") == "Zm9vYg==");
  for (const char* wrong : {"Zm9", "Zm9v!mFy", "Z===", "Zm=v", "Zm9vYg==Zm9v"})
    CHECK_THROWS(daemon::FromBase64(wrong));
}

TEST_CASE("machines: who has the secret is recognised, on both sides") {
  CHECK(Greet("secret", "secret") == std::pair<std::string, std::string>());
  const auto [head, agent] = Greet("secret", "another");
  CHECK(head == "it has another secret");
  CHECK(agent == "it closed the connection");
}

TEST_CASE("machines: an agent does not obey a head without the secret") {
  auto [own, other] = Sockets();
  FrameSocket head(std::move(own)), agent(std::move(other));
  auto greeted = std::async(std::launch::async, [&] {
    daemon::GreetHead(agent, "secret", Json::object(), Clock::now() + std::chrono::seconds(2));
  });
  head.Send({{"frame", "nonce"}, {"nonce", "1"}});
  CHECK_FALSE(head.Next(Clock::now() + std::chrono::seconds(2)).dump().find("secret") != std::string::npos);
  head.Send({{"frame", "welcome"}, {"proof", std::string(64, '0')}});
  CHECK_THROWS_WITH(greeted.get(), "it has another secret");
}

TEST_CASE("machines: strangers are limited in bytes and time") {
  auto [own, other] = Sockets();
  FrameSocket head(std::move(own));
  const auto soon = Clock::now() + std::chrono::milliseconds(50);
  CHECK_THROWS_WITH(daemon::GreetAgent(head, "secret", soon), "it sent nothing in time");
  const std::string much(FrameSocket::kMostUnknown + 1, 'x');
  REQUIRE(write(other.get(), much.data(), much.size()) == static_cast<ssize_t>(much.size()));
  CHECK_THROWS_WITH(head.Next(Clock::now() + std::chrono::seconds(5)), "it sent too much");

  auto [mine, theirs] = Sockets();
  FrameSocket agent(std::move(mine));
  const std::string frame = "{\"frame\": \"" + much + "\"}\n";
  REQUIRE(write(theirs.get(), frame.data(), frame.size()) == static_cast<ssize_t>(frame.size()));
  CHECK_THROWS_WITH(agent.Next(Clock::now() + std::chrono::seconds(5)), "it sent too much");
}

TEST_CASE("machines: a long frame may come with the last one of the handshake") {
  auto [own, other] = Sockets();
  FrameSocket agent(std::move(own));
  const std::string frames = "{\"frame\": \"welcome\"}\n{\"frame\": \"run\", \"sentinel\": \"" +
                             std::string(FrameSocket::kMostUnknown, 'x') + "\"}\n";
  REQUIRE(write(other.get(), frames.data(), frames.size()) == static_cast<ssize_t>(frames.size()));
  CHECK(agent.Next(Clock::now() + std::chrono::seconds(5)) == Json{{"frame", "welcome"}});
  std::promise<Json> second;
  agent.Start({[&](Json frame) { second.set_value(std::move(frame)); }, [](const std::string&) {}});
  CHECK(second.get_future().get().at("frame") == "run");
}

TEST_CASE("machines: bytes that are no frames end the connection, whatever they are") {
  CHECK(GoneAfter("{\"frame\": \"a\"}\n{\"frame\": \"beat\"}\n") == "its connection ended");
  CHECK(GoneAfter("[]\n") == "it sent what is no frame");
  CHECK(GoneAfter("{\"frame\": 1}\n") == "it sent what is no frame");
  std::mt19937 random(1234);
  const std::string alphabet = "{}[]\":,\\ \n\t0123456789eE.-framebtnull\x80\xff";
  for (int round = 0; round < 300; ++round) {
    std::string bytes = "{\"frame\": \"";
    for (std::size_t i = random() % 200; i > 0; --i) bytes += alphabet[random() % alphabet.size()];
    CHECK_FALSE(GoneAfter(bytes + "\n").empty());
  }
  CHECK_FALSE(GoneAfter("{\"frame\": " + std::string(5000, '[') + "\n").empty());
}

// A start that is refused ends links whose agents are going at that moment.
TEST_CASE("machines: a link tells that its agent has gone before it ends") {
  for (int round = 0; round < 200; ++round) {
    auto [own, other] = Sockets();
    std::string gone;
    {
      daemon::GreetedAgent agent;
      agent.node = "a";
      agent.socket = std::make_unique<FrameSocket>(std::move(own));
      daemon::AgentLink::Events events;
      events.gone = [&](const daemon::AgentLink&, const std::string& why) { gone = why; };
      daemon::AgentLink link(std::move(agent), kernels::Place(1, 0, 1), std::move(events));
      if (round % 2 == 0) other.Reset();
    }
    CHECK(gone == "its connection ended");
  }
}

}  // namespace cppool::test
