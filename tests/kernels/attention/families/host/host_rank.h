// One rank of the host runtime, for tests of kernels.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "kernels/runtime.h"

namespace cppool::test {

class HostRank {
 public:
  HostRank() : backend_(kernels::CreateHostBackend(1)), rank_(backend_->OpenRank(0)) { rank_->BeginCase(); }
  cppool_runtime* seam() const { return rank_->seam(); }
  cppool_stream stream() const { return seam()->stream; }
  // Throws the error of the enqueued work, if any.
  void Synchronize() const { kernels::Check(seam(), seam()->stream_synchronize(seam(), stream())); }

 private:
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<kernels::RankRuntime> rank_;
};

}  // namespace cppool::test
