// NCCL's all-gather and all-to-all between two GPUs: on multiprocessors as usual, on few of them, and by copy
// engines ("zero-CTA").
//
// NVLink's multicast objects must not be made: on a shared host they can take the GPUs out of service. With
// NCCL_NVLS_ENABLE=0 NCCL 2.28 makes none, for windows neither. Lines of 2.28.9, in src/; 2.28.3 and 2.28.7
// are alike:
// - cuMulticastCreate is called in ncclNvlsGroupCreate alone (transport/nvls.cc:59), which is called at
//   nvls.cc:246 and :616, where comm->nvlsSupport (:329, :389) or the algorithm NVLS
//   (register/coll_reg.cc:47, :126) comes first, and at dev_runtime.cc:275, where comm->nvlsSupport does
//   (:259; windows ask for it only then, sym_kernels.cc:222).
// - comm->nvlsSupport stays 0 with NCCL_NVLS_ENABLE=0 (nvls.cc:156-161). ncclMemAlloc has no multicast at all
//   (allocator.cc:14).
// So windows are registered with 2.28 alone, when NCCL's log shows that NVLS is off; the log, in which each
// such object is named, is searched again afterwards.
#pragma once

#include "tests/measure/transfers/load.h"

namespace cppool::measure {

// Sets NCCL's environment: before the first thread and the first call of CUDA or NCCL. Throws unless NVLS is
// then off.
void PrepareNccl();

// Prints the version that runs and a table. Where zero-CTA collectives cannot be had it says why, and
// measures the others.
void MeasureNccl(const Attention& attention);

}  // namespace cppool::measure
