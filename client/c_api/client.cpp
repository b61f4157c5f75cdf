// The C interface: errors become statuses here, and nothing is decided.
#include <cppool/client.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include <cppool/compile.h>
#include <cppool/pool.h>
#include <cppool/version.h>
#include "client/c_api/arguments.h"
#include "client/src/describe.h"
#include "client/src/request.h"
#include "client/suite/repeat.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

struct cppool_pool {
  cppool_pool_hooks hooks;
  std::atomic<int> interruptions;  // calls of cppool_pool_interrupt
  cppool::Pool pool;
};

namespace cppool::client {
namespace {

// The caller's lock, given up for as long as this lives. A hook may call another pool: then this thread has
// one for each.
class Leave {
 public:
  explicit Leave(const cppool_pool& pool)
      : hooks_(pool.hooks), interruptions_(pool.interruptions), interruptions_before_(pool.interruptions) {
    Begin();
  }
  ~Leave() { End(); }
  Leave(const Leave&) = delete;
  Leave& operator=(const Leave&) = delete;

  // With the lock. What stays pending in the caller, such as an exception of Python's, must not meet a hook
  // again.
  static bool Interrupted() {
    Leave* const call = current_;
    if (call == nullptr) return false;
    if (!call->interrupted_) call->interrupted_ = call->interruptions_ != call->interruptions_before_;
    if (!call->interrupted_ && call->hooks_.interrupted != nullptr) {
      call->End();
      call->interrupted_ = call->hooks_.interrupted() != 0;
      call->Begin();
    }
    return call->interrupted_;
  }

 private:
  void Begin() {
    outer_ = current_;
    if (hooks_.leave != nullptr && hooks_.enter != nullptr) left_ = hooks_.leave();
    current_ = this;
  }
  void End() {
    current_ = outer_;
    if (hooks_.leave != nullptr && hooks_.enter != nullptr) hooks_.enter(left_);
  }

