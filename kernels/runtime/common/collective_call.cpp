#include "kernels/runtime/common/collective_call.h"

#include <algorithm>

#include "kernels/runtime/common/dtype.h"

namespace cppool::kernels {

const char* NameOf(Collective what) {
  return what == Collective::kAllGather       ? "all_gather"
         : what == Collective::kReduceScatter ? "reduce_scatter"
         : what == Collective::kRing          ? "ring transfers"
                                              : "all_reduce";
}

cppool_status MakeCall(cppool_runtime* table, const CollectiveCall& call, cppool_comm comm,
                       cppool_stream stream) {
  if (call.what == Collective::kAllGather)
    return table->all_gather(table, call.in, call.out, call.count, comm, stream);
  const auto function = call.what == Collective::kReduceScatter ? table->reduce_scatter : table->all_reduce;
  return function(table, call.in, call.out, call.count, call.dtype, call.reduce, comm, stream);
}

std::size_t CollectiveCall::bytes() const { return count * WidthOf(dtype); }

bool CollectiveCall::SameAs(const CollectiveCall& other) const {
  return what == other.what && dtype == other.dtype && reduce == other.reduce && count == other.count;
}

std::string CollectiveCall::ToString() const {
  if (what == Collective::kAllGather) return "all_gather of " + std::to_string(count) + " bytes";
  if (what == Collective::kRing) return NameOf(what);
  return std::string(NameOf(what)) + " (" + NameOf(reduce) + ") of " + std::to_string(count) + " " +
         NameOf(dtype);
}

void CheckPeer(int peer, int size, const char* call) {
  if (peer >= 0 && peer < size) return;
  throw RuntimeError(CPPOOL_INTERNAL, std::string(call) + " names rank " + std::to_string(peer) +
                                          " of a group of " + std::to_string(size));
}

void CheckSameBytes(bool sends, int rank, std::size_t bytes, int peer, std::size_t of_peer) {
  if (bytes == of_peer) return;
  throw RuntimeError(CPPOOL_INTERNAL, "rank " + std::to_string(rank) + (sends ? " sent " : " receives ") +
                                          std::to_string(bytes) + (sends ? " bytes to" : " bytes from") +
                                          " rank " + std::to_string(peer) + ", which " +
                                          (sends ? "receives " : "sent ") + std::to_string(of_peer));
}

RuntimeError Disagreement(const std::vector<CollectiveCall>& calls, int member, const std::vector<int>& ranks,
                          std::uint64_t position, const std::string& communicator) {
  const auto alike = [&](const CollectiveCall& call) {
    return std::count_if(calls.begin(), calls.end(), [&](const auto& other) { return other.SameAs(call); });
  };
  const auto fewer = [&](const CollectiveCall& a, const CollectiveCall& b) { return alike(a) < alike(b); };
  const auto most = std::max_element(calls.begin(), calls.end(), fewer);
  const auto other =
      std::find_if(calls.begin(), calls.end(), [&](const auto& c) { return !c.SameAs(*most); });
  const auto rank_of = [&](auto call) { return ranks[static_cast<std::size_t>(call - calls.begin())]; };
  const bool clear = 2 * alike(*most) > static_cast<std::ptrdiff_t>(calls.size());
  const bool is_mine = !calls[static_cast<std::size_t>(member)].SameAs(*most);
  return {CPPOOL_INTERNAL,
          "the ranks disagree in call " + std::to_string(position) + " on " + communicator + ": rank " +
              std::to_string(rank_of(most)) + " called " + most->ToString() + ", rank " +
              std::to_string(rank_of(other)) + " " + other->ToString(),
          clear && !is_mine ? rank_of(other) : RuntimeError::kOwn};
}

}  // namespace cppool::kernels
