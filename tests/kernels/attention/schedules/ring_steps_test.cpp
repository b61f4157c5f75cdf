// The traffic of the ring: a step without visible pairs between two ranks sends, receives and computes
// nothing.
#include <array>
#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "tests/catch.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;

// Records the calls of a case's ranks; one case at a time.
struct Calls {
  std::mutex mutex;
  std::map<int, std::set<std::string>> stages;
  std::map<int, std::size_t> sends, recvs;
  cppool_runtime seam;
} calls;

HostWorld::Alter Counting() {
  calls.stages.clear();
  calls.sends.clear();
  calls.recvs.clear();
  return [](cppool_runtime& seam) {
    const std::lock_guard lock(calls.mutex);
    calls.seam = seam;
    seam.send = [](cppool_runtime* rt, const void* data, std::size_t bytes, int peer, cppool_comm comm,
                   cppool_stream stream) {
      const std::lock_guard lock(calls.mutex);
      ++calls.sends[rt->rank];
      return calls.seam.send(rt, data, bytes, peer, comm, stream);
    };
    seam.recv = [](cppool_runtime* rt, void* data, std::size_t bytes, int peer, cppool_comm comm,
                   cppool_stream stream) {
      const std::lock_guard lock(calls.mutex);
      ++calls.recvs[rt->rank];
      return calls.seam.recv(rt, data, bytes, peer, comm, stream);
    };
    seam.mark = [](cppool_runtime* rt, cppool_stream stream, const char* stage) {
      const std::lock_guard lock(calls.mutex);
      if (stage) calls.stages[rt->rank].insert(stage);
      return calls.seam.mark(rt, stream, stage);
    };
  };
}

// The distances of the ring positions whose blocks `rank` attends to.
std::set<int> Attended(int rank, const std::string& pass, int world) {
  std::set<int> distances;
  for (int d = 0; d < world; ++d) {
    const std::string name = pass + "/p2p step " + std::to_string(d + 1) + " of " + std::to_string(world);
    if (calls.stages[rank].count(name)) distances.insert(d);
  }
  return distances;
}

// `takes`: number of blocks of other ranks that the rank receives; `serves`: number of ranks that receive its
// block.
void CheckTraffic(int rank, std::size_t takes, std::size_t serves) {
  INFO("rank " << rank);
  // k and v, forward and backward, in one direction; dk and dv in the other.
  CHECK(calls.recvs[rank] == HostWorld::kIterations * (4 * takes + 2 * serves));
  CHECK(calls.sends[rank] == HostWorld::kIterations * (4 * serves + 2 * takes));
}

}  // namespace

TEST_CASE("a causal ring moves every block to every rank") {
  const int size = 4;
  HostWorld world(size);
  for (const Finding& f : world.Run(Small(size, CpCommType::kP2p), Counting())) CHECK(f.verdict.ok);
  for (int rank = 0; rank < size; ++rank) {
    CheckTraffic(rank, 3, 3);
    CHECK(Attended(rank, "forward", size) == std::set<int>{0, 1, 2, 3});
    CHECK(Attended(rank, "backward", size) == std::set<int>{0, 1, 2, 3});
  }
}

TEST_CASE("a ring with a window moves blocks between neighbours only") {
  const int size = GENERATE(4, 6);
  HostWorld world(size);
  AttentionSpec spec = Small(size, CpCommType::kP2p);
  spec.window_left = 3;  // chunks are of 4 tokens
  for (const Finding& f : world.Run(spec, Counting())) CHECK(f.verdict.ok);
  for (int rank = 0; rank < size; ++rank) {
    // Queries of chunk r see keys of chunk r - 1, and queries of chunk 2W-1-r see keys of chunk 2W-2-r, which
    // rank r + 1 holds.
    std::set<int> distances{0};
    if (rank > 0) distances.insert(1);
    if (rank < size - 1) distances.insert(size - 1);
    CheckTraffic(rank, distances.size() - 1, distances.size() - 1);
    CHECK(Attended(rank, "forward", size) == distances);
    CHECK(Attended(rank, "backward", size) == distances);
  }
}

TEST_CASE("a ring in which no query sees another rank's key sends nothing") {
  const int size = 4;
  HostWorld world(size);
  AttentionSpec spec = Small(size, CpCommType::kP2p);
  spec.window_left = 0;
  for (const Finding& f : world.Run(spec, Counting())) CHECK(f.verdict.ok);
  for (int rank = 0; rank < size; ++rank) {
    CheckTraffic(rank, 0, 0);
    CHECK(Attended(rank, "backward", size) == std::set<int>{0});
  }
}

TEST_CASE("a rank can serve several ranks without attending to their blocks") {
  // The four keys are all in the first chunk, on rank 0, and all ranks hold queries.
  const int size = 4;
  HostWorld world(size);
  AttentionSpec spec = Small(size, CpCommType::kP2p);
  spec.format = QkvFormat::kThd;
  spec.mask = AttnMaskType::kPadding;
  spec.pad_between_seqs = true;
  spec.batch = 1;
  spec.queries = {{32}, {32}, 32};
  spec.keys = {{4}, {32}, 32};
  for (const Finding& f : world.Run(spec, Counting())) CHECK(f.verdict.ok);
  CheckTraffic(0, 0, 3);
  for (int rank = 1; rank < size; ++rank) {
    CheckTraffic(rank, 1, 0);
    CHECK(Attended(rank, "forward", size) == std::set<int>{0, rank});
  }
}
