// Who may use what: requests that share a resource, a pool or a GPU, go one after the other, and clients take
// turns, since each waits for at most one request at a time and joins the end of the queue with the next.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <string>

namespace cppool::server {

class Turns {
  struct Entry;

 public:
  using Resources = std::set<std::string>;

  // The resources, until it is destroyed.
  class Turn {
   public:
    Turn() = default;
    Turn(Turn&& other) noexcept;
    Turn& operator=(Turn&& other) noexcept;
    ~Turn() { End(); }
    explicit operator bool() const { return turns_ != nullptr; }
    void End();

   private:
    friend class Turns;
    Turn(Turns* turns, std::list<Entry>::iterator entry) : turns_(turns), entry_(entry) {}
    Turns* turns_ = nullptr;
    std::list<Entry>::iterator entry_;
  };

  // Waits until nobody has one of the resources who came before. False: `until` has passed, or `given_up`
  // returns true, which is asked after each Wake. `client`: a turn that this client keeps is no hindrance.
  Turn Take(const std::string& client, const Resources& resources,
            std::chrono::steady_clock::time_point until, const std::function<bool()>& given_up);
  Turn TryTake(const Resources& resources);  // false: it would wait

  // Once it has its turn: other clients wait until it ends, and turns of this client come before theirs. It
  // ends by itself when the client has had no turn for two seconds.
  static void Keep(Turn& turn);
  void Wake();  // any thread

 private:
  struct Entry {
    std::string client;
    Resources resources;
    bool kept = false;
    std::chrono::steady_clock::time_point kept_until{};
  };
  // Whether it has its turn. `again`: when to ask again, at the latest.
  bool IsFirst(std::list<Entry>::const_iterator entry, std::chrono::steady_clock::time_point* again) const;
  void Extend(const std::string& client);  // the turn that the client keeps

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Entry> entries_;  // those that have a turn and those that wait, as they came
};

}  // namespace cppool::server
