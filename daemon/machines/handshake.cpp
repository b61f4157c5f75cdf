#include "daemon/machines/handshake.h"

#include <stdexcept>
#include <utility>

#include "base/hmac.h"

namespace cppool::daemon {
namespace {

using protocol::Json;

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

Json GreetAgent(FrameSocket& socket, const std::string& secret, FrameSocket::Clock::time_point limit) {
  const std::string own = base::RandomDigits();
  socket.Send({{"frame", "nonce"}, {"nonce", own}});
  const Json agent = socket.Next(limit);
  const std::string nonce = TextIn(agent, "agent", "nonce");
  if (!base::SameSecretText(TextIn(agent, "agent", "proof"), ProofOf("agent", secret, own, nonce)))
    throw std::runtime_error("it has another secret");
  socket.Send({{"frame", "welcome"}, {"proof", ProofOf("head", secret, own, nonce)}});
  socket.BeginBeats();
  return agent;
}

void GreetHead(FrameSocket& socket, const std::string& secret, Json about,
               FrameSocket::Clock::time_point limit) {
  const std::string heads = TextIn(socket.Next(limit), "nonce", "nonce"), own = base::RandomDigits();
  about["frame"] = "agent";
  about["nonce"] = own;
  about["proof"] = ProofOf("agent", secret, heads, own);
  socket.Send(about);
  if (!base::SameSecretText(TextIn(socket.Next(limit), "welcome", "proof"),
                            ProofOf("head", secret, heads, own)))
    throw std::runtime_error("it has another secret");
  socket.BeginBeats();
}

}  // namespace cppool::daemon
