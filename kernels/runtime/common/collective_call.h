// What a collective was called with, its way through a table of cppool/runtime.h, and whether the ranks of a
// group called the same.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/error.h"

namespace cppool::kernels {

enum class Collective : std::uint8_t { kAllGather, kReduceScatter, kAllReduce, kRing };  // kRing: StartRing
const char* NameOf(Collective what);                                                     // "all_gather"

// `count` is in elements of dtype (the bytes of all_gather are uint8).
struct CollectiveCall {
  Collective what = Collective::kAllGather;
  cppool_dtype dtype = CPPOOL_UINT8;
  cppool_reduce reduce = CPPOOL_SUM;
  std::size_t count = 0;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t bytes() const;                       // of `count`
  bool SameAs(const CollectiveCall& other) const;  // except for the buffers
  std::string ToString() const;                    // "all_reduce (sum) of 8 int32"
};

// Sets the collectives of a table to kCall(table, call, communicator, stream), and makes such a call.
template <auto kCall>
void SetCollectives(cppool_runtime& table) {
  table.all_gather = [](cppool_runtime* rt, const void* in, void* out, std::size_t bytes, cppool_comm comm,
                        cppool_stream stream) {
    return kCall(rt, {Collective::kAllGather, CPPOOL_UINT8, CPPOOL_SUM, bytes, in, out}, comm, stream);
  };
  table.reduce_scatter = [](cppool_runtime* rt, const void* in, void* out, std::size_t count,
                            cppool_dtype dtype, cppool_reduce reduce, cppool_comm comm,
                            cppool_stream stream) {
    return kCall(rt, {Collective::kReduceScatter, dtype, reduce, count, in, out}, comm, stream);
  };
  table.all_reduce = [](cppool_runtime* rt, const void* in, void* out, std::size_t count, cppool_dtype dtype,
                        cppool_reduce reduce, cppool_comm comm, cppool_stream stream) {
    return kCall(rt, {Collective::kAllReduce, dtype, reduce, count, in, out}, comm, stream);
  };
}
cppool_status MakeCall(cppool_runtime* table, const CollectiveCall& call, cppool_comm, cppool_stream);

// Throws when `peer` is no member of a group of `size`. `call`: "send".
void CheckPeer(int peer, int size, const char* call);
// Throws when a message has other bytes at its other end. Ranks are those of the world; `rank` sends it, or
// receives it.
void CheckSameBytes(bool sends, int rank, std::size_t bytes, int peer, std::size_t of_peer);

// The error for `member` of a group when its members called different things at the same position of
// `communicator`. `ranks` are the members' ranks in the world. Where more than half called the same, they
// name a rank that did not as the culprit.
RuntimeError Disagreement(const std::vector<CollectiveCall>& calls, int member, const std::vector<int>& ranks,
                          std::uint64_t position, const std::string& communicator);

}  // namespace cppool::kernels
