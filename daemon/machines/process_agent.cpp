#include "daemon/machines/process_agent.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "daemon/log.h"
#include "daemon/process_frames.h"
#include "daemon/start_error.h"

namespace cppool::daemon {
namespace {

using protocol::Json;
using Clock = RankProcess::Clock;

constexpr std::chrono::seconds kCheckLimit{5}, kEndLimit{5};

Clock::time_point LimitOf(const Json& frame) {
  return Clock::now() + std::chrono::milliseconds(frame.at("limit_ms").get<std::int64_t>());
}

// The network interface of this machine that has the address; empty: none has.
std::string InterfaceOf(const std::string& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(all, freeifaddrs);
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    std::array<char, INET_ADDRSTRLEN> text{};
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, text.data(),
              text.size());
    if (address == text.data()) return each->ifa_name;
  }
  return "";
}

Json ToJson(const RankProcess::Place& place) {
  return {{"phase", static_cast<int>(place.phase)},
          {"seconds", place.seconds},
          {"iterations", place.iterations},
          {"stage", place.stage}};
}

}  // namespace

struct ProcessAgent::World {
  // What the head has sent to a rank, and it has not read yet: one that is stopped keeps no other waiting.
  struct Mail {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Json> frames;
    bool ended = false;
  };

  World(std::uint64_t number, RankServer::Ranks its_ranks)
      : number(number), ranks(std::move(its_ranks)), mails(ranks.size()) {}

  RankProcess* Find(const Json& frame, std::size_t& index) const {
    if (frame.at("world") != number) return nullptr;
    index = static_cast<std::size_t>(frame.at("rank").get<int>() - ranks.front()->rank());
    return index < ranks.size() ? ranks[index].get() : nullptr;
  }

  const std::uint64_t number;
  const RankServer::Ranks ranks;
  std::vector<Mail> mails;
};

ProcessAgent::ProcessAgent(FrameSocket& head, const kernels::Place& place, int node, BackendChoice backend)
    : head_(head), place_(place), node_(node), backend_(backend) {
  // Ranks of one machine meet on its loopback interface, unless torch's gloo is told another one.
  if (place.ranks == place.world_size) return;
  if (const std::string interface = InterfaceOf(head.own_address()); !interface.empty())
    setenv("GLOO_SOCKET_IFNAME", interface.c_str(), 0);
}

void ProcessAgent::Do(const Json& job, Json& answer) {
  const std::string name = job.at("frame");
  if (name == "server") Start(job, answer);
  if (name == "fork") Fork(job, answer);
  if (name == "check")
    answer["changed"] = server_ ? server_->Changed(Clock::now() + kCheckLimit) : std::vector<std::string>();
}

void ProcessAgent::Start(const Json& job, Json& answer) {
  Close();
  auto server = std::make_shared<ForkServer>(
      ForkServer::Options{.python = FindPython(job.at("python").get<std::string>()),
                          .preload = job.at("preload").get<std::vector<std::string>>(),
                          .devices = ForkServer::VisibleDevices(backend_, place_.ranks)},
      LimitOf(job));
  const ForkServerInfo& info = server->info();
  answer["python"] = info.python;
  answer["torch"] = info.torch;
  answer["preloaded"] = info.preloaded;
  answer["deferred"] = info.deferred;
  answer["import_ms"] = info.import_ms;
  const std::lock_guard lock(mutex_);
  server_ = std::move(server);
}

