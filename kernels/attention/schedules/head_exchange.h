// The all-to-all between tokens and heads within a group of ranks, around a schedule that computes on some
// heads of all the group's tokens.
#pragma once

#include <vector>

#include "kernels/attention/tensor_ops.h"
#include "kernels/runtime.h"

namespace cppool::kernels {

// Which heads each rank of an a2a group computes. Query heads are dealt out evenly; key/value heads follow
// them, and are replicated where several ranks need one.
struct HeadPlan {
  std::vector<HeadRange> query;
  std::vector<HeadRange> key;
  bool replicated = false;
};
HeadPlan DealHeads(int heads, int kv_heads, int a2a_size);

class HeadExchange {
 public:
  // `comm_stream`: all communication goes there; the caller has ordered it with the main stream's work before
  // a call, and orders the main stream after it where ToHeads or ToTokens say so.
  HeadExchange(cppool_runtime* runtime, TensorOps& ops, Group group, cppool_stream comm_stream)
      : rt_(runtime),
        ops_(ops),
        group_(group),
        comm_stream_(comm_stream),
        packed_(runtime),
        arrived_(runtime) {}

  // from [rows, heads, dim] of this rank's tokens to [size * rows, ranges[me].count, dim]: rank after
  // rank. Work on the main stream after it sees the result. `scratch` holds at least PackedElements(...)
  // elements of from's dtype, which `to` is in as well.
  void ToHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
               void* scratch, void* to);
  // The reverse; heads that several ranks computed are summed (see MergeHeads). What travels is in from's
  // dtype.
  void ToTokens(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges, TensorRef from,
                void* scratch, TensorOut to);

  static std::int64_t PackedElements(std::int64_t rows, int dim, const std::vector<HeadRange>& ranges);

 private:
  // Sends bytes[i] at from + the sum before it to each rank i of the group, and receives as laid out by
  // `sizes_in`.
  void AllToAll(const std::byte* from, const std::vector<std::size_t>& sizes_out, std::byte* to,
                const std::vector<std::size_t>& sizes_in);

  cppool_runtime* rt_;
  TensorOps& ops_;
  Group group_;
  cppool_stream comm_stream_;
  Event packed_;
  Event arrived_;
};

}  // namespace cppool::kernels
