#include "kernels/attention/families/table/family.h"

#include <cstdint>
#include <string>

#include "kernels/attention/families/table/block_calls.h"
#include "kernels/attention/families/table/kernel.h"
#include "kernels/attention/families/table/packed_sequences.h"
#include "kernels/attention/families/table/scratch.h"
#include "kernels/attention/fp8_table.h"
#include "kernels/attention/problem/row_tiles.h"

namespace cppool::kernels::table {
std::optional<std::string> TableFamily::Refusal(const KernelRequest& request) const {
  const std::string name = kernel_.name;
  if (request.training && !kernel_.backward)
    return name + ": it has no backward pass, and is_training is true";
  if (request.deterministic && !(kernel_.features & CPPOOL_ATTENTION_DETERMINISTIC))
    return name + ": it does not claim to be deterministic";
  const auto lacks = [&](std::uint32_t feature) { return (kernel_.features & feature) == 0; };
  if (request.bias == BiasType::kPostScale && lacks(CPPOOL_ATTENTION_BIAS))
    return name + ": it does not claim a bias (CPPOOL_ATTENTION_BIAS)";
  if (request.bias == BiasType::kAlibi && lacks(CPPOOL_ATTENTION_ALIBI))
    return name + ": it does not claim ALiBi (CPPOOL_ATTENTION_ALIBI)";
  if (request.max_logit && lacks(CPPOOL_ATTENTION_MAX_LOGIT))
    return name + ": it does not claim max_logit (CPPOOL_ATTENTION_MAX_LOGIT)";
  if (request.fp8 && lacks(CPPOOL_ATTENTION_FP8))
    return name + ": it does not claim fp8 (CPPOOL_ATTENTION_FP8)";
  if (request.fp8 && !lacks(CPPOOL_ATTENTION_FP8_OUT) &&
      !Fp8TableOf(*request.fp8, request.training).Has(Fp8Tensor::kOut, kForCaller)) {
    return name +
           ": it writes out in e4m3, and the recipe has it in 16 bits: use fp8_mha or scaling_mode "
           "'delayed'";
  }
  if (request.fp8 && request.fp8->products != Fp8Products::kAuto)
    return name + ": fp8_products must be 'auto': what a library's kernel multiplies is its own";
  if (request.fp8 && InBlocks(*request.fp8))
    return name + ": cppool/attention.h has no scales of blocks, which scaling_mode mxfp8 makes";
  return std::nullopt;
}

std::unique_ptr<BlockAsker> TableFamily::AskBlocks() const { return std::make_unique<CallAsker>(kernel_); }

std::size_t TableFamily::WorkspaceBytes(const KernelRequest& request, std::int64_t rows_q,
                                        std::int64_t rows_kv) const {
  return Scratch(request, rows_q, rows_kv, nullptr).bytes();
}

std::size_t TableFamily::PlanBytes(const KernelRequest&, const Layout& query, const Layout& key) const {
  const bool packs = (kernel_.features & CPPOOL_ATTENTION_VARLEN) != 0;
  return RowTilesBytes(query) + (packs ? PackedTablesBytes(query, key) : 0);
}

std::unique_ptr<AttentionKernel> TableFamily::Open(cppool_runtime* runtime) const {
  return std::make_unique<TableKernel>(runtime, *this);
}

}  // namespace cppool::kernels::table
