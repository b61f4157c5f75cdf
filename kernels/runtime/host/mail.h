// The calls of ranks that do not share memory: letters, which a rank of this process or of another has sent,
// and which wait here until a call takes them. Only bytes travel; what is done with them is the receiver's.
//
// In a world of several processes all ranks write letters, so that a result does not depend on who is where.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/backend.h"
#include "kernels/group_shape.h"
#include "kernels/host_link.h"
#include "kernels/runtime/common/collective_call.h"

namespace cppool::kernels::host {

enum class LetterKind : std::uint8_t {
  kMessage,   // of a send
  kTaken,     // the receiver has it; `count`: the bytes that it wanted
  kInput,     // one rank's part of a collective
  kReduced,   // the same of an all_reduce, once the rank has reduced its share
  kFinished,  // the rank has ended its case; `position`: which one
  kAsked,     // for a shape; `position`: the round of the meeting
};

// What a letter is about, as it travels.
struct LetterHead {
  LetterKind kind{};
  Collective what{};
  std::int32_t dtype = 0, reduce = 0;
  std::int32_t from = 0, to = 0;      // ranks of the world
  std::int32_t size = 0, stride = 0;  // of the communicator's shape
  std::uint64_t position = 0;
  std::uint64_t count = 0;  // of the collective; of kTaken
  std::uint64_t epoch = 0;  // of the world, when it was sent
};

struct Letter {
  LetterHead head;
  HostLink::Bytes bytes;  // the head, then what it carries
  const std::byte* data() const { return bytes.data() + sizeof(LetterHead); }
  std::size_t size() const { return bytes.size() - sizeof(LetterHead); }
};

class Mail {
 public:
  struct Events {
    std::function<void(int rank)> arrived;  // a letter for a rank of this process
    // kFinished and kAsked of ranks of other processes.
    std::function<void(const LetterHead& head)> told;
    std::function<void(const std::string& why)> lost;  // another process has gone
  };

  // `first` and `ranks`: of the place. Every process has as many ranks.
  Mail(const Place& place, std::unique_ptr<HostLink> link, Events events);
  ~Mail();
  Mail(const Mail&) = delete;
  Mail& operator=(const Mail&) = delete;

  bool Here(int rank) const { return rank >= place_.first && rank < place_.first + place_.ranks; }
  const Place& place() const { return place_; }

  // Any thread, all of these. The data is copied.
  void Send(const LetterHead& head, const void* data, std::size_t bytes);
  void Tell(const LetterHead& head);  // all other processes
  // `head`: kind, from, to, shape and position are compared.
  bool Has(const LetterHead& head) const;
  std::optional<Letter> Take(const LetterHead& head);
  // Of those letters, and of those of ranks of this process: whether `from` has come as far in this
  // communicator.
  bool HasJoined(GroupShape shape, LetterKind kind, int from, std::uint64_t position) const;

  // Drops all letters of earlier epochs, those that are still under way, too.
  void Restart(std::uint64_t epoch);

 private:
  using Key = std::tuple<LetterKind, int, int, int, int, std::uint64_t>;
  static Key KeyOf(const LetterHead& head);
  Letter Write(LetterHead head, const void* data, std::size_t bytes) const;
  void TakeBytes(int process, HostLink::Bytes bytes);
  void Put(Letter letter);  // for a rank of this process

  const Place place_;
  const Events events_;
  mutable std::mutex mutex_;
  std::uint64_t epoch_ = 0;
  std::map<std::uint64_t, std::map<Key, Letter>> letters_;  // by epoch
  // The position that follows the latest one, by kind, shape and rank.
  std::map<std::uint64_t, std::map<std::tuple<LetterKind, int, int, int>, std::uint64_t>> joined_;
  std::unique_ptr<HostLink> link_;  // last: its threads use the others until it is gone
};

}  // namespace cppool::kernels::host
