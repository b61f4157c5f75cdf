// How a head and an agent recognise each other: each shows by HMAC of two random numbers that it has the
// secret, which is never sent. What follows on the connection is neither encrypted nor signed: it is for
// networks whose hosts are trusted.
#pragma once

#include <string>

#include "daemon/machines/frame_socket.h"
#include "protocol/json_text.h"

namespace cppool::daemon {

inline constexpr const char* kSecretVariable = "CPPOOL_SECRET";

// At the head: what the agent says of itself. Throws std::runtime_error: it is none, or has another secret.
// From its end on both sides send heartbeats.
protocol::Json GreetAgent(FrameSocket& socket, const std::string& secret,
                          FrameSocket::Clock::time_point limit);
// At the agent, which says `about`. Throws std::runtime_error: there is no head, or it has another secret.
void GreetHead(FrameSocket& socket, const std::string& secret, protocol::Json about,
               FrameSocket::Clock::time_point limit);

}  // namespace cppool::daemon
