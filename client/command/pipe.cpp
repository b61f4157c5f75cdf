// `cppool pipe`: the daemon's protocol over stdin and stdout, in front of a Pool. Its limits and its respawn
// are the library's, and a request whose daemon gives no answer has one all the same.
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "base/event.h"
#include "base/stdout_channel.h"
#include "client/command/command.h"
#include "client/command/interruption.h"
#include "client/command/libraries.h"
#include "client/src/describe.h"
#include "client/src/request.h"
#include "protocol/json_text.h"
#include "protocol/request_reader.h"
#include "protocol/response.h"
#include "protocol/start.h"

namespace cppool::command {
namespace {

using protocol::FailureKind;

constexpr const char* kNotBegun = "cancelled before its first iteration";

struct PipeArguments {
  DaemonArguments daemon;
  RunOptions defaults;
  double deadline = std::chrono::duration<double>(defaults.deadline).count();
};

void WriteStderr(std::string_view before, std::string_view line) {
  std::string text(before);
  text += line;
  text += '\n';
  std::ignore = base::WriteAll(STDERR_FILENO, text);
}

// The answer to a request that has not been done; to a run and a validation with the members that these have.
Json Failed(protocol::Failure failure, const protocol::IncomingRequest& request) {
  if (!request.run()) return protocol::ErrorResponse(failure, request.id());
  protocol::RunResult result;
  result.error = failure.detail;
  result.failure = std::move(failure);
  return protocol::ToJson(result, request.id());
}

Json Failed(FailureKind kind, const std::string& why, const protocol::IncomingRequest& request) {
  return Failed({kind, std::nullopt, "", why}, request);
}

Json WithAttempts(Result result) {
  Json answer = std::move(result.json);
  client::AddLost(result.flaky, result.lost, &answer);
  return answer;
}

// The answer for a request whose daemon gave none.
Json NoAnswer(const PoolError& error, const protocol::IncomingRequest& request) {
  // What the daemon wrote is on this stderr, too.
  Json answer = Failed(client::FailureOf(error), request);
  answer["no_answer"] = client::Describe(error);
  answer["no_answer"].erase("error");  // the answer has it
  return answer;
}

class Pipe {
 public:
  Pipe(const PipeArguments& arguments, base::UniqueFd requests, base::StdoutChannel answers)
      : arguments_(arguments), answers_(std::move(answers)), requests_(std::move(requests)), pool_([&] {
          PoolOptions options = arguments.daemon.pool;
          options.on_stderr = [](std::string_view line) { WriteStderr("", line); };
          options.log = [this](std::string_view line) { TakeLog(line); };
          options.interrupted = [this] { return interrupted_ || ending_ || NobodyReads(); };
          return options;
        }()) {}

  int Serve(const Streams& streams) {
    const Interruption interruption([this](int signal) { End(signal); }, [this] { TellWhere(); });
    const std::optional<Libraries> libraries = MakeLibraries(
        arguments_.daemon.libraries, {}, [this] { return pool_.Hello(); }, streams.err, false);
    if (!libraries) return kFailure;
    RunOptions defaults = arguments_.defaults;
    defaults.deadline = ToMilliseconds(arguments_.deadline);
    defaults.load = libraries->load;
    {
      protocol::RequestReader reader(
          std::move(requests_), stop_.fd(), queue_,
          {[this](const protocol::IncomingRequest& request) { Overtake(request); }, [] {}}, std::nullopt,
          std::move(defaults));
      while (const auto request = reader.Next())
        if (!Handle(*request)) break;
    }
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    if (NobodyReads()) WriteStderr("cppool: ", "nobody reads stdout: the answers that were left are lost");
    return NobodyReads() ? kFailure : kSuccess;
  }

 private:
  // False: nothing more is to be answered.
  bool Handle(protocol::IncomingRequest& incoming) {
    current_id_ = incoming.id();
    interrupted_ = false;
    // The pool is asked by the thread that reads; the call may not have begun, or have ended.
    incoming.control.OnCancel([this] { interrupted_ = !CancelCall(); });
    Json answer = incoming.control.cancelled() ? Failed(FailureKind::kCancelled, kNotBegun, incoming)
                                               : AnswerTo(incoming);
    {
      const std::lock_guard lock(overtaking_);  // the answer to a cancel comes before that of its run
      if (incoming.control.Close() && !protocol::FailedWith(answer, FailureKind::kCancelled))
        answer = Failed(FailureKind::kCancelled, "cancelled when it had ended", incoming);
      incoming.control.OnCancel({});
      Write(answer);
    }
    if (ending_)
      while (const auto waiting = queue_.Pop())
        Write(Failed(FailureKind::kCancelled, "cancelled before it began: " + WhyEnding(), *waiting));
    const bool shutdown = incoming.request() &&
                          std::holds_alternative<protocol::ShutdownRequest>(incoming.request()->operation);
    return !shutdown && !ending_ && !NobodyReads();
  }

  Json AnswerTo(const protocol::IncomingRequest& incoming) {
    if (const auto* error = std::get_if<protocol::RequestError>(&incoming.content))
      return protocol::ErrorResponse({FailureKind::kInvalidRequest, std::nullopt, "", error->what()},
                                     error->id);
    try {
      Json answer = Ask(incoming.request()->operation);
      protocol::SetId(answer, incoming.id());
      return answer;
    } catch (const PoolError& error) {
      return NoAnswer(error, incoming);
    } catch (const std::invalid_argument& error) {
      return Failed(FailureKind::kInvalidRequest, error.what(), incoming);
    }
  }

