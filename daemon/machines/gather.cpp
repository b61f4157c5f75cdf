#include "daemon/machines/gather.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/hmac.h"
#include "base/poll_timeout.h"
#include "daemon/log.h"
#include "daemon/machines/handshake.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using Clock = std::chrono::steady_clock;
using protocol::FailureKind;
using protocol::Json;

constexpr std::chrono::seconds kGreetLimit{5};
constexpr std::size_t kMostGreeted = 64;  // at once
// Of one that says nothing: while another waits and they are so many, or when all agents are there.
constexpr std::chrono::seconds kSilentLimit{1};
constexpr const char* kAddressVariable = "CPPOOL_HEAD_ADDRESS";

// The address of this machine that packets to other networks come from: nothing is sent to find it.
std::string OwnAddress() {
  const base::UniqueFd probe(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(9);
  inet_pton(AF_INET, "192.0.2.1", &address.sin_addr);  // of RFC 5737: for documentation
  socklen_t size = sizeof(address);
  std::array<char, INET_ADDRSTRLEN> text{};
  if (!probe || connect(probe.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      !inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size()))
    return "127.0.0.1";
  return text.data();
}

struct Listener {
  base::UniqueFd socket;
  std::string address;  // "HOST:PORT", for agents
};

Listener Listen() {
  const char* const wanted = std::getenv(kAddressVariable);
  const std::string host = wanted && *wanted ? wanted : OwnAddress();
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_family = AF_INET;
  if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0)
    throw StartError(std::string(kAddressVariable) + "=" + host + ": " + gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, freeaddrinfo);
  base::UniqueFd listener(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_in bound{};
  socklen_t size = sizeof(bound);
  if (!listener || bind(listener.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      listen(listener.get(), 1024) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &size) != 0)
    throw StartError("the head cannot listen at " + host + ": " + std::strerror(errno) + "; set " +
                     kAddressVariable + " to an address of this machine that the nodes reach");
  return {std::move(listener), host + ":" + std::to_string(ntohs(bound.sin_port))};
}

// What threads that greet have found.
struct Greeted {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<Json, std::unique_ptr<FrameSocket>>> agents;
  int begun = 0, dropped = 0;
  std::map<int, std::pair<Clock::time_point, FrameSocket*>> under_way;  // since when; the oldest one first
  std::string why_dropped;                                              // the last one
};

void Greet(const std::shared_ptr<Greeted>& greeted, int number, std::unique_ptr<FrameSocket> frames,
           const std::string& secret) {
  Json about;
  std::string why;
  try {
    about = GreetAgent(*frames, secret, Clock::now() + kGreetLimit);
  } catch (const std::exception& error) {
    why = frames->peer_address() + ": " + error.what();
  }
  const std::lock_guard lock(greeted->mutex);
  greeted->under_way.erase(number);
  if (why.empty()) {
    greeted->agents.emplace_back(std::move(about), std::move(frames));
  } else {
    ++greeted->dropped;
    greeted->why_dropped = why;
  }
  greeted->changed.notify_all();
}

std::string NodesOf(const std::vector<GreetedAgent>& agents) {
  std::string nodes;
  for (const GreetedAgent& agent : agents) nodes += (nodes.empty() ? "" : ", ") + agent.node;
  return nodes.empty() ? "none" : nodes;
}

int NumberIn(const Json& about, const char* member) {
  const auto found = about.find(member);
  return found != about.end() && found->is_number_integer() ? found->get<int>() : -1;
}

// Throws StartError where the agent does not fit those that have come.
void Add(std::vector<GreetedAgent>& agents, int& expected, const Json& about,
         std::unique_ptr<FrameSocket> socket, int world_size, const std::string& version) {
  const std::string node = about.value("node", "?"), theirs = about.value("version", "?");
  if (theirs != version)
    throw StartError("the agent on node " + node + " is cppoold " + theirs + ", and this one is " + version +
                     ": install the same on all nodes");
  const int of = NumberIn(about, "agents"), index = NumberIn(about, "index");
  if (of < 1)
    throw StartError("the agent on node " + node +
                     " does not know how many there are: srun and mpirun say so; another launcher sets "
                     "CPPOOL_AGENTS to their number, and may set CPPOOL_AGENT_INDEX, from 0");
  if (expected == 0) expected = of;
  if (of != expected)
    throw StartError("the agent on node " + node + " is one of " + std::to_string(of) +
                     ", and others are of " + std::to_string(expected));
  if (world_size % expected != 0)
    throw StartError("a world of " + std::to_string(world_size) + " ranks cannot be shared evenly by " +
                     std::to_string(expected) + " agents: change --world-size, or how many --launch starts");
  GreetedAgent agent{index < 0 ? static_cast<int>(agents.size()) : index, node, NumberIn(about, "pid"),
                     std::move(socket)};
  const bool twice = std::any_of(agents.begin(), agents.end(),
                                 [&](const GreetedAgent& other) { return other.index == agent.index; });
  if (agent.index >= expected || twice)
    throw StartError("more agents have come than the " + std::to_string(expected) +
                     " that there should be, the last one from node " + node +
                     " (others: " + NodesOf(agents) + "): does the launcher start everything twice?");
  Log(LogLevel::kInfo, "agent " + std::to_string(agents.size() + 1) + " of " + std::to_string(expected) +
                           " has come, from node " + node);
  agents.push_back(std::move(agent));
}

void MakeNamesUnique(std::vector<GreetedAgent>& agents) {
  std::map<std::string, int> count;
  for (const GreetedAgent& agent : agents) ++count[agent.node];
  for (GreetedAgent& agent : agents)
    if (count[agent.node] > 1) agent.node += ":" + std::to_string(agent.index);
}

}  // namespace

