#include "client/server/served_pool.h"

#include <algorithm>
#include <future>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>
#include <variant>

#include "client/src/daemon.h"
#include "client/src/request.h"
#include "protocol/json_text.h"
#include "protocol/response.h"

namespace cppool::server {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kMostPools = 64;

std::string What(const protocol::Operation& operation) {
  const auto* run = RunOf(operation);
  return protocol::NameOf(operation) + (run ? " " + run->case_name : std::string());
}

double SecondsSince(Clock::time_point time) {
  return std::chrono::duration<double>(Clock::now() - time).count();
}

std::set<std::string> DevicesOf(const Json& hello) {
  std::set<std::string> devices;
  if (!hello.is_object()) return devices;
  for (const Json& device : hello.value("devices", Json::array()))
    if (const std::string uuid = device.value("uuid", ""); !uuid.empty()) devices.insert("device " + uuid);
  return devices;
}

bool IsShort(const Json& answer) { return protocol::FailedWith(answer, protocol::FailureKind::kOutOfMemory); }

// A start can fail for the memory that other pools hold, or for a device that takes one process at a time.
bool MayBeShort(const PoolError& error) {
  const auto& why = error.start_failure();
  return why && (why->kind == "out_of_memory" || why->kind == "cuda" || why->kind == "nccl");
}

PoolOptions WithHooks(PoolOptions options, std::function<void(std::string_view)> on_stderr,
                      std::function<void(std::string_view)> log, std::function<bool()> interrupted) {
  options.on_stderr = std::move(on_stderr);
  options.log = std::move(log);
  options.interrupted = std::move(interrupted);
  return options;
}

}  // namespace

ServedPool::ServedPool(const client::Attachment& wanted, std::string name, milliseconds idle_exit)
    : name_(std::move(name)), daemon_(wanted.pool.daemon), pool_([&] {
        PoolOptions options = wanted.pool;
        options.idle_exit = idle_exit;
        return WithHooks(
            std::move(options),
            [this](std::string_view line) { WithCaller([&](Caller& caller) { caller.TakeStderr(line); }); },
            [this](std::string_view line) { WithCaller([&](Caller& caller) { caller.TakeLog(line); }); },
            [this] {
              bool gone = false;
              WithCaller([&](Caller& caller) { gone = caller.IsGone(); });
              return gone;
            });
      }()) {}

void ServedPool::WithCaller(const std::function<void(Caller&)>& use) {
  const std::lock_guard lock(mutex_);
  if (caller_ != nullptr) use(*caller_);
}

Turns::Resources ServedPool::all() const {
  const std::lock_guard lock(mutex_);
  Turns::Resources resources = DevicesOf(hello_);
  resources.insert(name_);
  return resources;
}

bool ServedPool::SharesDevices(const ServedPool& other) const {
  const auto devices = [](const ServedPool& pool) { return DevicesOf(pool.LastHello()); };
  const auto mine = devices(*this), theirs = devices(other);
  return mine.empty() || theirs.empty() ||
         std::ranges::any_of(mine, [&](const auto& device) { return theirs.count(device) != 0; });
}

bool ServedPool::IsUp() {
  const bool up = client::PoolAccess::IsUp(pool_);
  const std::lock_guard lock(mutex_);
  return up_ = up;
}

Json ServedPool::Ask(const protocol::Operation& operation, Caller& caller) {
  struct Called {
    ServedPool& pool;
    Called(ServedPool& of, Caller* who) : pool(of) { Set(who); }
    ~Called() { Set(nullptr); }
    void Set(Caller* who) const {
      const std::lock_guard beside(pool.beside_);
      pool.asks_ = who;
      const std::lock_guard lock(pool.mutex_);
      pool.caller_ = who;
    }
  } const called{*this, &caller};
  // What the daemon has written before its answer reaches the client before the answer.
  struct CatchUp {
    Pool* pool;
    ~CatchUp() {
      if (pool) pool->StderrTail();
    }
  };
  try {
    const CatchUp catch_up{RunOf(operation) ? &pool_ : nullptr};
    Json answer = client::PoolAccess::Ask(pool_, operation);
    const std::lock_guard lock(mutex_);
    up_ = true;
    if (RunOf(operation)) ++uses_;
    if (std::holds_alternative<protocol::HelloRequest>(operation) && hello_ != answer) hello_ = answer;
    if (std::holds_alternative<protocol::StatsRequest>(operation)) {
      stats_ = answer;
      stats_of_ = uses_;
    }
    return answer;
  } catch (const PoolError&) {
    pool_.StderrTail();
    throw;
  }
}