  Json Ask(const protocol::Operation& operation) {
    if (const auto* run = std::get_if<protocol::RunRequest>(&operation))
      return WithAttempts(client::PoolAccess::Run(pool_, *run));
    if (const auto* validate = std::get_if<protocol::ValidateRequest>(&operation))
      return WithAttempts(client::PoolAccess::Validate(pool_, validate->run));
    if (const auto* list = std::get_if<protocol::ListRequest>(&operation)) return pool_.List(list->load);
    if (std::holds_alternative<protocol::HelloRequest>(operation)) return pool_.Hello();
    if (std::holds_alternative<protocol::StatsRequest>(operation)) return pool_.Stats();
    return protocol::OkResponse(Json::object(), std::nullopt);  // shutdown
  }

  // On the thread that has read the request.
  void Overtake(const protocol::IncomingRequest& incoming) {
    const protocol::Request& request = *incoming.request();
    const std::lock_guard lock(overtaking_);
    const auto* cancel = std::get_if<protocol::CancelRequest>(&request.operation);
    if (!cancel) return Write(Status(incoming));
    const auto cancelled = queue_.Cancel(cancel->cancels);
    if (cancelled.waited) Write(Failed(FailureKind::kCancelled, kNotBegun, *cancelled.waited));
    Write(cancelled.error.empty() ? protocol::OkResponse(Json::object(), request.id)
                                  : Failed(FailureKind::kInvalidRequest, cancelled.error, incoming));
  }

  // False: there was no call, or its daemon cannot cancel.
  bool CancelCall() {
    try {
      return pool_.Cancel();
    } catch (const PoolError&) {
      return false;
    }
  }

  Json Status(const protocol::IncomingRequest& request) {
    Json answer;
    try {
      answer = pool_.Status();
    } catch (const PoolError& error) {
      return NoAnswer(error, request);
    }
    const auto under_way = queue_.under_way();
    if (answer.contains("running") && answer["running"].is_object() && under_way)
      protocol::SetId(answer["running"], under_way->id());
    answer["waiting"] = queue_.waiting();
    protocol::SetId(answer, request.id());
    return answer;
  }

  // On the main thread, during a call.
  void TakeLog(std::string_view line) {
    auto progress = client::ProgressOf(line);
    if (!progress) return WriteStderr("cppool: ", line);
    protocol::SetId(*progress, current_id_);
    answers_.WriteIfReady(protocol::SerializeResponse(*progress, ""));
  }

  void Write(const Json& answer) {
    if (!answers_.Write(protocol::SerializeResponse(answer, ""))) lost_ = true;
  }

  bool NobodyReads() const {
    pollfd fd = {answers_.fd(), 0, 0};
    return lost_ || (poll(&fd, 1, 0) > 0 && (fd.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0);
  }

  std::string WhyEnding() const { return "cppool was ended by signal " + std::to_string(ending_); }

  // On a thread of its own, as the next one: the request under way is cancelled, and those that wait are not
  // begun.
  void End(int signal) {
    TellWhere();
    ending_ = signal;
    stop_.Set();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return over_; });  // Interruption has a limit
  }

  void TellWhere() {
    try {
      WriteStderr("cppool: ", pool_.Status().value("text", ""));
    } catch (const PoolError& error) {
      WriteStderr("cppool: ", error.what());
    }
  }

  const PipeArguments& arguments_;
  base::StdoutChannel answers_;
  const base::Event stop_;  // reading ends
  base::UniqueFd requests_;
  protocol::RequestQueue queue_;
  std::optional<Json> current_id_;  // of the request under way; on the main thread alone
  std::mutex overtaking_;           // held from the decision of a cancel until its answer is written
  std::atomic<bool> interrupted_{false}, lost_{false};
  std::atomic<int> ending_{0};  // the signal
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;  // all is answered
  Pool pool_;          // last: its threads use the others
};

}  // namespace

void AddPipe(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<PipeArguments>();
  CLI::App* pipe = app.add_subcommand(
      "pipe", "Reads requests of the daemon's protocol from stdin, and writes an answer to each to stdout");
  pipe->add_option("--world-size", arguments->daemon.pool.world_size, "Number of ranks")
      ->check(CLI::Range(1, protocol::kMaxWorldSize))
      ->capture_default_str();
  AddDeadline(*pipe, &arguments->deadline, "Seconds for each run that has no deadline_ms");
  AddDaemonOptions(*pipe, &arguments->daemon);
  pipe->add_option("--retries", arguments->daemon.pool.retries,
                   "Asks again, up to so often, when the daemon of a request died: the answer is then flaky")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  pipe->add_flag_callback(
      "--allow-faults", [arguments] { arguments->daemon.pool.arguments.emplace_back("--allow-faults"); },
      "Requests may have a fault, for tests");
  pipe->callback([arguments, streams, exit_code] {
    base::UniqueFd requests = base::TakeStdin();
    Pipe session(*arguments, std::move(requests), base::StdoutChannel::TakeStdout());
    *exit_code = session.Serve(streams);
  });
}

}  // namespace cppool::command