std::vector<GreetedAgent> GatherAgents(const Launch& launch, int world_size, const std::string& version,
                                       Clock::time_point limit) {
  Listener listener = Listen();
  const std::string secret = base::RandomDigits();
  std::array<char, PATH_MAX> own{};
  if (readlink("/proc/self/exe", own.data(), own.size() - 1) <= 0)
    throw StartError("the path of cppoold is not known", FailureKind::kInternal);
  Launcher& launcher =
      launch({own.data(), "--agent", listener.address}, {std::string(kSecretVariable) + "=" + secret});
  const auto greeted = std::make_shared<Greeted>();
  std::vector<GreetedAgent> agents;
  int expected = 0;
  const auto so_far = [&] {
    const std::lock_guard lock(greeted->mutex);
    std::string text = agents.empty() ? "no agent had come"
                                      : std::to_string(agents.size()) + " of " + std::to_string(expected) +
                                            " agents had come (" + NodesOf(agents) + ")";
    if (greeted->dropped > 0)
      text += "; " + std::to_string(greeted->dropped) + " connections were dropped, the last one from " +
              greeted->why_dropped + ": does the launcher pass on " + kSecretVariable + "? (mpirun: -x " +
              kSecretVariable + ")";
    return text;
  };
  std::optional<Clock::time_point> complete;  // since when
  for (;;) {
    pollfd ready = {listener.socket.get(), POLLIN, 0};
    const auto soon = std::min(limit, Clock::now() + std::chrono::milliseconds(50));
    std::unique_lock lock(greeted->mutex);
    const bool full = greeted->under_way.size() >= kMostGreeted;
    lock.unlock();
    const bool comes = poll(&ready, 1, full || complete ? 0 : base::PollTimeout(soon)) > 0;
    lock.lock();
    if (full) {
      if (const auto oldest = greeted->under_way.begin();
          comes && oldest != greeted->under_way.end() && oldest->second.first + kSilentLimit < Clock::now())
        oldest->second.second->Shut();  // the one that comes may be an agent
      greeted->changed.wait_until(lock, soon);
    } else if (comes) {
      base::UniqueFd socket(accept4(listener.socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket) {
        auto frames = std::make_unique<FrameSocket>(std::move(socket));
        const int number = ++greeted->begun;
        greeted->under_way[number] = {Clock::now(), frames.get()};
        std::thread([greeted, number, secret, frames = std::move(frames)]() mutable {
          Greet(greeted, number, std::move(frames), secret);
        }).detach();
        greeted->changed.wait_for(lock, std::chrono::milliseconds(5));  // mostly, it is there at once
      }
    } else if (complete && !greeted->under_way.empty()) {
      greeted->changed.wait_until(lock, soon);
    }
    std::deque<std::pair<Json, std::unique_ptr<FrameSocket>>> come;
    come.swap(greeted->agents);
    const bool greeting = !greeted->under_way.empty();
    lock.unlock();
    for (auto& [about, socket] : come) Add(agents, expected, about, std::move(socket), world_size, version);
    if (expected > 0 && static_cast<int>(agents.size()) >= expected) {
      // Who has connected by now may be one too many, for Add to refuse.
      if (!complete) complete = Clock::now();
      if ((!comes && !greeting) || Clock::now() >= std::min(limit, *complete + kSilentLimit)) break;
      continue;
    }
    if (const auto ended = launcher.Ended(Clock::now()); ended && !greeting && come.empty() && !comes)
      throw StartError(
          "--launch: " + launcher.name() + " " + *ended + " when " + so_far() + "; see its output",
          FailureKind::kInternal);
    for (const GreetedAgent& agent : agents) try {
        agent.socket->CheckAlive();
      } catch (const std::exception& error) {
        // Another agent that could not start may be why: mpirun ends all then.
        const auto ended = launcher.Ended(std::min(limit, Clock::now() + std::chrono::seconds(1)));
        throw StartError("--launch: the agent on node " + agent.node + " was lost when " + so_far() + ": " +
                             error.what() + (ended ? ", and " + launcher.name() + " " + *ended : "") +
                             "; see the launcher's output",
                         FailureKind::kInternal);
      }
    if (Clock::now() >= limit)
      throw StartError("--launch: the agents did not come in time: " + so_far(), FailureKind::kTimeout);
  }
  std::sort(agents.begin(), agents.end(),
            [](const GreetedAgent& a, const GreetedAgent& b) { return a.index < b.index; });
  MakeNamesUnique(agents);
  return agents;
}

AgentPlace PlaceFromEnvironment() {
  const auto number = [](const char* name) {
    const char* const text = std::getenv(name);
    if (!text || !*text) return -1;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    return *end == 0 && value >= 0 && value < 1 << 20 ? static_cast<int>(value) : -1;
  };
  // mpirun within a job of Slurm sets both, and then its own counts.
  constexpr std::array<std::pair<const char*, const char*>, 4> kNames = {
      {{"CPPOOL_AGENT_INDEX", "CPPOOL_AGENTS"},
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
       {"PMI_RANK", "PMI_SIZE"},
       {"SLURM_PROCID", "SLURM_NTASKS"}}};
  for (const auto& [index, agents] : kNames)
    if (const int of = number(agents); of > 0) return {number(index), of};
  return {};
}

std::string NodeName() {
  if (const char* const slurm = std::getenv("SLURMD_NODENAME"); slurm && *slurm) return slurm;
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace cppool::daemon