bool ServedPool::Cancel(const Caller& caller) {
  const std::lock_guard lock(beside_);
  return asks_ == &caller && pool_.Cancel();
}

std::optional<Json> ServedPool::Status(const Caller& caller) {
  const std::lock_guard lock(beside_);
  if (asks_ != &caller) return std::nullopt;
  return pool_.Status();
}

void ServedPool::Stop() {
  pool_.Stop();
  const std::lock_guard lock(mutex_);
  up_ = false;
}

Json ServedPool::LastHello() const {
  const std::lock_guard lock(mutex_);
  return hello_;
}

bool ServedPool::HasNewStats() const {
  const std::lock_guard lock(mutex_);
  return stats_of_ != uses_;
}

Clock::time_point ServedPool::last_used() const {
  const std::lock_guard lock(mutex_);
  return last_used_;
}

ServedPool::Registered::Registered(ServedPool& pool, Work work) : pool_(pool) {
  const std::lock_guard lock(pool_.mutex_);
  work_ = pool_.works_.insert(pool_.works_.end(), std::move(work));
}

ServedPool::Registered::~Registered() {
  const std::lock_guard lock(pool_.mutex_);
  pool_.last_used_ = Clock::now();
  pool_.works_.erase(work_);
}

void ServedPool::Registered::Begins() {
  const std::lock_guard lock(pool_.mutex_);
  work_->waits = false;
  work_->since = Clock::now();
}

std::vector<ServedPool::Work> ServedPool::Works() const {
  const std::lock_guard lock(mutex_);
  return {works_.begin(), works_.end()};
}

Json ServedPool::Describe() const {
  const std::lock_guard lock(mutex_);
  const auto member = [](const Json& json, const char* name) {
    return json.is_object() ? json.value(name, Json()) : Json();
  };
  Json running, waiting = Json::array();
  for (const Work& work : works_) {
    Json described = {{"client", work.client}, {"request", work.what}, {"seconds", SecondsSince(work.since)}};
    if (work.waits) {
      waiting.push_back(std::move(described));
    } else {
      running = std::move(described);
    }
  }
  Json json = {{"name", name_},
               {"daemon", daemon_},
               {"up", up_},
               {"running", running},
               {"waiting", waiting},
               {"idle_seconds", nullptr},
               {"memory", up_ ? member(stats_, "memory") : Json()}};
  if (running.is_null()) json["idle_seconds"] = SecondsSince(last_used_);
  for (const char* name : {"pid", "world_size", "backend", "transport", "devices"})
    json[name] = member(hello_, name);
  return json;
}

std::shared_ptr<ServedPool> ServedPools::At(const client::Attachment& wanted) {
  std::shared_ptr<ServedPool> dropped;  // its daemon ends after the lock has been given up
  const std::lock_guard lock(mutex_);
  if (const auto known = pools_.find(wanted.identity); known != pools_.end()) return known->second;
  if (pools_.size() >= kMostPools) {
    auto oldest = pools_.end();
    for (auto pool = pools_.begin(); pool != pools_.end(); ++pool)
      if (pool->second.use_count() == 1 &&
          (oldest == pools_.end() || pool->second->last_used() < oldest->second->last_used()))
        oldest = pool;
    if (oldest == pools_.end())
      throw std::runtime_error("clients use " + std::to_string(kMostPools) +
                               " pools, and this server has no more");
    dropped = oldest->second;
    pools_.erase(oldest);
  }
  auto pool = std::make_shared<ServedPool>(wanted, "pool " + std::to_string(++made_), idle_exit_);
  return pools_[wanted.identity] = std::move(pool);
}

std::vector<std::shared_ptr<ServedPool>> ServedPools::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<ServedPool>> pools;
  for (const auto& [identity, pool] : pools_) pools.push_back(pool);
  return pools;
}

