// The pools of a server: one for each identity (client/src/attach.h), with a daemon that is started for the
// first request and ends when it is idle. Thread-safe.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <cppool/pool.h>
#include "client/server/turns.h"
#include "client/src/attach.h"
#include "protocol/request.h"

namespace cppool::server {

using Clock = std::chrono::steady_clock;

// Who waits for the answer to a request. Nothing here waits.
class Caller {
 public:
  virtual ~Caller() = default;
  virtual std::string Name() const = 0;                // for people: "pid 123 (cppool run)"
  virtual std::string Client() const = 0;              // the same text for all connections of a process
  virtual void TakeStderr(std::string_view line) = 0;  // on a thread of the pool
  virtual void TakeLog(std::string_view line) = 0;     // as PoolOptions::log, on the thread of the request
  virtual bool IsGone() = 0;                           // nobody wants the answer
  virtual bool HasGivenUp() = 0;                       // nobody waits for the turn; asked under a lock
};

// The wait for a turn ended since the caller has given up.
struct GivenUp {};

// One pool. The members that are not of Pools are for the request that has the turn.
class ServedPool {
 public:
  ServedPool(const client::Attachment& wanted, std::string name, std::chrono::milliseconds idle_exit);

  const std::string& name() const { return name_; }  // "pool 1"
  Turns::Resources own() const { return {name_}; }
  Turns::Resources all() const;  // with its GPUs, once they are known
  bool SharesDevices(const ServedPool& other) const;

  bool IsUp();  // its daemon lives
  // Throws PoolError.
  Json Ask(const protocol::Operation& operation, Caller& caller);
  void Stop();
  // Any thread, while Ask goes on for this caller: as those of Pool. Throw PoolError.
  bool Cancel(const Caller& caller);
  std::optional<Json> Status(const Caller& caller);  // nothing: it does not

  Json LastHello() const;  // null: it has not been up
  // The daemon has run something since it was asked for `stats`, which would keep an idle one from its end.
  bool HasNewStats() const;
  Clock::time_point last_used() const;

  // Someone who works or waits, for people and for `ps`.
  struct Work {
    std::string client, what;
    Clock::time_point since;
    bool waits = true;
  };
  class Registered {
   public:
    Registered(ServedPool& pool, Work work);
    ~Registered();
    Registered(const Registered&) = delete;
    Registered& operator=(const Registered&) = delete;
    void Begins();  // its turn has come

   private:
    ServedPool& pool_;
    std::list<Work>::iterator work_;
  };
  std::vector<Work> Works() const;
  Json Describe() const;  // as `ps` answers it

 private:
  void WithCaller(const std::function<void(Caller&)>& use);

  const std::string name_;
  const std::string daemon_;
  std::mutex beside_;             // held while a thread other than the caller's uses the pool
  const Caller* asks_ = nullptr;  // under beside_
  mutable std::mutex mutex_;      // held for a moment only; never while the pool is called
  Caller* caller_ = nullptr;
  Json hello_, stats_;
  int uses_ = 0, stats_of_ = -1;  // runs, and how many of them stats_ has
  bool up_ = false;               // at its last use
  Clock::time_point last_used_ = Clock::now();
  std::list<Work> works_;
  Pool pool_;  // its functions use the members before it
};

// All of them, and whose turn it is.
class ServedPools {
 public:
  explicit ServedPools(std::chrono::milliseconds idle_exit) : idle_exit_(idle_exit) {}

  // Makes it for its first client. Throws std::runtime_error when there are too many in use.
  std::shared_ptr<ServedPool> At(const client::Attachment& wanted);

  // Waits for the turn, starts the daemon where there is none, and asks it. A pool that was used longest ago
  // ends where memory is short. Throws PoolError and GivenUp.
  Json Ask(ServedPool& pool, const protocol::Operation& operation, Caller& caller,
           std::chrono::milliseconds queue_limit);

  // Waits for the turn, which others do not get before it ends, while the client has further requests.
  // Throws as Ask.
  Turns::Turn Keep(ServedPool& pool, Caller& caller, std::chrono::milliseconds queue_limit);

  void Wake() { turns_.Wake(); }  // callers may have given up
  void Stop();                    // ends all daemons, once no request is under way
  Json Describe();                // a list

 private:
  Turns::Turn Take(const ServedPool& pool, const Turns::Resources& resources, Clock::time_point until,
                   std::chrono::milliseconds queue_limit, Caller& caller);
  void Start(ServedPool& pool, Caller& caller);
  bool EndOther(const ServedPool& than);  // false: there is none that nobody uses
  std::vector<std::shared_ptr<ServedPool>> All() const;
  std::string WhoHas(const ServedPool& pool) const;

  const std::chrono::milliseconds idle_exit_;
  Turns turns_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ServedPool>> pools_;  // by identity
  int made_ = 0;
};

}  // namespace cppool::server
