#include "kernels/attention/checks/kernel_trial.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

#include "kernels/attention/checks/verify.h"

namespace cppool::kernels {
namespace {

constexpr std::size_t kGuard = 4096;  // bytes on either side of what a call may use
constexpr int kBlank = 0xFF;          // of guards and gaps: NaN in every floating-point type
constexpr std::chrono::microseconds kDelay{300};

std::size_t RoundUp(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Appends the copies of all parts of a tensor to one with as many parts.
void Copy(const TrialTensor& from, const TrialTensor& to, std::vector<RowsCopy>& copies) {
  for (std::size_t i = 0; i < from.parts.size(); ++i) {
    const TrialRows &source = from.parts[i], &target = to.parts[i];
    copies.push_back({static_cast<const std::byte*>(from.data) + source.offset,
                      static_cast<std::byte*>(to.data) + target.offset, source.batch, source.rows,
                      source.row_bytes, source.batch_stride, source.row_stride, target.batch_stride,
                      target.row_stride});
  }
}

std::int64_t WidestRow(const std::vector<TrialTensor>& tensors) {
  std::int64_t widest = 0;
  for (const TrialTensor& tensor : tensors) {
    for (const TrialRows& part : tensor.parts) widest = std::max(widest, part.row_bytes);
  }
  return widest;
}

// Calls function(first byte) for every row of the part.
template <typename Function>
void ForEachRow(const TrialRows& part, Function&& function) {
  for (std::int64_t b = 0; b < part.batch; ++b) {
    for (std::int64_t row = 0; row < part.rows; ++row)
      function(part.offset + b * part.batch_stride + row * part.row_stride);
  }
}

}  // namespace

const char* KernelTrial::NameOf(Kind kind) {
  static constexpr auto kNames = std::to_array({"strides", "workspace", "late_inputs"});
  static_assert(kNames.size() == std::size(kAll));
  return kNames.at(static_cast<std::size_t>(kind));
}

void KernelTrial::ResultsDiffer() {
  differences_ += differences_.empty() ? "kernel " + kernel_ + ": its results differ when " : "; when ";
  switch (kind_) {
    case Kind::kStrides:
      differences_ += strided_ ? "its rows lie 64 bytes apart and its workspace holds zeros: it must use the "
                                 "strides of each tensor"
                               : "its tensors lie elsewhere and its workspace holds zeros: it must read "
                                 "nothing but the tensors of "
                                 "the call";
      return;
    case Kind::kWorkspace:
      differences_ +=
          "its workspace holds NaN: it must write its workspace before it reads it, in every call";
      return;
    case Kind::kLateInputs:
      differences_ +=
          "its inputs are written right before the call, by a slow kernel on the same stream: it must wait "
          "for the work on its stream before it reads them";
      return;
  }
}

KernelTrial::Arrangement KernelTrial::Arrange(const std::vector<TrialTensor>& tensors,
                                              std::size_t workspace_bytes) {
  Arrangement arranged;
  std::size_t at = kGuard;
  for (const TrialTensor& tensor : tensors) {
    arranged.places.push_back({tensor, at});
    at = RoundUp(at + static_cast<std::size_t>(tensor.extent())) + kGuard;
  }
  arranged.workspace = at;
  arranged.bytes = RoundUp(at + workspace_bytes) + kGuard;
  return arranged;
}

void KernelTrial::Run(const TrialCall& call, cppool_stream stream) {
  kernel_ = call.kernel;
  const bool strided = kind_ == Kind::kStrides && call.run_strided;
  strided_ = strided_ || strided;
  Arrangement arranged = Arrange(strided ? call.strided_tensors : call.tensors, call.workspace_bytes);
  const std::int64_t widest = WidestRow(call.tensors);
  if (arena_.bytes() < arranged.bytes) arena_ = Buffer(rt_, arranged.bytes, stream);
  if (blank_.bytes() < static_cast<std::size_t>(widest))
    blank_ = Buffer(rt_, static_cast<std::size_t>(widest), stream);
  const auto fill = [&](void* data, int byte, std::size_t bytes) {
    if (bytes > 0) Check(rt_, rt_->fill(rt_, data, byte, bytes, stream));
  };
  fill(arena_.get(), kBlank, arranged.bytes);
  fill(blank_.get(), kBlank, blank_.bytes());
  std::vector<RowsCopy> inputs, outputs, blanks;
  std::vector<void*> data;
  for (std::size_t i = 0; i < arranged.places.size(); ++i) {
    TrialTensor& copy = arranged.places[i].tensor;
    copy.data = arena_.at(arranged.places[i].offset);
    data.push_back(copy.data);
    if (copy.written) {
      Copy(copy, call.tensors[i], outputs);
      TrialTensor blank = copy;
      blank.data = blank_.get();
      for (TrialRows& part : blank.parts) part.offset = part.batch_stride = part.row_stride = 0;
      Copy(blank, copy, blanks);
    } else {
      Copy(call.tensors[i], copy, inputs);
    }
  }
  void* const workspace = call.workspace_bytes > 0 ? arena_.at(arranged.workspace) : nullptr;
  const auto run = [&] { (strided ? call.run_strided : call.run)(data, workspace); };
  if (kind_ == Kind::kLateInputs) {  // nothing comes between the inputs and the call
    // A kernel that does not wait must find NaN, and not the same inputs of an earlier trial.
    Check(rt_, rt_->stream_synchronize(rt_, stream));
    CopyAll(inputs, kDelay, stream);
    run();
    CopyAll(outputs, {}, stream);
    return;
  }
  CopyAll(inputs, {}, stream);
  const int content = kind_ == Kind::kWorkspace ? kBlank : 0;
  fill(workspace, content, call.workspace_bytes);
  Results<std::uint64_t> digests(rt_, 2, 0);
  std::uint64_t* const before = digests.Next();
  std::uint64_t* const after = digests.Next();
  kernels_.Digest(arena_.get(), arranged.bytes, before, stream);
  run();
  CopyAll(outputs, {}, stream);
  CopyAll(blanks, {}, stream);
  fill(workspace, content, call.workspace_bytes);
  kernels_.Digest(arena_.get(), arranged.bytes, after, stream);
  Check(rt_, rt_->stream_synchronize(rt_, stream));
  if (*before != *after && write_.empty()) write_ = Locate(call, arranged, call.tensors, stream);
}

void KernelTrial::CopyAll(const std::vector<RowsCopy>& copies, std::chrono::nanoseconds delay,
                          cppool_stream stream) {
  // The first tensors come last, next to the call: q, k and v.
  for (std::size_t end = copies.size(); end > 0;) {
    const std::size_t begin = end - std::min(end, CheckKernels::kMostCopies);
    kernels_.CopyRows({copies.begin() + static_cast<std::ptrdiff_t>(begin),
                       copies.begin() + static_cast<std::ptrdiff_t>(end)},
                      delay, stream);
    end = begin;
  }
}

// Where the arena differs from what it was, as far as that is known: guards and gaps are blank, inputs are
// those of the originals.
std::string KernelTrial::Locate(const TrialCall& call, const Arrangement& arranged,
                                const std::vector<TrialTensor>& originals, cppool_stream stream) {
  HostArray<unsigned char> found(rt_, arranged.bytes);
  Check(rt_, rt_->copy(rt_, found.begin(), arena_.get(), arranged.bytes, stream));
  Check(rt_, rt_->stream_synchronize(rt_, stream));
  const std::string who = "kernel " + call.kernel + " wrote ";
  const auto dirty = [&](std::size_t begin, std::size_t end) {
    return std::any_of(found.begin() + begin, found.begin() + end,
                       [](unsigned char c) { return c != kBlank; });
  };
  for (std::size_t i = 0; i < arranged.places.size(); ++i) {
    const auto& [tensor, offset] = arranged.places[i];
    const std::size_t end = offset + static_cast<std::size_t>(tensor.extent());
    const std::string name = tensor.name;
    if (dirty(offset - kGuard, offset)) return who + "in front of " + name;
    if (dirty(end, end + kGuard)) return who + "behind the end of " + name;
    std::vector<bool> of_rows(end - offset, false);
    for (const TrialRows& part : tensor.parts) {
      ForEachRow(part, [&](std::int64_t at) { std::fill_n(of_rows.begin() + at, part.row_bytes, true); });
    }
    for (std::size_t at = offset; at < end; ++at) {
      if (!of_rows[at - offset] && found.begin()[at] != kBlank)
        return who + "between the rows of " + name + ", where its strides leave a gap";
    }
    if (tensor.written) continue;
    HostArray<unsigned char> original(rt_, static_cast<std::size_t>(originals[i].extent()));
    Check(rt_, rt_->copy(rt_, original.begin(), originals[i].data,
                         static_cast<std::size_t>(originals[i].extent()), stream));
    Check(rt_, rt_->stream_synchronize(rt_, stream));
    std::vector<unsigned char> expected;  // row by row
    for (const TrialRows& part : originals[i].parts) {
      ForEachRow(part, [&](std::int64_t at) {
        expected.insert(expected.end(), original.begin() + at, original.begin() + at + part.row_bytes);
      });
    }
    auto row = expected.begin();
    const auto begin = found.begin() + static_cast<std::ptrdiff_t>(offset);
    bool same = true;
    for (const TrialRows& part : tensor.parts) {
      ForEachRow(part, [&](std::int64_t at) {
        same = same && std::equal(row, row + part.row_bytes, begin + at);
        row += part.row_bytes;
      });
    }
    if (!same) return who + "to its input " + name;
  }
  const std::size_t end = arranged.workspace + call.workspace_bytes;
  if (dirty(end, arranged.bytes)) return who + "behind the end of its workspace";
  return who + "beyond its tensors";
}

}  // namespace cppool::kernels
