// A kernel of cppool/attention.h on the host, in fp64 from the definition, that a test can make limited or
// wrong.
#pragma once

#include <cppool/attention.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace cppool::test {

// What TestKernel() does. Set before a case, read by it on several threads.
struct Behaviour {
  // What it takes, beside dtypes that it can read: the reason, or "" for yes.
  std::function<std::string(const cppool_attention_call&)> refuse = {};
  bool refuse_in_prepare = false;
  std::function<void()> in_each = {};  // called at the end of each function
  std::size_t workspace_bytes = 0;

  enum class Fault {
    kNone,
    kFails,             // forward returns an error
    kThrows,            // forward throws
    kFailsBackward,     // backward returns an error
    kOwnLse,            // backward uses the softmax of its own keys in place of the whole row's
    kPacked,            // takes the rows of k and v as packed
    kWritesBehind,      // behind the last element of out
    kWritesBefore,      // before the first element of dq
    kWritesGap,         // between two rows of out
    kWritesBehindBias,  // behind the last element of dbias
    kWritesBiasGap,     // between two rows of dbias
    kWritesOtherRows,   // to a row of no sequence of packed ones
    kPackedBias,        // takes the rows of bias as packed
    kAlibiOfCall,       // counts ALiBi's distance from the beginning of the call
    kAlibiOfMask,       // counts ALiBi's distance from the mask's diagonal
    kWritesInput,       // to k
    kWritesWorkspace,   // behind the workspace
    kKeepsWorkspace,    // backward uses what forward has left in the workspace
    kKeepsInputs,       // k of the first call at an address is used for the later ones
    kKeepsMaximum,      // max_logit holds the largest logit of all rows so far, as one accumulator would
    kNoScale,           // reads fp8 payloads without their scales
    kNoOutScale,        // writes them without
    kPStays,            // does not round P to fp8
    kDrifts,            // each call's results differ from the last one's in a bit
    kLseOfPayloads,     // lse is off by 2^-12 of itself, as 8-bit tensor cores leave it
  };
  Fault fault = Fault::kNone;
};

// The table, with these features; its functions follow `behaviour`. The object is one and the same.
const cppool_attention_kernel& TestKernel(std::uint32_t features, Behaviour behaviour, bool backward = true);
// Calls of forward and backward since TestKernel().
int TestKernelCalls();

}  // namespace cppool::test
