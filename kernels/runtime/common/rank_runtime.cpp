// What a rank of either runtime does beside its table.
#include <utility>

#include "kernels/backend.h"

namespace cppool::kernels {

Place PlaceOf(cppool_runtime* rt) { return RuntimeOf(rt).place(); }

Group GetCopyGroup(cppool_runtime* rt, GroupShape shape) { return RuntimeOf(rt).CopyGroup(shape); }

std::optional<std::string> WhyNoRing(cppool_runtime* rt) { return RuntimeOf(rt).WhyNoRing(); }

Arrivals StartRing(cppool_runtime* rt, RingTransfers transfers, cppool_comm comm, cppool_stream stream) {
  return RuntimeOf(rt).StartRing(std::move(transfers), comm, stream);
}

}  // namespace cppool::kernels
