// Which rank runs which calls of the oracle, and how their results come to the others.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <vector>

#include "kernels/runtime.h"

namespace cppool::kernels {

// The calls of consecutive pairs run at once, each on one rank: a round. Used on the rank's thread, on its
// main stream; every rank makes the same calls in the same order.
class OracleShares {
 public:
  // Not `divided`: every rank runs every call, and nothing is exchanged.
  OracleShares(cppool_runtime* runtime, bool divided);

  bool divided() const { return world_.size > 1; }
  // Returns how many pairs a round has at most.
  std::size_t most() const { return static_cast<std::size_t>(world_.size); }
  // Whether this rank runs the exact, or the plain, calls of pair `pair` of a round of `pairs`. `together`:
  // the plain calls need what the exact ones leave, so that one rank runs both.
  bool Runs(std::size_t pair, std::size_t pairs, bool plain, bool together) const {
    return Owner(pair, pairs, plain, together) == world_.rank;
  }

  // A piece travels from the owner's `mine` to every other rank's `others`.
  struct Piece {
    const Buffer *mine, *others;
    std::size_t bytes;
    bool plain;
  };
  void Exchange(const std::vector<Piece>& pieces, std::size_t pair, std::size_t pairs, bool together) const;
  // Reduces what the calls add to, fp64, over all ranks and in place.
  void Reduce(const Buffer& values, cppool_reduce reduce) const;

 private:
  int Owner(std::size_t pair, std::size_t pairs, bool plain, bool together) const;
  void Exchange(const Piece& piece, int owner) const;

  cppool_runtime* rt_;
  Group world_;
};

}  // namespace cppool::kernels
