// `cppool serve`, a server of pools that stay; `cppool ps` says what they do, and `cppool stop` ends it.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "base/poll_timeout.h"
#include "base/unique_fd.h"
#include "client/command/command.h"
#include "client/command/interruption.h"
#include "client/server/server.h"
#include "client/src/attach.h"
#include "client/src/connection.h"
#include "client/src/daemon.h"
#include "protocol/json_text.h"

namespace cppool::command {
namespace {

constexpr double kIdleExit = 1800;               // seconds
constexpr std::chrono::seconds kAnswers{90};     // of a server that is asked
constexpr std::chrono::seconds kDaemonsEnd{60};  // when it stops

struct ServerArguments {
  std::string socket = "default";
  double idle_exit = kIdleExit;
  std::optional<std::string> launch;
  bool json = false;
};

void AddSocket(CLI::App& app, ServerArguments* arguments) {
  app.add_option(
         "--socket", arguments->socket,
         "Where the server listens: a path with a slash, or default: cppool.sock in $XDG_RUNTIME_DIR, "
         "else in /tmp/cppool-UID")
      ->envname("CPPOOL_ATTACH")
      ->check(IsServer)
      ->capture_default_str();
}

int Serve(const ServerArguments& arguments, const Streams& streams) {
  const std::string path = client::SocketPath(arguments.socket);
  std::promise<void> ended;
  std::mutex mutex;  // of the next two
  server::Server* listening = nullptr;
  bool interrupted = false;
  // The threads of the server have the signals blocked.
  const Interruption interruption(
      [&, over = ended.get_future().share()](int) {
        {
          const std::lock_guard lock(mutex);
          interrupted = true;
          if (listening) listening->Stop();
        }
        over.wait();
      },
      [] {});
  try {
    const auto server =
        std::make_unique<server::Server>(path, ToMilliseconds(arguments.idle_exit), arguments.launch);
    {
      const std::lock_guard lock(mutex);
      listening = server.get();
      if (interrupted) server->Stop();
    }
    streams.err << "cppool: serves at " << path << " (pid " << getpid() << ")" << std::endl;
    const std::string why = server->Run();
    {
      const std::lock_guard lock(mutex);
      listening = nullptr;
    }
    streams.err << "cppool: the server has ended: " << why << std::endl;
    ended.set_value();
    return kSuccess;
  } catch (const std::runtime_error& error) {
    streams.err << "cppool: " << error.what() << std::endl;
    ended.set_value();
    return kFailure;
  }
}

// Sends one line and returns the answer. `socket` then has the connection, and `pid` the server's.
Json AskServer(const ServerArguments& arguments, const char* op, base::UniqueFd* socket, pid_t* pid) {
  *socket = client::ConnectToServer(client::SocketPath(arguments.socket), pid);
  const std::string line = protocol::JsonText({{"op", op}}) + "\n";
  if (send(socket->get(), line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size()))
    throw std::runtime_error("the server takes no request");
  Json answer = protocol::ParseJson(client::ReadLineFrom(socket->get(), kAnswers));
  if (answer.value("ok", Json()) != true)
    throw std::runtime_error("the server refuses `" + std::string(op) +
                             "`: " + answer.value("error", "it does not say why"));
  return answer;
}

std::string SecondsOf(const Json& number) { return Fixed(number.get<double>(), 1) + " s"; }

void PrintPool(const Json& pool, std::ostream& out) {
  const auto text = [&](const char* name) { return pool.value(name, ""); };
  out << text("name") << ": ";
  if (pool["world_size"].is_null()) {
    out << "has not started yet";
  } else {
    out << "world size " << pool["world_size"] << ", " << DescribeWorld(pool) << ", "
        << (pool["up"] == true ? "pid " + pool["pid"].dump() : "ended");
  }
  out << ", " << text("daemon") << "\n";
  if (pool["memory"].is_array())
    for (const Json& rank : pool["memory"])
      out << "  rank " << rank["rank"] << ": device " << rank["device"] << ", "
          << Fixed(rank["held_bytes"].get<double>() / (1 << 30), 2) << " GiB held, "
          << Fixed(rank["free_bytes"].get<double>() / (1 << 30), 2) << " GiB free\n";
  const auto work = [&](const char* does, const Json& entry) {
    out << "  " << does << ": " << entry.value("request", "") << " of " << entry.value("client", "")
        << ", for " << SecondsOf(entry["seconds"]) << "\n";
  };
  if (!pool["running"].is_null()) work("runs", pool["running"]);
  for (const Json& entry : pool["waiting"]) work("waits", entry);
  if (!pool["idle_seconds"].is_null()) out << "  idle for " << SecondsOf(pool["idle_seconds"]) << "\n";
}

int Ps(const ServerArguments& arguments, const Streams& streams) {
  base::UniqueFd socket;
  pid_t pid = 0;
  const Json answer = AskServer(arguments, "ps", &socket, &pid);
  if (arguments.json) {
    PrintJson(streams.out, answer);
    return kSuccess;
  }
  streams.out << "server: pid " << answer["pid"] << ", " << answer.value("socket", "") << ", up for "
              << SecondsOf(answer["uptime_s"]) << "\n";
  for (const Json& pool : answer["pools"]) PrintPool(pool, streams.out);
  if (answer["pools"].empty()) streams.out << "no pool\n";
  return kSuccess;
}

int Stop(const ServerArguments& arguments, const Streams& streams) {
  base::UniqueFd socket;
  pid_t pid = 0;
  AskServer(arguments, "stop", &socket, &pid);
  // The end of the connection comes before that of the daemons: the lock of a server goes with its process.
  const auto until = client::Clock::now() + kDaemonsEnd;
  for (const base::UniqueFd process(client::OpenPidfd(pid)); process;) {
    pollfd fd = {process.get(), POLLIN, 0};
    if (poll(&fd, 1, base::PollTimeout(until)) > 0) break;
    if (client::Clock::now() >= until)
      throw std::runtime_error("the server (pid " + std::to_string(pid) +
                               ") has been told to stop, and has not ended");
  }
  streams.out << "the server (pid " << pid << ") has ended\n";
  return kSuccess;
}

template <typename Run>
void AddServerCommand(CLI::App& app, const Streams& streams, int* exit_code, const char* name,
                      const char* help, Run run,
                      const std::function<void(CLI::App&, ServerArguments*)>& add_options = nullptr) {
  auto arguments = std::make_shared<ServerArguments>();
  CLI::App* command = app.add_subcommand(name, help);
  AddSocket(*command, arguments.get());
  if (add_options) add_options(*command, arguments.get());
  command->callback([=] {
    try {
      *exit_code = run(*arguments, streams);
    } catch (const std::runtime_error& error) {
      streams.err << "cppool: " << error.what() << "\n";
      *exit_code = kFailure;
    }
  });
}

}  // namespace

void AddServe(CLI::App& app, const Streams& streams, int* exit_code) {
  AddServerCommand(app, streams, exit_code, "serve",
                   "Serves pools that stay, for commands, tests and notebooks of this user (--attach)", Serve,
                   [](CLI::App& serve, ServerArguments* arguments) {
                     AddSeconds(serve, "--idle-exit", &arguments->idle_exit,
                                "A daemon ends after so long without a request, and the server after so long "
                                "without a client")
                         ->capture_default_str();
                     AddLaunch(serve, &arguments->launch);
                   });
  AddServerCommand(app, streams, exit_code, "ps", "Says what the pools of a server are and do", Ps,
                   [](CLI::App& ps, ServerArguments* arguments) {
                     ps.add_flag("--json", arguments->json, "One JSON object");
                   });
  AddServerCommand(app, streams, exit_code, "stop",
                   "Ends a server and its daemons; requests that are under way are lost", Stop);
}

}  // namespace cppool::command
