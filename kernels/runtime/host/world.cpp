#include "kernels/runtime/host/world.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "kernels/error.h"

namespace cppool::kernels::host {

HostWorld::HostWorld(int size, std::function<std::size_t()> available)
    : HostWorld(Place(size), std::move(available), nullptr) {}

HostWorld::HostWorld(const Place& place, std::unique_ptr<HostLink> link)
    : HostWorld(place, AvailableMemory, std::move(link)) {}

HostWorld::HostWorld(const Place& place, std::function<std::size_t()> available,
                     std::unique_ptr<HostLink> link)
    : place_(place),
      size_(place.world_size),
      memory_(std::move(available)),
      wake_ups_(At(size_)),
      begun_(At(size_)),
      finished_(At(size_)),
      meeting_(
          wake_ups_, [this] { return aborted(); },
          [this, first = place.first](int rank) { return HasFinished(rank, first); }) {
  if (link) {
    mail_ = std::make_unique<Mail>(place, std::move(link),
                                   Mail::Events{[this](int rank) { wake_up(rank).Notify(); },
                                                [this](const LetterHead& head) { TakeNews(head); },
                                                [this](const std::string& why) { Abort(why); }});
    meeting_.TellOthers([this](int rank, std::uint32_t round, GroupShape shape) {
      LetterHead head;
      head.kind = LetterKind::kAsked;
      head.from = rank;
      head.position = round;
      head.size = shape.size;
      head.stride = shape.stride;
      mail_->Tell(head);
    });
  }
  for (const GroupShape shape : UsualShapes(size_)) AddComms(shape);
}

HostWorld::~HostWorld() = default;

void HostWorld::TakeNews(const LetterHead& head) {
  if (head.kind == LetterKind::kAsked)
    return meeting_.Take(head.from, static_cast<std::uint32_t>(head.position), {head.size, head.stride});
  finished_[At(head.from)].store(head.position, std::memory_order_relaxed);
  for (WakeUp& wake_up : wake_ups_) wake_up.Notify();
}

void HostWorld::AddComms(GroupShape shape) {
  if (comms_.count(shape)) return;  // another rank was first
  std::vector<std::unique_ptr<HostComm>> comms(At(size_ / shape.size));
  for (int rank = 0; rank < size_; ++rank) {
    auto& comm = comms[At(shape.Index(rank))];
    if (!comm) comm = std::make_unique<HostComm>(shape, rank, wake_ups_, mail_.get());
  }
  comms_.emplace(shape, std::move(comms));
}

HostComm& HostWorld::Comm(GroupShape shape, int rank) {
  const auto comm = [&]() -> HostComm& { return *comms_.at(shape)[At(shape.Index(rank))]; };
  {
    const std::lock_guard lock(comms_mutex_);
    if (comms_.count(shape)) return comm();
  }
  // Here no rank would need to wait for the others. On NCCL it must, and a case has to be the same on both.
  if (!meeting_.Meet(rank, shape)) ThrowAborted();
  const std::lock_guard lock(comms_mutex_);
  AddComms(shape);
  return comm();
}

std::vector<GroupShape> HostWorld::Shapes() const {
  const std::lock_guard lock(comms_mutex_);
  std::vector<GroupShape> shapes;
  for (const auto& [shape, comms] : comms_) shapes.push_back(shape);
  return shapes;
}

void HostWorld::Abort(const std::string& reason) {
  {
    std::lock_guard lock(reason_mutex_);
    if (aborted()) return;  // the first reason is the cause
    reason_ = reason;
    aborted_.store(true, std::memory_order_relaxed);
  }
  for (WakeUp& wake_up : wake_ups_) wake_up.Notify();
}

void HostWorld::ThrowAborted() const {
  std::lock_guard lock(reason_mutex_);
  throw RuntimeError(CPPOOL_INTERNAL, "communication was aborted: " + reason_, RuntimeError::kElsewhere);
}

void HostWorld::Finished(int rank) {
  ProcessorFence();  // the rank's posts come before
  const std::uint64_t count = begun_[At(rank)].load(std::memory_order_relaxed) + 1;
  finished_[At(rank)].store(count, std::memory_order_relaxed);
  for (WakeUp& wake_up : wake_ups_) wake_up.Notify();
  if (!mail_) return;
  LetterHead head;
  head.kind = LetterKind::kFinished;
  head.from = rank;
  head.position = count;
  mail_->Tell(head);
}

int HostWorld::FinishedWithout(int waiting, const std::vector<std::unique_ptr<CommOp>>& ops) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (!HasFinished(rank, waiting)) continue;
    ProcessorFence();  // what it has not posted by now, it never will
    for (const auto& op : ops) {
      if (op->Misses(rank)) return rank;
    }
  }
  return -1;
}

void HostWorld::Restart() {
  const std::lock_guard comms_lock(comms_mutex_);
  const std::lock_guard lock(reason_mutex_);
  for (auto& [shape, comms] : comms_) {
    for (auto& comm : comms) comm->Reset();
  }
  meeting_.Restart();
  for (auto& finished : finished_) finished.store(0, std::memory_order_relaxed);
  reason_.clear();
  aborted_.store(false, std::memory_order_relaxed);
  const std::uint64_t epoch = epoch_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (mail_) mail_->Restart(epoch);
}

void HostWorld::Run(int rank, const Failure& failure, WaitNote& note,
                    std::vector<std::unique_ptr<CommOp>>& ops) {
  const auto ended = [](const CommOp& op) {
    if (op.slice) op.slice->end_ns = TraceClockNs();
    return true;
  };
  // Calls that run together have one beginning, so that their slices lie in each other.
  if (ops.front()->slice) {
    const std::int64_t now = TraceClockNs();
    for (const auto& op : ops) {
      if (op->slice) op->slice->begin_ns = now;  // the last ones may have found no room in the trace
    }
  }
  std::exception_ptr error;
  bool stopping = false;
  for (;;) {
    // Done once: after this only calls that other ranks have accepted are left, and those end by themselves.
    if (!stopping && (error || aborted() || failure.set())) {
      stopping = true;
      std::erase_if(ops, [](const auto& op) { return op->Withdraw(); });
    }
    bool moved = false;
    std::erase_if(ops, [&](const auto& op) {
      if (!op->Ready()) return false;
      moved = true;
      try {
        return op->Step() && ended(*op);
      } catch (...) {
        if (!error) error = std::current_exception();
        return true;
      }
    });
    if (ops.empty()) break;
    if (moved) continue;
    note.Set(ops);
    if (const int gone = stopping ? -1 : FinishedWithout(rank, ops); gone >= 0) {
      StreamProgress waiting;
      note.Describe(waiting);
      error = std::make_exception_ptr(RuntimeError(CPPOOL_INTERNAL,
                                                   "rank " + std::to_string(gone) +
                                                       " has finished the case, and rank " +
                                                       std::to_string(rank) + " is still " + waiting.doing,
                                                   gone));
      note.Clear();
      continue;
    }
    wake_up(rank).Wait([&] {
      if (!stopping && (aborted() || failure.set() || FinishedWithout(rank, ops) >= 0)) return true;
      for (const auto& op : ops) {
        if (op->Ready()) return true;
      }
      return false;
    });
    note.Clear();
  }
  if (error) std::rethrow_exception(error);
  if (!stopping) return;
  failure.Throw();
  ThrowAborted();
}

}  // namespace cppool::kernels::host
