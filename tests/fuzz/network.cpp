// What comes over a connection between a head and an agent. The first byte says from whom: a stranger to a
// head (h) or to an agent (a), or an agent that has shown the secret.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"
#include "daemon/machines/agent_link.h"
#include "daemon/machines/frame_socket.h"
#include "daemon/machines/handshake.h"
#include "daemon/machines/library_frames.h"
#include "daemon/rank_report.h"
#include "daemon/trace_file.h"
#include "tests/fuzz/property.h"

namespace cppool::fuzz {
namespace {

using daemon::FrameSocket;
using protocol::Json;

const kernels::Place kPlace(2);
constexpr const char* kSecret = "a secret";

// The socket of a process to which another one says `input`, and then nothing more.
class Said {
 public:
  explicit Said(std::string_view input) : input_(input) {
    int ends[2];
    Require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "there are sockets");
    socket = std::make_unique<FrameSocket>(base::UniqueFd(ends[0]));
    other_ = base::UniqueFd(ends[1]);
  }
  void Say() {  // until all is said, or nobody listens
    for (std::string_view rest = input_; !rest.empty();) {
      const ssize_t sent = send(other_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
      if (sent <= 0) break;
      rest.remove_prefix(static_cast<std::size_t>(sent));
    }
    shutdown(other_.get(), SHUT_WR);
  }

  std::unique_ptr<FrameSocket> socket;

 private:
  const std::string_view input_;
  base::UniqueFd other_;
};

template <typename Greet>
void MustRefuse(std::string_view input, Greet greet) {
  Said said(input.substr(0, 2 * FrameSocket::kMostUnknown));  // the socket takes it all
  said.Say();
  try {
    greet(*said.socket, FrameSocket::Clock::now() + std::chrono::seconds(10));
  } catch (const std::exception& error) {
    return RequireErrorText(error.what());
  }
  Require(false, "nobody without the secret is taken");
}

void Take(const Json& frame) try {
  if (frame.contains("report")) {
    const Json report = ToJson(daemon::RankReportFrom(frame.at("report"), kPlace));
    Require(ToJson(daemon::RankReportFrom(report, kPlace)) == report,
            "a report is the same when it is written and read again", protocol::JsonText(report));
  }
  if (frame.contains("trace")) {
    const Json trace = ToJson(daemon::TraceRankFrom(frame.at("trace")));
    Require(ToJson(daemon::TraceRankFrom(trace)) == trace, "a trace is the same when it is read again");
  }
  if (frame.contains("data")) {
    const std::string bytes = daemon::FromBase64(frame.at("data").get<std::string>());
    Require(daemon::FromBase64(daemon::ToBase64(bytes)) == bytes, "bytes are the same in base64");
  }
} catch (const std::exception& error) {
  Require(*error.what() != 0, "an error has a text");
}

void TakeAll(std::string_view input) {
  Said said(input);
  std::promise<void> gone;
  daemon::AgentLink link(
      {0, "node", 1, std::move(said.socket)}, kPlace,
      {{},
       [](const std::string& text) { Require(IsUtf8(text), "what a fault writes is UTF-8"); },
       [](const Json&) {}});
  link.Follow([&gone](Json* frame) {
    if (frame == nullptr) return gone.set_value();
    Take(*frame);
  });
  link.BeginRun(1);
  said.Say();
  Require(gone.get_future().wait_for(std::chrono::seconds(60)) == std::future_status::ready,
          "the end of an agent is seen");
  RequireErrorText(link.Gone());
  for (int rank = 0; rank < kPlace.ranks; ++rank)
    while (const auto frame = link.NextOf(rank)) Take(*frame);
  while (const auto frame = link.NextOfStart(FrameSocket::Clock::now())) Take(*frame);
  if (const auto crash = link.Crash()) Require(crash->is_object(), "a crash is a frame");
}

}  // namespace
}  // namespace cppool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace cppool::fuzz;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.empty()) return 0;
  const std::string_view rest = input.substr(1);
  if (input[0] == 'h')
    MustRefuse(rest,
               [](FrameSocket& socket, auto limit) { cppool::daemon::GreetAgent(socket, kSecret, limit); });
  else if (input[0] == 'a')
    MustRefuse(rest, [](FrameSocket& socket, auto limit) {
      cppool::daemon::GreetHead(socket, kSecret, {{"node", "a"}}, limit);
    });
  else
    TakeAll(rest);
  return 0;
}
