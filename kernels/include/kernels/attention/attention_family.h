// Families of attention kernels: what each supports, what it can do for a schedule, and how to open it on a
// rank.
//
// A family's descriptor is stateless and constant and needs no device: any thread may ask it, before any rank
// runs. It lives as long as the process, that of a library's kernel as long as its request. To add a family:
// implement AttentionFamily and AttentionKernel in a folder of kernels/attention/families/, and list it in
// AttentionFamilies.
#pragma once

#include <cppool/runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/attention_kernel.h"

namespace cppool::kernels {

class TensorOps;

// The form of an operand that is fp8. Its scale is beside it.
enum class Fp8Form {
  kValues,      // in bf16, which holds them exactly
  kPayload,     // as it is moved
  kTransposed,  // a payload as [heads][dim][slots], see problem/transposed.h
};

// What the kernels of a request do beyond one block by itself. Schedules read these and use a general way
// without them, so a kernel that has none runs under every schedule.
//
// Every family takes layouts whose segments lie anywhere in their sequences. A kernel that only knows
// rectangular calls is behind an adapter that cuts a block into such calls: the family "table".
struct Capabilities {
  // Forward continues from (accumulator, lse) in fp32 and adds the softmax offset at the end. Without it each
  // block's own out and lse are merged by TensorOps::Merge.
  bool continues_softmax = false;
  // Forward takes blocks of keys that arrive while it runs (ArrivingKeys), best in pieces of a tensor of at
  // least so many bytes; 0: it does not.
  std::size_t arriving_piece_bytes = 0;
  // Backward makes dq, or dk and dv, alone. Without it a schedule asks for all three of the same block.
  bool gradients_apart = false;
  // Backward adds to fp32 accumulators. Without it a block's gradients come in their dtype and TensorOps adds
  // them.
  bool accumulates_gradients = false;
  // And writes those of dk and dv in the rows of the plan's keys alone, so that the keys of a block may be
  // divided among calls. Without it a call writes all rows of the block.
  bool splits_keys = false;
  // And two calls of a pass may run at once, on two streams (BackwardArgs::beside), each with dk and dv of
  // its own: from so many keys of a block on, counted for each key/value head; 0: never. Never with a bias
  // tensor, or where sums need a fixed order.
  std::size_t overlapping_keys = 0;
  // Backward adds dbias too. Without it BackwardBias does, in a call of its own.
  bool bias_with_gradients = false;
  // In what form operands of fp8 with one scale for each tensor are read; those in blocks are always values.
  // kPayload for q and k of the forward pass: its products are of payloads, too, unless it is a library's.
  Fp8Form forward_qk = Fp8Form::kValues, forward_v = Fp8Form::kValues, backward = Fp8Form::kValues;
  // Keys over which 8-bit tensor cores sum products of payloads, with few bits, before the sum is added up in
  // fp32. Logits are such a sum over the head dim. 0: all sums are fp32; kAllKeys: the family does not say.
  // The checks ask whether it is 0: lse's limit is that of one such sum, however many keys there are, and
  // what out loses with few keys (0.1 % with 128, see kernels/fp8.md) is less than casts may change it by. A
  // test of what many keys lose is held to the number.
  int fp8_sum_keys = 0;
  static constexpr int kAllKeys = 0x7fffffff;
};

// Asks a family about blocks of queries and keys, without a device. Remembers what it can use again.
class BlockAsker {
 public:
  virtual ~BlockAsker() = default;
  // Why the family cannot do the block, which belongs to a request that it does not refuse; nothing when it
  // can.
  virtual std::optional<std::string> Refusal(const KernelRequest& request, const Layout& query,
                                             const Layout& key, const std::vector<Band>& bands) = 0;
};

class AttentionFamily {
 public:
  virtual ~AttentionFamily() = default;

  virtual const char* kernels() const = 0;  // whose kernels these are: "cppool"
  virtual const char* version() const = 0;
  virtual const char* name() const = 0;  // of the family: "host", "sm80"
  // For a request that it does not refuse: its kernels may differ in what they can do.
  virtual Capabilities capabilities(const KernelRequest& request) const = 0;

  // Why the family cannot do this, in words that name the parameter and what there is; nothing when it can.
  virtual std::optional<std::string> Refusal(const KernelRequest& request) const = 0;

  // NULL: what is not refused above is done for all blocks.
  virtual std::unique_ptr<BlockAsker> AskBlocks() const { return nullptr; }

  // Returns the bytes of a call's `workspace`, for blocks of at most so many rows.
  virtual std::size_t WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                                     std::int64_t rows_kv) const = 0;
  // Most memory that AttentionKernel::Plan takes for the block.
  virtual std::size_t PlanBytes(const KernelRequest& request, const Layout& query,
                                const Layout& key) const = 0;

  // On the rank's thread. `runtime` is that rank's, of the family's backend, and outlives the kernel.
  virtual std::unique_ptr<AttentionKernel> Open(cppool_runtime* runtime) const = 0;
};

// All families of a backend ("host", "cuda"), the preferred ones first. "cuda" opens the CUDA module. Throws
// RuntimeError for another backend.
std::vector<const AttentionFamily*> AttentionFamilies(std::string_view backend);

// The first family that does not refuse; else NULL and the reason of the preferred one.
struct FamilyChoice {
  const AttentionFamily* family = nullptr;
  std::string refusal;
};
FamilyChoice ChooseFamily(std::string_view backend, const KernelRequest& request);

// Returns what a case of `spec` asks of a kernel, all heads at once.
KernelRequest RequestOf(const AttentionSpec& spec);

// Returns the extent of the bias tensor of `spec`.
BiasExtent ExtentOfBias(const AttentionSpec& spec);

// Holds what a rank computes with.
struct RankKernels {
  RankKernels(cppool_runtime* runtime, const AttentionFamily& family);
  ~RankKernels();
  const AttentionFamily& family;
  std::unique_ptr<AttentionKernel> attention;
  std::unique_ptr<TensorOps> ops;
};

}  // namespace cppool::kernels
