#include "kernels/attention/families/table/block_calls.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "kernels/attention/families/table/kernel_function.h"

namespace cppool::kernels::table {
namespace {

bool Has(const cppool_attention_kernel& kernel, std::uint32_t feature) {
  return (kernel.features & feature) != 0;
}

class PassCutter {
 public:
  PassCutter(CallAsker& asker, const KernelRequest& request, bool backward, std::int32_t q_step,
             std::int32_t k_step)
      : asker_(asker),
        request_(request),
        backward_(backward),
        q_step_(q_step),
        k_step_(k_step),
        groups_(HeadGroupsOf(request.shape)) {}

  // Decides on the calls for all of these; else the reason why not.
  std::optional<std::string> TakeAll(const std::vector<Rectangle>& rectangles) {
    const bool packs = Has(asker_.kernel(), CPPOOL_ATTENTION_VARLEN) && request_.bias == BiasType::kNone &&
                       q_step_ == 1 && k_step_ == 1 && rectangles.size() > 1;
    if (!packs) return TakeEach(rectangles);
    // From which corner the sequences have the same windows depends on the mask.
    std::vector<PackedSequences> packed = Pack(rectangles, CPPOOL_TOP_LEFT);
    std::vector<PackedSequences> other = Pack(rectangles, CPPOOL_BOTTOM_RIGHT);
    if (other.size() < packed.size()) std::swap(packed, other);
    for (PackedSequences& sequences : packed) {
      if (auto refusal = TakePacked(std::move(sequences))) return refusal;
    }
    return std::nullopt;
  }

  PassCalls Layered(const Layout& query, const Layout& key);

 private:
  // Appends what the rectangle becomes to taken_; else the reason.
  std::optional<std::string> Take(const Rectangle& rectangle) {
    std::optional<std::string> refusal = TakeArea({rectangle, CPPOOL_TOP_LEFT});
    if (!refusal) return std::nullopt;
    const bool one_diagonal = rectangle.full() || rectangle.queries == rectangle.keys;
    if (!one_diagonal && !TakeArea({rectangle, CPPOOL_BOTTOM_RIGHT})) return std::nullopt;
    for (const auto& split : {&SplitTall, &SplitSquare}) {
      const std::vector<Rectangle> parts = split(rectangle, q_step_, k_step_);
      if (parts.empty()) continue;
      const std::size_t before = taken_.size();
      if (!TakeEach(parts)) return std::nullopt;
      taken_.erase(taken_.begin() + static_cast<std::ptrdiff_t>(before), taken_.end());
    }
    return refusal;
  }
  std::optional<std::string> TakeEach(const std::vector<Rectangle>& rectangles) {
    for (const Rectangle& rectangle : rectangles) {
      if (auto refusal = Take(rectangle)) return refusal;
    }
    return std::nullopt;
  }
  // In one call, or in several where the kernel does not take it.
  std::optional<std::string> TakePacked(PackedSequences sequences) {
    const std::vector<Rectangle> batched = Batched(sequences.each);
    if (batched.size() == 1) return Take(batched.front());
    const auto other = sequences.anchor == CPPOOL_TOP_LEFT ? CPPOOL_BOTTOM_RIGHT : CPPOOL_TOP_LEFT;
    const bool one_diagonal = std::all_of(sequences.each.begin(), sequences.each.end(),
                                          [](const Rectangle& r) { return r.full() || r.queries == r.keys; });
    std::vector<PackedSequences> turned;
    if (!one_diagonal) turned = Pack(sequences.each, other);
    if (!TakeArea(std::move(sequences))) return std::nullopt;
    if (turned.size() == 1 && !TakeArea(std::move(turned.front()))) return std::nullopt;
    return TakeEach(batched);
  }
  std::optional<std::string> TakeArea(CallArea area) {
    for (const HeadGroup& group : groups_) {
      if (auto refusal = asker_.Refusal(Form(area, group, false))) return refusal;
    }
    taken_.push_back(std::move(area));
    return std::nullopt;
  }
  CallForm Form(const CallArea& area, const HeadGroup& group, bool fp32) const {
    return FormOf(backward_, request_, area, group, q_step_, k_step_,
                  {fp32, Has(asker_.kernel(), CPPOOL_ATTENTION_LSE_HEADS_FIRST),
                   Has(asker_.kernel(), CPPOOL_ATTENTION_FP8_OUT)});
  }
  std::size_t IndexOf(const CallForm& form, std::vector<CallForm>& forms) const {
    const auto found = std::find(forms.begin(), forms.end(), form);
    if (found != forms.end()) return static_cast<std::size_t>(found - forms.begin());
    forms.push_back(form);
    return forms.size() - 1;
  }

  CallAsker& asker_;
  const KernelRequest& request_;
  const bool backward_;
  const std::int32_t q_step_, k_step_;
  const std::vector<HeadGroup> groups_;
  std::vector<CallArea> taken_;
};

// The rows of one side that layers have written so far: how many layers each row is in.
class RowCounts {
 public:
  RowCounts(const Layout& layout) : step_(layout.row_step), counts_(static_cast<std::size_t>(layout.rows)) {}

