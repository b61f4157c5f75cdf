// planted_bug.h for code of a GPU: CPPOOL_PLANTED_NATIVE names the bug when it is compiled.
#pragma once

#include "kernels/host_device.h"

namespace cppool::kernels {

enum class Bug { kNone, kNativeNeverPromoted, kNativeNoScale, kNativeOtherSlots };

CPPOOL_HOST_DEVICE constexpr bool Planted(Bug bug) { return bug == Bug::CPPOOL_PLANTED_NATIVE; }

}  // namespace cppool::kernels
