// The tensors of a call as a trial (call_trial.h) sees them. Host only.
#pragma once

#include <vector>

#include "kernels/attention/call_trial.h"
#include "kernels/attention/families/table/call.h"

namespace cppool::kernels::table {

// Those that the form has, in the order of CallTensor. `area`: the call's, of the same form but for strides.
std::vector<TrialTensor> TrialTensors(const CallForm& form, const CallArea& area, const CallData& data);

}  // namespace cppool::kernels::table