  template <typename Function>
  void ForEach(std::int64_t row, std::int64_t length, std::int64_t batch, std::int64_t stride,
               Function&& function) {
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t i = 0; i < length; ++i)
        function(counts_[static_cast<std::size_t>(row + b * stride + i * step_)]);
    }
  }

 private:
  std::int64_t step_;
  std::vector<std::uint32_t> counts_;
};

void Append(const PackedTables& tables, std::vector<std::int32_t>& to) {
  for (const auto* table :
       {&tables.cu_seqlens_q, &tables.cu_seqlens_kv, &tables.seqlens_q, &tables.seqlens_kv})
    to.insert(to.end(), table->begin(), table->end());
}

std::int64_t TokensOf(const Layout& layout) {
  std::int64_t tokens = 0;
  for (const Segment& segment : layout.segments) tokens += segment.length;
  return tokens;
}

PassCalls PassCutter::Layered(const Layout& query, const Layout& key) {
  PassCalls pass;
  pass.fp32 = Has(asker_.kernel(), CPPOOL_ATTENTION_FP32_RESULTS);
  for (const CallArea& area : taken_) {
    for (const HeadGroup& group : groups_) pass.fp32 = pass.fp32 && !asker_.Refusal(Form(area, group, true));
  }
  RowCounts of_queries(query), of_keys(key);
  std::vector<std::array<std::int64_t, 2>> written;  // rows of both sides, by layer
  for (const CallArea& area : taken_) {
    const std::vector<Rectangle> all =
        area.sequences.empty() ? std::vector<Rectangle>{area.where} : area.sequences;
    std::uint32_t layer = 0;
    const auto raise = [&](std::uint32_t count) { layer = std::max(layer, count); };
    const auto take = [&](std::uint32_t& count) { count = layer + 1; };
    for (const Rectangle& r : all) {
      of_queries.ForEach(r.q_row, r.queries, r.batch, r.q_stride, raise);
      if (backward_) of_keys.ForEach(r.k_row, r.keys, r.batch, r.k_stride, raise);
    }
    if (pass.layers.size() <= layer) {
      pass.layers.emplace_back();
      written.push_back({0, 0});
    }
    for (const Rectangle& r : all) {
      of_queries.ForEach(r.q_row, r.queries, r.batch, r.q_stride, take);
      if (backward_) of_keys.ForEach(r.k_row, r.keys, r.batch, r.k_stride, take);
      written[layer][0] += r.batch * r.queries;
      written[layer][1] += r.batch * r.keys;
    }
    const std::size_t tables = pass.tables.size();
    if (!area.sequences.empty()) Append(TablesOf(area.sequences), pass.tables);
    for (const HeadGroup& group : groups_) {
      BlockCall call{area, group, IndexOf(Form(area, group, false), pass.forms), 0, tables};
      if (pass.fp32) call.fp32_form = IndexOf(Form(area, group, true), pass.forms);
      pass.layers[layer].calls.push_back(call);
    }
  }
  for (std::size_t i = 0; i < pass.layers.size(); ++i) {
    pass.layers[i].every_query = written[i][0] == TokensOf(query);
    pass.layers[i].every_q_row = written[i][0] == query.rows;
    pass.layers[i].every_k_row = written[i][1] == key.rows;
  }
  return pass;
}

}  // namespace

std::optional<std::string> CallAsker::Refusal(const CallForm& form) {
  for (const auto& [known, answer] : answers_) {
    if (known == form) return answer;
  }
  const CallView view(form, std::string_view(kernel_.backend) == "cuda" ? 0 : -1);
  auto answer = CallKernel(kernel_, "supports", form, [&](char* why, std::size_t size) {
    return kernel_.supports(view.call(), why, size);
  });
  if (answer)
    answer = std::string(kernel_.name) + ": " +
             (answer->empty() ? "does not support this call and does not say why" : *answer);
  answers_.emplace_back(form, answer);
  return answer;
}

std::optional<std::string> CallAsker::Refusal(const KernelRequest& request, const Layout& query,
                                              const Layout& key, const std::vector<Band>& bands) {
  return CutBlock(*this, request, query, key, bands).refusal;
}

BlockCut CutBlock(CallAsker& asker, const KernelRequest& request, const Layout& query, const Layout& key,
                  const std::vector<Band>& bands) {
  BlockCut cut;
  const std::vector<Rectangle> rectangles =
      CutIntoRectangles(query, key, bands, request.bias != BiasType::kNone);
  for (const bool backward : {false, true}) {
    if (backward && !request.training) break;
    PassCutter cutter(asker, request, backward, query.row_step, key.row_step);
    cut.refusal = cutter.TakeAll(rectangles);
    if (cut.refusal) return cut;
    (backward ? cut.calls.backward : cut.calls.forward) = cutter.Layered(query, key);
  }
  return cut;
}

}  // namespace cppool::kernels::table
