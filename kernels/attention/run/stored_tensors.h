// What a dump of a case in fp8 has beside its tensors: payloads, scales and exponents, and O as D got it.
#pragma once

#include <cppool/runtime.h>

#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "kernels/attention/spec.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/attention/tensors/tensor_set.h"

namespace cppool::kernels {

// Hands this rank's rows of StoredTensors to `sink`; what belongs to no token comes from rank 0. `local` and
// `step` are of the rank's run. With blocks no schedule keeps payloads of a rank's own tokens: they are cast
// here, by the same operation. Waits for the main stream.
void SaveStored(cppool_runtime* runtime, TensorOps& ops, const AttentionSpec& spec, const TensorSet& local,
                const Fp8Step& step, TensorSink& sink);

}  // namespace cppool::kernels
