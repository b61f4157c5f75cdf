// The passes of the host's attention over the tiles of a work list: synchronous, called on a stream's
// thread, no shared state. FlashAttention's order (Dao 2023): a tile stays, blocks of the other side pass by.
#pragma once

#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/layout.h"

namespace cppool::kernels::host {

// Tiles of queries of at most kTile rows (vector_math.h), empty ones included.
void AttendForward(const KernelShape& shape, const ForwardArgs& args, const WorkList& list);
void AttendBackwardQuery(const KernelShape& shape, const BackwardArgs& args, const WorkList& list);
// Tiles of keys.
void AttendBackwardKey(const KernelShape& shape, const BackwardArgs& args, const WorkList& list);
void AttendBackwardBias(const KernelShape& shape, const BackwardArgs& args, const BiasGradient& gradient,
                        const WorkList& list);

}  // namespace cppool::kernels::host