  static thread_local Leave* current_;
  Leave* outer_ = nullptr;         // the call whose hook made this call
  const cppool_pool_hooks hooks_;  // a copy: the pool may end during the call
  const std::atomic<int>& interruptions_;
  const int interruptions_before_;
  void* left_ = nullptr;
  bool interrupted_ = false;
};
thread_local Leave* Leave::current_ = nullptr;

char* Copy(const std::string& text) noexcept {
  char* const copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

void Set(char** out, const Json& json) {
  if (out != nullptr) *out = Copy(protocol::JsonText(json));
}

// Runs `work`, whose result is what *out becomes, and turns what it throws into a status.
template <typename Work>
cppool_client_status Guarded(char** out, Work work) {
  if (out != nullptr) *out = nullptr;
  const auto refuse = [out](cppool_client_status status, const char* text) {
    try {
      Set(out, {{"error", text}});
    } catch (const std::exception&) {  // no memory for the text
    }
    return status;
  };
  try {
    const Json result = work();
    if (!result.is_null()) Set(out, result);
    return CPPOOL_CLIENT_OK;
  } catch (const PoolError& error) {
    try {
      Set(out, Describe(error));
    } catch (const std::exception&) {  // no memory for the text
    }
    return error.kind() == PoolError::Kind::kInterrupted ? CPPOOL_CLIENT_INTERRUPTED
                                                         : CPPOOL_CLIENT_NO_ANSWER;
  } catch (const CompileError& error) {
    return refuse(CPPOOL_CLIENT_INVALID, error.what());
  } catch (const std::invalid_argument& error) {
    return refuse(CPPOOL_CLIENT_INVALID, error.what());
  } catch (const protocol::InvalidRequest& error) {
    return refuse(CPPOOL_CLIENT_INVALID, error.what());
  } catch (const std::exception& error) {
    return refuse(CPPOOL_CLIENT_INTERNAL, error.what());
  }
}

Json Answered(Json answer) { return {{"answer", std::move(answer)}, {"attempts", 1}}; }
Json Answered(Result result) {
  Json answered = {{"answer", std::move(result.json)}, {"attempts", result.attempts}};
  AddLost(result.flaky, result.lost, &answered);
  return answered;
}

// Asks the pool what an operation of the protocol says.
struct Asker {
  Pool& pool;
  Json operator()(const protocol::HelloRequest&) const { return Answered(pool.Hello()); }
  Json operator()(const protocol::ListRequest& list) const { return Answered(pool.List(list.load)); }
  Json operator()(const protocol::StatsRequest&) const { return Answered(pool.Stats()); }
  Json operator()(const protocol::RunRequest& run) const { return Answered(PoolAccess::Run(pool, run)); }
  Json operator()(const protocol::ValidateRequest& validate) const {
    return Answered(PoolAccess::Validate(pool, validate.run));
  }
  Json operator()(const protocol::CancelRequest&) const {
    throw std::invalid_argument(
        "the ids of requests are the pool's: cppool_pool_cancel cancels what goes on");
  }
  Json operator()(const protocol::StatusRequest&) const { return Answered(pool.Status()); }
  Json operator()(const protocol::ShutdownRequest&) const {
    throw std::invalid_argument("a pool is not asked to shut down: cppool_pool_stop ends its daemon");
  }
};

cppool_pool_hooks ToHooks(const cppool_pool_hooks* given) {
  cppool_pool_hooks hooks = {};
  if (given == nullptr) return hooks;
  if (given->struct_size < sizeof hooks)
    throw std::invalid_argument("cppool_pool_hooks: struct_size is " + std::to_string(given->struct_size) +
                                ", and its first version has " + std::to_string(sizeof hooks) + " bytes");
  std::memcpy(&hooks, given, sizeof hooks);
  return hooks;
}

PoolOptions WithHooks(PoolOptions options, const cppool_pool_hooks& hooks) {
  if (hooks.on_stderr != nullptr)
    options.on_stderr = [hooks](std::string_view line) {
      hooks.on_stderr(hooks.context, line.data(), line.size());
    };
  if (hooks.log != nullptr)
    options.log = [hooks](std::string_view line) {
      if (!Leave::Interrupted()) hooks.log(hooks.context, line.data(), line.size());
    };
  options.interrupted = [] { return Leave::Interrupted(); };
  return options;
}

Json CellJson(const Cell& cell) {
  return {{"name", cell.name},           {"suite", cell.suite},           {"rows", cell.rows},
          {"essential", cell.essential}, {"world_size", cell.world_size}, {"case", cell.case_name},
          {"params", cell.params}};
}

}  // namespace
}  // namespace cppool::client

using cppool::Json;
using cppool::client::Guarded;
using cppool::client::Leave;

extern "C" {

const char* cppool_client_version(void) { return CPPOOL_VERSION; }

void cppool_client_free(char* out) { std::free(out); }

cppool_client_status cppool_pool_create(const char* options, const cppool_pool_hooks* hooks,
                                        cppool_pool** pool, char** out) {
  if (pool != nullptr) *pool = nullptr;
  return Guarded(out, [&]() -> Json {
    if (pool == nullptr) throw std::invalid_argument("there is no place for the pool");
    const cppool_pool_hooks copied = cppool::client::ToHooks(hooks);
    cppool::PoolOptions all = cppool::client::WithHooks(cppool::client::ToPoolOptions(options), copied);
    *pool = new cppool_pool{copied, 0, cppool::Pool(std::move(all))};
    return {};
  });
}

cppool_client_status cppool_pool_ask(cppool_pool* pool, const char* request, char** out) {
  return Guarded(out, [&]() -> Json {
    if (pool == nullptr) throw std::invalid_argument("there is no pool");
    const cppool::protocol::Operation operation = cppool::client::ToOperation(request);
    const Leave leave(*pool);
    return std::visit(cppool::client::Asker{pool->pool}, operation);
  });
}

cppool_client_status cppool_pool_compile(cppool_pool* pool, const char* request, char** out) {
  return Guarded(out, [&]() -> Json {
    if (pool == nullptr) throw std::invalid_argument("there is no pool");
    auto [source, options] = cppool::client::ToCompileOptions(request);
    bool interrupted = false;
    options.interrupted = [&] { return interrupted = Leave::Interrupted(); };
    const Leave leave(*pool);
    if (source.ends_with(".cu")) options.capabilities = cppool::CapabilitiesOf(pool->pool.Hello());
    cppool::Compiled compiled;
    try {
      compiled = cppool::Compile(source, options);
    } catch (const cppool::CompileError& error) {
      if (!interrupted) throw;
      throw cppool::PoolError(cppool::PoolError::Kind::kInterrupted, error.what(), "");
    }
    return {{"library", compiled.library},
            {"command", compiled.command},
            {"output", compiled.output},
            {"included", compiled.included},
            {"cached", compiled.cached}};
  });
}

cppool_client_status cppool_pool_cancel(cppool_pool* pool, char** out) {
  return Guarded(out, [&]() -> Json {
    if (pool == nullptr) throw std::invalid_argument("there is no pool");
    const Leave leave(*pool);
    return {{"cancelled", pool->pool.Cancel()}};
  });
}

cppool_client_status cppool_pool_status(cppool_pool* pool, char** out) {
  return Guarded(out, [&]() -> Json {
    if (pool == nullptr) throw std::invalid_argument("there is no pool");
    const Leave leave(*pool);
    return pool->pool.Status();
  });
}

char* cppool_pool_stderr_tail(cppool_pool* pool) {
  if (pool == nullptr) return nullptr;
  try {
    const Leave leave(*pool);
    return cppool::client::Copy(pool->pool.StderrTail());
  } catch (const std::exception&) {
    return nullptr;
  }
}

void cppool_pool_stop(cppool_pool* pool) {
  if (pool == nullptr) return;
  Guarded(nullptr, [&]() -> Json {
    const Leave leave(*pool);
    pool->pool.Stop();
    return {};
  });
}

void cppool_pool_free(cppool_pool* pool) {
  if (pool == nullptr) return;
  const Leave leave(*pool);
  delete pool;
}

void cppool_pool_interrupt(cppool_pool* pool) {
  if (pool != nullptr) ++pool->interruptions;
}

cppool_client_status cppool_client_find_daemon(const char* options, char** out) {
  return Guarded(out, [&]() -> Json {
    return {{"daemon", cppool::FindDaemon(cppool::client::ToPoolOptions(options))}};
  });
}

cppool_client_status cppool_client_command(const char* options, const char* request, char** out) {
  return Guarded(out, [&]() -> Json {
    const auto operation = cppool::client::ToOperation(request);
    const auto* run = std::get_if<cppool::protocol::RunRequest>(&operation);
    if (run == nullptr) throw std::invalid_argument("only a run can be repeated by a command");
    return {{"command", cppool::suite::RepeatCommand(cppool::client::ToPoolOptions(options), *run)}};
  });
}

cppool_client_status cppool_client_describe(const char* result, char** out) {
  return Guarded(out, [&]() -> Json { return {{"text", cppool::client::ToDescription(result)}}; });
}

cppool_client_status cppool_client_suite(const char* selection, char** out) {
  return Guarded(out, [&]() -> Json {
    Json cells = Json::array();
    for (const cppool::Cell& cell : cppool::client::ToCells(selection))
      cells.push_back(cppool::client::CellJson(cell));
    return {{"cells", std::move(cells)}};
  });
}

}  // extern "C"
