#include "daemon/machines/handshake.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "base/hmac.h"

namespace cppool::daemon {
namespace {

using protocol::Json;

constexpr std::uint64_t kLongest = 24 * 3600 * 1000;  // ms

std::string ProofOf(const char* who, const std::string& secret, const std::string& heads,
                    const std::string& agents) {
  return base::HmacSha256(secret, std::string(who) + " " + heads + " " + agents);
}

// Throws when the frame is another one, or lacks the text.
std::string TextIn(const Json& frame, const char* name, const char* member) {
  const auto found = frame.find(member);
  if (frame.at("frame") != name || found == frame.end() || !found->is_string())
    throw std::runtime_error("it is no cppoold");
  return found->get<std::string>();
}

}  // namespace

Json GreetAgent(FrameSocket& socket, const std::string& secret, FrameSocket::Clock::time_point limit,
                FrameSocket::Clock::time_point all_limit) {
  const std::string own = base::RandomDigits();
  socket.Send({{"frame", "nonce"}, {"nonce", own}});
  const Json agent = socket.Next(limit);
  const std::string nonce = TextIn(agent, "agent", "nonce");
  if (!base::SameSecretText(TextIn(agent, "agent", "proof"), ProofOf("agent", secret, own, nonce)))
    throw std::runtime_error("it has another secret");
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(all_limit - FrameSocket::Clock::now());
  socket.Send({{"frame", "welcome"},
               {"proof", ProofOf("head", secret, own, nonce)},
               {"limit_ms", std::max<std::int64_t>(left.count(), 0)}});
  return agent;
}

std::chrono::milliseconds GreetHead(FrameSocket& socket, const std::string& secret, Json about,
                                    FrameSocket::Clock::time_point limit) {
  const std::string heads = TextIn(socket.Next(limit), "nonce", "nonce"), own = base::RandomDigits();
  about["frame"] = "agent";
  about["nonce"] = own;
  about["proof"] = ProofOf("agent", secret, heads, own);
  socket.Send(about);
  const Json welcome = socket.Next(limit);
  if (!base::SameSecretText(TextIn(welcome, "welcome", "proof"), ProofOf("head", secret, heads, own)))
    throw std::runtime_error("it has another secret");
  const auto found = welcome.find("limit_ms");  // a head of another version ends the start anyway
  return std::chrono::milliseconds(found != welcome.end() && found->is_number_unsigned()
                                       ? std::min<std::uint64_t>(found->get<std::uint64_t>(), kLongest)
                                       : 0);
}

}  // namespace cppool::daemon