void ProcessAgent::Fork(const Json& job, Json& answer) {
  if (!server_) throw StartError("there is no fork server");
  // The head knows how they have ended.
  if (world_ && !server_->KillAll(world_->ranks, Clock::now() + kEndLimit))
    Log(LogLevel::kError, "a rank has not ended after SIGKILL: what it holds is lost");
  ForkServer::Seats seats{.size = place_.world_size,
                          .first = place_.first,
                          .ranks = place_.ranks,
                          .node = node_,
                          .backend = job.at("backend"),
                          .host = job.at("host"),
                          .port = job.at("port"),
                          .listener = -1};
  base::UniqueFd listener;
  if (place_.first == 0) try {
      seats.host = head_.own_address();
      std::tie(listener, seats.port) = ForkServer::Listen(seats.host);
      seats.listener = listener.get();
    } catch (const std::system_error& error) {
      throw StartError(error.what(), protocol::FailureKind::kInternal);
    }
  auto world = std::make_shared<World>(job.at("world").get<std::uint64_t>(), server_->Start(seats));
  answer["host"] = seats.host;
  answer["port"] = seats.port;
  for (std::size_t i = 0; i < world->ranks.size(); ++i) {
    const auto about = [number = world->number, rank = world->ranks[i]->rank()](const char* name) {
      return Json{{"frame", name}, {"world", number}, {"rank", rank}};
    };
    std::thread([this, world, i, about] {
      pthread_setname_np(pthread_self(), "of rank");
      RankProcess& rank = *world->ranks[i];
      const auto add_output = [&rank](Json& frame) {
        frame["output"] = rank.Output();
        frame["left_out"] = rank.LeftOut();
      };
      while (auto data = rank.Next()) {
        Json frame = about("of_rank");
        if (data->value("frame", "") == "report") add_output(frame);
        frame["data"] = std::move(*data);
        head_.Send(frame);
      }
      Json frame = about("ended");
      frame["how"] = rank.End().value_or("ended");
      add_output(frame);
      frame["stacks"] = rank.Stacks();
      frame["place"] = ToJson(rank.Where());
      head_.Send(frame);
      World::Mail& mail = world->mails[i];
      const std::lock_guard lock(mail.mutex);
      mail.ended = true;
      mail.changed.notify_all();
    }).detach();
    std::thread([world, i] {
      pthread_setname_np(pthread_self(), "to rank");
      World::Mail& mail = world->mails[i];
      for (std::unique_lock lock(mail.mutex);;) {
        mail.changed.wait(lock, [&] { return mail.ended || !mail.frames.empty(); });
        if (mail.ended) return;
        const Json frame = std::move(mail.frames.front());
        mail.frames.pop_front();
        lock.unlock();
        if (frame.at("frame") == "load") world->ranks[i]->BeginCase();
        world->ranks[i]->Send(frame);
        lock.lock();
      }
    }).detach();
  }
  const std::lock_guard lock(mutex_);
  world_ = std::move(world);
}

bool ProcessAgent::Take(const Json& frame) {
  const std::string name = frame.at("frame");
  if (name != "to_rank" && name != "kill" && name != "look") return false;
  std::shared_ptr<ForkServer> server;
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(mutex_);
    server = server_;
    world = world_;
  }
  std::size_t index = 0;
  RankProcess* const rank = server && world ? world->Find(frame, index) : nullptr;
  if (name == "look") {
    std::thread([this, frame, server, world, rank] {
      Json answer = {{"frame", "answer"}, {"ask", frame.at("ask")}};
      if (rank != nullptr) {
        const auto look = server->LookAt(*rank, frame.at("stacks"), LimitOf(frame));
        answer.update({{"answered", look.answered},
                       {"stacks", look.stacks},
                       {"text", look.text},
                       {"state", look.state},
                       {"place", ToJson(look.place)}});
      }
      head_.Send(answer);
    }).detach();
  } else if (rank != nullptr && name == "kill") {
    server->Kill(*rank);
  } else if (rank != nullptr) {
    World::Mail& mail = world->mails[index];
    const std::lock_guard lock(mail.mutex);
    mail.frames.push_back(frame.at("data"));
    mail.changed.notify_all();
  }
  return true;
}

void ProcessAgent::Close() {
  std::shared_ptr<ForkServer> server;
  std::shared_ptr<World> world;  // of this server
  const std::lock_guard lock(mutex_);
  server.swap(server_);
  world.swap(world_);
}

}  // namespace cppool::daemon
