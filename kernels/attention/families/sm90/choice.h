// What this family does of a request, with which kernels, and what it leaves to the general family.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/families/sm90/backward.h"
#include "kernels/attention/families/sm90/backward_list.h"
#include "kernels/attention/families/sm90/bias_gradient.h"
#include "kernels/attention/families/sm90/forward.h"
#include "kernels/attention/layout.h"

namespace cppool::kernels::cuda::sm90 {

ForwardKernelEntry ForwardOf(const KernelShape& shape, BiasType bias, Products products);
BiasGradientKernelEntry BiasGradientOf(const KernelShape& shape, bool fp8);
BackwardKernelEntry BackwardOf(const KernelShape& shape, BiasType bias, Casts casts);
ForwardKernelEntry ForwardOf(const KernelRequest& request);
BackwardKernelEntry BackwardOf(const KernelRequest& request);

// Whether a request's backward pass casts P and dS; its forward pass casts P in every recipe.
inline bool CastsBackward(const KernelRequest& request) { return request.fp8 && request.fp8->bwd; }
inline bool CastsInBlocks(const KernelRequest& request) {
  return CastsBackward(request) && InBlocks(*request.fp8);
}
// Whether a request's forward pass multiplies payloads. With a bias none does: no such kernel was built,
// since no other fp8 attention has a bias to measure it beside.
bool MultipliesPayloads(const KernelRequest& request);
// The request as the general family gets it, which has no products of payloads.
KernelRequest ForGeneral(KernelRequest request);

// Whether a bias tensor, if there is one, has rows that begin where TMA can fetch: at multiples of 16 bytes.
bool HasAlignedBias(const KernelRequest& request);
bool HasForward(const KernelRequest& request);
bool HasBiasGradient(const KernelRequest& request);
bool HasBackward(const KernelRequest& request);
// Whether the general family may take part in a case of this request. With a bias the layouts decide, see
// KeysAligned; the gradient of a bias that queries share is always the general family's.
bool MayNeedGeneral(const KernelRequest& request);

// Whether TMA can fetch the bias of each range of keys, or of each tile, from its first key on.
bool KeysAligned(const WorkList& list);
bool KeysAligned(const BackwardList& list);
// Makes ranges begin at multiples of 16 of a run's tokens, as its slots do, and puts their first slots into
// the upper halves of their rows. Keys that a range takes on are tokens of the same run, and outside of the
// band.
void AlignToSlots(WorkList& list, const Layout& keys);

}  // namespace cppool::kernels::cuda::sm90
