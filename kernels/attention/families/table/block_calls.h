// What a kernel of cppool/attention.h is called with for one block of queries and keys: rectangles cut as the
// kernel takes them, and which of them can run before their results are merged. Host only.
#pragma once

#include <cppool/attention.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/attention_kernel.h"
#include "kernels/attention/families/table/call.h"

namespace cppool::kernels::table {

struct BlockCall {
  CallArea area;
  HeadGroup group;
  std::size_t form = 0;       // into PassCalls::forms: results in the dtypes of the shape
  std::size_t fp32_form = 0;  // and in fp32, where PassCalls::fp32 says so
  std::size_t tables = 0;     // of packed sequences: where PassCalls::tables has theirs
};

// Calls no two of which write the same row.
struct Layer {
  std::vector<BlockCall> calls;
  bool every_query = false;  // every row that holds a query is written
  bool every_q_row = false;  // every row of the queries' buffer is, padding too
  bool every_k_row = false;  // likewise of the keys, in the backward pass
};

struct PassCalls {
  std::vector<CallForm> forms;  // distinct
  std::vector<Layer> layers;    // empty: nothing is seen
  bool fp32 = false;            // the kernel writes fp32 for all of these
  // TablesOf the packed sequences of each call, one after another.
  std::vector<std::int32_t> tables;
};

struct BlockCalls {
  PassCalls forward, backward;  // backward: only of a request with training
};

// What asks a kernel whether it takes a call, and remembers the answers.
class CallAsker : public BlockAsker {
 public:
  explicit CallAsker(const cppool_attention_kernel& kernel) : kernel_(kernel) {}
  const cppool_attention_kernel& kernel() const { return kernel_; }
  // The kernel's reason; nothing when it takes the call.
  std::optional<std::string> Refusal(const CallForm& form);
  std::optional<std::string> Refusal(const KernelRequest& request, const Layout& query, const Layout& key,
                                     const std::vector<Band>& bands) override;

 private:
  const cppool_attention_kernel& kernel_;
  std::vector<std::pair<CallForm, std::optional<std::string>>> answers_;
};

// Cuts the block. With a refusal the kernel takes neither the whole rectangle (with either anchor) nor its
// parts: the reason is that of the whole.
struct BlockCut {
  BlockCalls calls;
  std::optional<std::string> refusal;
};
BlockCut CutBlock(CallAsker& asker, const KernelRequest& request, const Layout& query, const Layout& key,
                  const std::vector<Band>& bands);

}  // namespace cppool::kernels::table
