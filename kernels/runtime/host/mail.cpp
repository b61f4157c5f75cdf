#include "kernels/runtime/host/mail.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace cppool::kernels::host {

static_assert(std::is_trivially_copyable_v<LetterHead>);

Mail::Mail(const Place& place, std::unique_ptr<HostLink> link, Events events)
    : place_(place), events_(std::move(events)), link_(std::move(link)) {
  link_->Start({[this](int process, HostLink::Bytes bytes) { TakeBytes(process, std::move(bytes)); },
                [this](int process, const std::string& why) {
                  const int first = process * place_.ranks;
                  std::vector<int> ranks;
                  for (int rank = first; rank < first + place_.ranks; ++rank) ranks.push_back(rank);
                  events_.lost("the connection to " + RankList(ranks) + " was lost: " + why);
                }});
}

Mail::~Mail() = default;

Mail::Key Mail::KeyOf(const LetterHead& head) {
  return {head.kind, head.from, head.to, head.size, head.stride, head.position};
}

Letter Mail::Write(LetterHead head, const void* data, std::size_t bytes) const {
  {
    const std::lock_guard lock(mutex_);
    head.epoch = epoch_;
  }
  Letter letter{head, HostLink::Bytes(sizeof(head) + bytes)};
  std::memcpy(letter.bytes.data(), &head, sizeof(head));
  if (bytes > 0) std::memcpy(letter.bytes.data() + sizeof(head), data, bytes);
  return letter;
}

void Mail::Send(const LetterHead& head, const void* data, std::size_t bytes) {
  Letter letter = Write(head, data, bytes);
  if (Here(head.to))
    Put(std::move(letter));
  else
    link_->Send(head.to / place_.ranks, std::move(letter.bytes));
}

void Mail::Tell(const LetterHead& head) {
  const HostLink::Bytes bytes = Write(head, nullptr, 0).bytes;
  for (int process = 0; process < place_.world_size / place_.ranks; ++process)
    if (process != place_.first / place_.ranks) link_->Send(process, bytes);
}

void Mail::TakeBytes(int process, HostLink::Bytes bytes) {
  LetterHead head;
  if (bytes.size() < sizeof(head)) return events_.lost("another process sent what is no message");
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.from < 0 || head.from >= place_.world_size || head.from / place_.ranks != process)
    return events_.lost("another process sent a message of a rank that it does not have");
  if (head.kind == LetterKind::kFinished || head.kind == LetterKind::kAsked) {
    {
      const std::lock_guard lock(mutex_);
      if (head.epoch < epoch_) return;
    }
    return events_.told(head);
  }
  if (!Here(head.to)) return events_.lost("another process sent a message for a rank that is not here");
  Put({head, std::move(bytes)});
}

void Mail::Put(Letter letter) {
  const LetterHead head = letter.head;
  {
    const std::lock_guard lock(mutex_);
    if (head.epoch < epoch_) return;
    auto& joined = joined_[head.epoch][{head.kind, head.size, head.stride, head.from}];
    joined = std::max(joined, head.position + 1);
    letters_[head.epoch].insert_or_assign(KeyOf(head), std::move(letter));
  }
  events_.arrived(head.to);
}

bool Mail::Has(const LetterHead& head) const {
  const std::lock_guard lock(mutex_);
  const auto letters = letters_.find(epoch_);
  return letters != letters_.end() && letters->second.count(KeyOf(head)) > 0;
}

std::optional<Letter> Mail::Take(const LetterHead& head) {
  const std::lock_guard lock(mutex_);
  const auto letters = letters_.find(epoch_);
  if (letters == letters_.end()) return std::nullopt;
  const auto found = letters->second.find(KeyOf(head));
  if (found == letters->second.end()) return std::nullopt;
  Letter letter = std::move(found->second);
  letters->second.erase(found);
  return letter;
}

bool Mail::HasJoined(GroupShape shape, LetterKind kind, int from, std::uint64_t position) const {
  const std::lock_guard lock(mutex_);
  const auto joined = joined_.find(epoch_);
  if (joined == joined_.end()) return false;
  const auto found = joined->second.find({kind, shape.size, shape.stride, from});
  return found != joined->second.end() && found->second > position;
}

void Mail::Restart(std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  epoch_ = epoch;
  letters_.erase(letters_.begin(), letters_.lower_bound(epoch));
  joined_.erase(joined_.begin(), joined_.lower_bound(epoch));
}

}  // namespace cppool::kernels::host
