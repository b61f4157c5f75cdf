#include "kernels/attention/checks/kernel_trial.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/attention/checks/verify.h"

namespace cppool::kernels {
namespace {

constexpr std::size_t kGuard = 4096;  // bytes on either side of what a call may use
constexpr int kBlank = 0xFF;          // of guards and gaps: NaN in every floating-point type
constexpr std::chrono::microseconds kDelay{300};

std::size_t RoundUp(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

RowsCopy Copy(const TrialTensor& from, const TrialTensor& to) {
  return {from.data,         to.data,         from.batch,      from.rows,    from.row_bytes,
          from.batch_stride, from.row_stride, to.batch_stride, to.row_stride};
}

}  // namespace

const char* KernelTrial::NameOf(Kind kind) {
  switch (kind) {
    case Kind::kStrides:
      return "strides";
    case Kind::kWorkspace:
      return "workspace";
    case Kind::kLateInputs:
      return "late_inputs";
  }
  throw RuntimeError(CPPOOL_INTERNAL, "no such trial");
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
  const bool strided = kind_ == Kind::kStrides && call.run_strided;
  Arrangement arranged = Arrange(strided ? call.strided_tensors : call.tensors, call.workspace_bytes);
  std::int64_t widest = 0;
  for (const TrialTensor& tensor : call.tensors) widest = std::max(widest, tensor.row_bytes);
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
      outputs.push_back(Copy(copy, call.tensors[i]));
      TrialTensor blank = copy;
      blank.data = blank_.get();
      blank.batch_stride = blank.row_stride = 0;
      blanks.push_back(Copy(blank, copy));
    } else {
      inputs.push_back(Copy(call.tensors[i], copy));
    }
  }
  void* const workspace = call.workspace_bytes > 0 ? arena_.at(arranged.workspace) : nullptr;
  const auto run = [&] { (strided ? call.run_strided : call.run)(data, workspace); };
  if (kind_ == Kind::kLateInputs) {  // nothing comes between the inputs and the call
    kernels_.CopyRows(inputs, kDelay, stream);
    run();
    kernels_.CopyRows(outputs, {}, stream);
    return;
  }
  kernels_.CopyRows(inputs, {}, stream);
  const int content = kind_ == Kind::kWorkspace ? kBlank : 0;
  fill(workspace, content, call.workspace_bytes);
  Results<std::uint64_t> digests(rt_, 2, 0);
  std::uint64_t* const before = digests.Next();
  std::uint64_t* const after = digests.Next();
  kernels_.Digest(arena_.get(), arranged.bytes, before, stream);
  run();
  kernels_.CopyRows(outputs, {}, stream);
  kernels_.CopyRows(blanks, {}, stream);
  fill(workspace, content, call.workspace_bytes);
  kernels_.Digest(arena_.get(), arranged.bytes, after, stream);
  Check(rt_, rt_->stream_synchronize(rt_, stream));
  if (*before != *after && finding_.empty()) finding_ = Locate(call, arranged, call.tensors, stream);
}

// Where the arena differs from what it was, as far as that is known: guards and gaps are blank, inputs are those of the
// originals.
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
    for (std::int64_t b = 0; b < tensor.batch; ++b) {
      for (std::int64_t row = 0; row < tensor.rows; ++row) {
        const auto at = static_cast<std::size_t>(b * tensor.batch_stride + row * tensor.row_stride);
        std::fill_n(of_rows.begin() + static_cast<std::ptrdiff_t>(at), tensor.row_bytes, true);
      }
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
    for (std::int64_t b = 0; b < tensor.batch; ++b) {
      for (std::int64_t row = 0; row < tensor.rows; ++row) {
        const auto here =
            static_cast<std::ptrdiff_t>(offset) + b * tensor.batch_stride + row * tensor.row_stride;
        const auto there = b * originals[i].batch_stride + row * originals[i].row_stride;
        if (std::memcmp(found.begin() + here, original.begin() + there,
                        static_cast<std::size_t>(tensor.row_bytes)) != 0)
          return who + "to its input " + name;
      }
    }
  }
  const std::size_t end = arranged.workspace + call.workspace_bytes;
  if (dirty(end, arranged.bytes)) return who + "behind the end of its workspace";
  return who + "beyond its tensors";
}

}  // namespace cppool::kernels