Json ServedPools::Ask(ServedPool& pool, const protocol::Operation& operation, Caller& caller,
                      milliseconds queue_limit) {
  const auto until = Clock::now() + queue_limit;
  // Who asks is known already while another client's request is under way.
  if (std::holds_alternative<protocol::HelloRequest>(operation) && !turns_.TryTake(pool.own()))
    if (Json hello = pool.LastHello(); !hello.is_null()) return hello;
  ServedPool::Registered work(pool, {caller.Name(), What(operation), Clock::now()});
  auto turn = Take(pool, pool.own(), until, queue_limit, caller);
  if (!pool.IsUp()) Start(pool, caller);
  if (caller.HasGivenUp()) throw GivenUp{};
  if (!RunOf(operation)) {
    work.Begins();
    return pool.Ask(operation, caller);
  }
  if (const auto all = pool.all(); all.size() > 1) {
    turn.End();
    turn = Take(pool, all, until, queue_limit, caller);
  }
  work.Begins();
  Json answer = pool.Ask(operation, caller);
  while (IsShort(answer) && EndOther(pool)) answer = pool.Ask(operation, caller);
  return answer;
}

Turns::Turn ServedPools::Keep(ServedPool& pool, Caller& caller, milliseconds queue_limit) {
  const ServedPool::Registered work(pool, {caller.Name(), "turn", Clock::now()});
  auto turn = Take(pool, pool.all(), Clock::now() + queue_limit, queue_limit, caller);
  Turns::Keep(turn);
  return turn;
}

Turns::Turn ServedPools::Take(const ServedPool& pool, const Turns::Resources& resources,
                              Clock::time_point until, milliseconds queue_limit, Caller& caller) {
  auto turn = turns_.Take(caller.Client(), resources, until, [&] { return caller.HasGivenUp(); });
  if (turn) return turn;
  if (caller.HasGivenUp()) throw GivenUp{};
  throw PoolError(PoolError::Kind::kQueue,
                  "the request waited " + client::Seconds(queue_limit) +
                      " (queue_limit) for its turn and was not taken up: " + WhoHas(pool),
                  "");
}

void ServedPools::Start(ServedPool& pool, Caller& caller) {
  for (;;) try {
      pool.Ask(protocol::HelloRequest{}, caller);
      return;
    } catch (const PoolError& error) {
      if (!MayBeShort(error) || !EndOther(pool)) throw;
    }
}

bool ServedPools::EndOther(const ServedPool& than) {
  auto pools = All();
  std::ranges::sort(pools,
                    [](const auto& one, const auto& other) { return one->last_used() < other->last_used(); });
  for (const auto& pool : pools) {
    if (pool.get() == &than || !pool->SharesDevices(than)) continue;
    const auto turn = turns_.TryTake(pool->own());
    if (!turn || !pool->IsUp()) continue;
    pool->Stop();
    return true;
  }
  return false;
}

std::string ServedPools::WhoHas(const ServedPool& pool) const {
  std::string who;
  for (const auto& other : All()) {
    if (other.get() != &pool && !other->SharesDevices(pool)) continue;
    for (const ServedPool::Work& work : other->Works())
      if (!work.waits)
        who += (who.empty() ? "" : ", ") + work.client + " has run `" + work.what + "` for " +
               client::Seconds(std::chrono::duration_cast<milliseconds>(Clock::now() - work.since));
  }
  return who.empty() ? "others came first" : who;
}

void ServedPools::Stop() {
  std::vector<std::future<void>> ended;
  for (const auto& pool : All()) ended.push_back(std::async(std::launch::async, [pool] { pool->Stop(); }));
  for (auto& end : ended) end.get();
}

Json ServedPools::Describe() {
  struct Nobody : Caller {
    std::string Name() const override { return ""; }
    std::string Client() const override { return ""; }
    void TakeStderr(std::string_view) override {}
    void TakeLog(std::string_view) override {}
    bool IsGone() override { return false; }
    bool HasGivenUp() override { return false; }
  } nobody;
  Json pools = Json::array();
  for (const auto& pool : All()) {
    if (const auto turn = turns_.TryTake(pool->own()); turn && pool->IsUp() && pool->HasNewStats()) try {
        pool->Ask(protocol::StatsRequest{}, nobody);
      } catch (const PoolError&) {  // it has just ended
        pool->IsUp();
      }
    pools.push_back(pool->Describe());
  }
  return pools;
}

}  // namespace cppool::server
