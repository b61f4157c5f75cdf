// The ranks of a world that are open in this process, for Backend::Recover. Ranks may outlive their backend
// and the other way round.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace cppool::kernels {

template <typename Rank>
struct OpenRanks {
  std::mutex mutex;
  std::vector<Rank*> ranks;
};

// What OpenRank returns: a Rank that removes itself from the list.
template <typename Rank>
class ListedRank final : public Rank {
 public:
  template <typename World>
  ListedRank(std::shared_ptr<World> world, int rank, std::shared_ptr<OpenRanks<Rank>> open)
      : Rank(std::move(world), rank), open_(std::move(open)) {
    const std::lock_guard lock(open_->mutex);
    open_->ranks.push_back(this);
  }
  ~ListedRank() override {
    const std::lock_guard lock(open_->mutex);
    std::erase(open_->ranks, this);
  }

 private:
  const std::shared_ptr<OpenRanks<Rank>> open_;
};

}  // namespace cppool::kernels
