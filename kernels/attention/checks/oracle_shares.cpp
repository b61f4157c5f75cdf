#include "kernels/attention/checks/oracle_shares.h"

namespace cppool::kernels {

OracleShares::OracleShares(cppool_runtime* runtime, bool divided) : rt_(runtime) {
  if (divided) world_ = GetGroup(runtime, CPPOOL_WORLD);
}

// Where pairs are few, the exact and the plain calls of a pair run on two ranks.
int OracleShares::Owner(std::size_t pair, std::size_t pairs, bool plain, bool together) const {
  const bool apart = !together && 2 * pairs <= most();
  return static_cast<int>(apart ? 2 * pair + (plain ? 1 : 0) : pair);
}

void OracleShares::Exchange(const std::vector<Piece>& pieces, std::size_t pair, std::size_t pairs,
                            bool together) const {
  if (!divided()) return;
  GroupedCalls calls(rt_);
  for (const Piece& piece : pieces) Exchange(piece, Owner(pair, pairs, piece.plain, together));
  calls.End();
}

void OracleShares::Exchange(const Piece& piece, int owner) const {
  if (piece.bytes == 0 || !*piece.mine) return;
  if (owner != world_.rank) {
    return Check(rt_, rt_->recv(rt_, piece.others->get(), piece.bytes, owner, world_.comm, rt_->stream));
  }
  for (int rank = 0; rank < world_.size; ++rank) {
    if (rank != owner)
      Check(rt_, rt_->send(rt_, piece.mine->get(), piece.bytes, rank, world_.comm, rt_->stream));
  }
}

void OracleShares::Reduce(const Buffer& values, cppool_reduce reduce) const {
  if (!divided() || !values) return;
  Check(rt_, rt_->all_reduce(rt_, values.get(), values.get(), values.bytes() / sizeof(double), CPPOOL_FLOAT64,
                             reduce, world_.comm, rt_->stream));
}

}  // namespace cppool::kernels
