// libcppool_cudnn.so on a GPU: each call against fp64, token by token.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/attention/families/table/prepared_call.h"
#include "kernels/attention/kernel_library.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"

namespace cppool::kernels::test {
namespace {

using table::CallData;
using table::CallForm;
using table::CallView;
using table::PreparedCall;
using table::Rectangle;

const cppool_attention_kernel& Cudnn() {
  static const KernelLibrary library(dlopen(CudnnModule().c_str(), RTLD_NOW | RTLD_LOCAL), CudnnModule());
  return library.Find("cudnn", "cuda");
}

std::string RefusalOf(const CallForm& form) {
  std::vector<char> why(512);
  const CallView view(form, 0);
  return Cudnn().supports(view.call(), why.data(), why.size()) == CPPOOL_OK ? "" : why.data();
}

// Whether there is something to test; a test says why not, and ends.
bool Ready() {
  if (!HaveDevice()) return false;
  const std::string version = Cudnn().version;
  if (version.find("not found") != std::string::npos) {
    WARN(version);
    return false;
  }
  return true;
}

struct Case {
  Dims dims{128, 128};
  Dtype dtype = Dtype::kBf16;
  int heads = 4, kv_heads = 2;
  std::int64_t batch = 2, queries = 256, keys = 256;
  cppool_attention_anchor anchor = CPPOOL_TOP_LEFT;
  std::int64_t window_left = -1, window_right = -1;
  QkvFormat format = QkvFormat::kBshd;
  bool deterministic = false;
  BiasType bias = BiasType::kNone;
  BiasShape bias_shape{};
  bool max_logit = false;

  Band band() const {
    const auto diagonal = static_cast<std::int32_t>(anchor == CPPOOL_TOP_LEFT ? 0 : keys - queries);
    return {window_left < 0 ? -kOpen : diagonal - static_cast<std::int32_t>(window_left),
            window_right < 0 ? kOpen : diagonal + static_cast<std::int32_t>(window_right), diagonal};
  }
  Problem problem() const {
    Problem made = Global(Shape(dims, dtype, heads, kv_heads), format, batch, queries, keys, band());
    made.bias = bias;
    made.bias_shape = bias_shape;
    made.max_logit = max_logit;
    made.deterministic = deterministic;
    return made;
  }
  // The whole problem as one call.
  Rectangle whole() const {
    Rectangle where;
    where.queries = queries;
    where.keys = keys;
    where.low = band().low;
    where.high = band().high;
    where.diagonal = band().diagonal;
    where.batch = batch;
    where.sequence_stride = 1;
    where.q_stride = format == QkvFormat::kSbhd ? 1 : queries;
    where.k_stride = format == QkvFormat::kSbhd ? 1 : keys;
    return where;
  }
  CallForm form(bool backward, const Rectangle& where) const {
    KernelRequest request = RequestOf(problem());
    const BiasDims extent(problem());
    request.bias_extent = {extent.batch_stride, extent.head_stride,
                           extent.query_stride, extent.queries,
                           extent.keys,         static_cast<std::int64_t>(extent.count())};
    const auto step = static_cast<std::int32_t>(format == QkvFormat::kSbhd ? batch : 1);
    return table::FormOf(backward, request, {where, anchor}, {0, heads, 0, kv_heads}, step, step,
                         {false, true});
  }
};

std::string Describe(const Case& c) {
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  return "dims " + number(c.dims.qk) + "/" + number(c.dims.v) +
         (c.dtype == Dtype::kBf16 ? " bf16" : " fp16") + " heads " + number(c.heads) + "/" +
         number(c.kv_heads) + " batch " + number(c.batch) + " lengths " + number(c.queries) + ", " +
         number(c.keys) + (c.anchor == CPPOOL_TOP_LEFT ? " tl" : " br") + " window " + number(c.window_left) +
         ", " + number(c.window_right) + (c.format == QkvFormat::kSbhd ? " sbhd" : " bshd") +
         (c.deterministic ? " deterministic" : "") +
         (c.bias == BiasType::kPostScale
              ? std::string(" bias ") + (c.bias_shape.batch ? 'b' : '1') + (c.bias_shape.heads ? 'h' : '1') +
                    (c.bias_shape.queries ? 's' : '1') + 's'
              : "") +
         (c.bias == BiasType::kAlibi ? " alibi" : "") + (c.max_logit ? " max_logit" : "");
}

std::size_t ElementsOf(const table::TensorForm& form) {
  std::size_t count = form.ndim > 0 ? 1 : 0;
  for (int i = 0; i < form.ndim; ++i)
    count *= static_cast<std::size_t>(form.shape[static_cast<std::size_t>(i)]);
  return count;
}

// lse between rows [tokens, heads] and the packed [batch, heads, tokens] of a call.
Values Packed(const Case& c, const Values& rows, const Rectangle& where, bool to_rows) {
  Values result(rows.size());
  const std::int64_t step = c.format == QkvFormat::kSbhd ? c.batch : 1;
  for (std::int64_t b = 0; b < where.batch; ++b) {
    for (std::int64_t i = 0; i < where.queries; ++i) {
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const auto row = static_cast<std::size_t>((b * where.q_stride + i * step) * c.heads + h);
        const auto packed = static_cast<std::size_t>((b * c.heads + h) * where.queries + i);
        result[to_rows ? row : packed] = rows[to_rows ? packed : row];
      }
    }
  }
  return result;
}

class Tensors {
 public:
  Tensors(const Device& device, const Case& c, unsigned seed)
      : device_(device), case_(c), problem_(c.problem()), inputs_(MakeInputs(problem_, seed)) {
    q_ = ToDevice(device, inputs_.q, c.dtype);
    k_ = ToDevice(device, inputs_.k, c.dtype);
    v_ = ToDevice(device, inputs_.v, c.dtype);
    dout_ = ToDevice(device, inputs_.dout, c.dtype);
    if (!inputs_.bias.empty()) bias_ = ToDevice(device, inputs_.bias, c.dtype);
    if (!inputs_.alibi_slopes.empty()) slopes_ = ToDevice(device, inputs_.alibi_slopes, Dtype::kFp32);
  }

  const Problem& problem() const { return problem_; }
  const Inputs& inputs() const { return inputs_; }

  // out, lse and max_logit of one call.
  Outputs Forward(const Rectangle& where) {
    const PreparedCall call(device_.rt(), Cudnn(), case_.form(false, where));
    const Buffer workspace = Poisoned(device_, call.workspace_bytes() / 4, Dtype::kFp32);
    const Buffer out = Poisoned(device_, inputs_.dout.size(), case_.dtype);
    const std::size_t states = inputs_.dout.size() / static_cast<std::size_t>(case_.dims.v);
    const Buffer lse = Poisoned(device_, states, Dtype::kFp32);
    const Buffer max = Poisoned(device_, states, Dtype::kFp32);
    CallData data = Inputs_(where);
    data[table::kOut] = out.get();
    data[table::kLse] = lse.get();
    if (case_.max_logit) data[table::kMaxLogit] = max.get();
    call.Run(data, workspace.get(), device_.stream());
    Outputs outputs;
    outputs.out = ToHost(device_, out, inputs_.dout.size(), case_.dtype);
    outputs.lse = Packed(case_, ToHost(device_, lse, states, Dtype::kFp32), where, true);
    if (case_.max_logit) outputs.max_logit = MaxOfHeads(ToHost(device_, max, states, Dtype::kFp32));
    return outputs;
  }

  // The gradients of one call, with out and lse of whole rows.
  Outputs Backward(const Rectangle& where, const Values& whole_out, const Values& whole_lse) {
    const PreparedCall call(device_.rt(), Cudnn(), case_.form(true, where));
    const Buffer workspace = Poisoned(device_, call.workspace_bytes() / 4, Dtype::kFp32);
    const Buffer out = ToDevice(device_, whole_out, case_.dtype);
    const Buffer lse = ToDevice(device_, Packed(case_, whole_lse, where, false), Dtype::kFp32);
    const Buffer dq = Poisoned(device_, inputs_.q.size(), case_.dtype);
    const Buffer dk = Poisoned(device_, inputs_.k.size(), case_.dtype);
    const Buffer dv = Poisoned(device_, inputs_.v.size(), case_.dtype);
    const std::size_t biases = ElementsOf(call.form().tensors[table::kDbias]);
    const Buffer dbias = Poisoned(device_, biases, case_.dtype);
    CallData data = Inputs_(where);
    if (biases > 0) data[table::kDbias] = dbias.get();
    data[table::kOut] = out.get();
    data[table::kLse] = lse.get();
    data[table::kDout] = dout_.get();
    data[table::kDq] = dq.get();
    data[table::kDk] = dk.at(KeyOffset(where, case_.dims.qk));
    data[table::kDv] = dv.at(KeyOffset(where, case_.dims.v));
    call.Run(data, workspace.get(), device_.stream());
    Outputs outputs;
    outputs.dq = ToHost(device_, dq, inputs_.q.size(), case_.dtype);
    outputs.dk = ToHost(device_, dk, inputs_.k.size(), case_.dtype);
    outputs.dv = ToHost(device_, dv, inputs_.v.size(), case_.dtype);
    if (biases > 0) outputs.dbias = ToHost(device_, dbias, biases, case_.dtype);
    return outputs;
  }

 private:
  std::size_t KeyOffset(const Rectangle& where, int dim) const {
    return static_cast<std::size_t>(where.k_row * case_.kv_heads * dim) * SizeOf(case_.dtype);
  }
  CallData Inputs_(const Rectangle& where) const {
    CallData data{};
    data[table::kQ] = q_.get();
    data[table::kK] = k_.at(KeyOffset(where, case_.dims.qk));
    data[table::kV] = v_.at(KeyOffset(where, case_.dims.v));
    if (case_.bias == BiasType::kPostScale)
      data[table::kBias] = bias_.at(static_cast<std::size_t>(where.k_position) * SizeOf(case_.dtype));
    if (case_.bias == BiasType::kAlibi) data[table::kAlibiSlopes] = slopes_.get();
    return data;
  }
  // Returns the maximum of each head of [batch, heads, queries].
  Values MaxOfHeads(const Values& rows) const {
    const auto heads = static_cast<std::size_t>(case_.heads),
               queries = static_cast<std::size_t>(case_.queries);
    Values most(heads, -INFINITY);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      float& of_head = most[i / queries % heads];
      of_head = std::isnan(rows[i]) ? rows[i] : std::max(of_head, rows[i]);
    }
    return most;
  }

  const Device& device_;
  const Case case_;
  const Problem problem_;
  const Inputs inputs_;
  Buffer q_, k_, v_, dout_, bias_, slopes_;
};

double UnitOf(Dtype dtype) { return dtype == Dtype::kBf16 ? 1.0 / 256 : 1.0 / 2048; }

void ExpectForward(const Outputs& got, const Outputs& want, Dtype dtype) {
  CHECK(Difference(got.out, want.out, UnitOf(dtype)) == "");
  CHECK(Difference(got.lse, want.lse, 1e-5) == "");
  CHECK(Difference(got.max_logit, want.max_logit, 1e-5) == "");
}

void ExpectBackward(const Outputs& got, const Outputs& want, Dtype dtype) {
  const double unit = 2 * UnitOf(dtype);
  CHECK(Difference(got.dq, want.dq, unit) == "");
  CHECK(Difference(got.dk, want.dk, unit) == "");
  CHECK(Difference(got.dv, want.dv, unit) == "");
  // Where a query sees few keys, the error of dbias is that of delta from the rounding of `out`.
  CHECK(Difference(got.dbias, want.dbias, unit, 64) == "");
}

// Both passes of the whole problem in one call each, as far as cuDNN takes them; it warns of what cuDNN does
// not take. False: it does not take both.
bool RunWhole(const Device& device, const Case& c) {
  INFO(Describe(c));
  const auto refused = [&](bool backward) {
    const std::string refusal = RefusalOf(c.form(backward, c.whole()));
    if (!refusal.empty()) WARN(Describe(c) << (backward ? ", backward: " : ", forward: ") << refusal);
    return !refusal.empty();
  };
  if (refused(false)) return false;
  try {
    Tensors tensors(device, c, 1);
    const Outputs want = Reference(tensors.problem(), tensors.inputs());
    ExpectForward(tensors.Forward(c.whole()), want, c.dtype);
    if (refused(true)) return false;
    ExpectBackward(tensors.Backward(c.whole(), want.out, want.lse), want, c.dtype);
    return true;
  } catch (const RuntimeError& error) {
    if (error.status() != CPPOOL_UNSUPPORTED) throw;
    WARN(Describe(c) << ": " << error.what());
    return false;
  }
}

// Runs all, of which cuDNN takes at least one.
void RunEach(const Device& device, const std::vector<Case>& cases) {
  int run = 0;
  for (const Case& c : cases) run += RunWhole(device, c);
  WARN(run << " of " << cases.size() << " calls ran");
  CHECK(run > 0);
}

}  // namespace

TEST_CASE("cuDNN: one call against fp64") {
  if (!Ready()) return;
  const Device device;
  INFO(Cudnn().version);
  std::vector<Case> cases;
  for (const Dims dims : kDims) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16}) {
      for (const std::int64_t right : {-1, 0}) {
        Case c;
        c.dims = dims;
        c.dtype = dtype;
        c.window_right = right;
        cases.push_back(c);
      }
    }
  }
  const Case base;
  const auto add = [&](auto&& change) {
    Case c = base;
    change(c);
    cases.push_back(c);
  };
  for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
    for (const auto& [heads, kv_heads] : {std::pair{4, 4}, std::pair{6, 1}}) {
      add([&](Case& c) { c.format = format, c.heads = heads, c.kv_heads = kv_heads, c.window_right = 0; });
    }
    // Lengths that no tile divides.
    add([&](Case& c) { c.format = format, c.queries = 100, c.keys = 333; });
    add([&](Case& c) { c.format = format, c.queries = 333, c.keys = 100; });
    add([&](Case& c) { c.format = format, c.queries = 100, c.keys = 333, c.window_right = 0; });
    add([&](Case& c) {
      c.format = format, c.queries = 100, c.keys = 333, c.anchor = CPPOOL_BOTTOM_RIGHT, c.window_right = 0;
    });
  }
  add([](Case& c) { c.window_left = 50, c.window_right = 0; });
  add([](Case& c) { c.window_left = 0, c.window_right = 0; });
  add([](Case& c) { c.window_left = 37, c.window_right = 21; });
  add([](Case& c) {
    c.queries = 200, c.keys = 300, c.anchor = CPPOOL_BOTTOM_RIGHT, c.window_left = 70, c.window_right = 30;
  });
  add([](Case& c) {
    c.queries = 200, c.keys = 300, c.anchor = CPPOOL_BOTTOM_RIGHT, c.window_left = 70, c.window_right = 0;
  });
  add([](Case& c) { c.queries = 1, c.keys = 64; });
  add([](Case& c) { c.queries = 64, c.keys = 1; });
  RunEach(device, cases);
  // What every cuDNN 9 on every GPU from sm_80 takes.
  CHECK(RunWhole(device, base));
}

TEST_CASE("cuDNN: a bias in one call against fp64") {
  if (!Ready()) return;
  const Device device;
  INFO(Cudnn().version);
  std::vector<Case> cases;
  const auto add = [&](BiasShape shape, auto&& change) {
    Case c;
    c.bias = BiasType::kPostScale;
    c.bias_shape = shape;
    change(c);
    cases.push_back(c);
  };
  const BiasShape per_head{false, true, true};
  for (const bool batch : {false, true}) {
    for (const bool heads : {false, true}) {
      for (const std::int64_t right : {-1, 0})
        add({batch, heads, true}, [&](Case& c) { c.window_right = right; });
    }
  }
  add({false, false, false}, [](Case& c) { c.window_right = 0; });
  for (const Dims dims : kDims) add(per_head, [&](Case& c) { c.dims = dims; });
  add(per_head, [](Case& c) { c.dtype = Dtype::kFp16, c.format = QkvFormat::kSbhd, c.window_right = 0; });
  add(per_head, [](Case& c) { c.queries = 100, c.keys = 333; });
  add(per_head, [](Case& c) { c.queries = 100, c.keys = 333, c.window_right = 0; });
  add(per_head, [](Case& c) { c.queries = 333, c.keys = 100; });
  add(per_head, [](Case& c) { c.window_left = 50, c.window_right = 0; });
  add(per_head, [](Case& c) { c.window_left = 37, c.window_right = 21; });
  add(per_head, [](Case& c) { c.deterministic = true, c.window_right = 0; });
  add(per_head, [](Case& c) { c.heads = 6, c.kv_heads = 1, c.max_logit = true; });
  RunEach(device, cases);
}

TEST_CASE("cuDNN: ALiBi in one call against fp64") {
  if (!Ready()) return;
  const Device device;
  INFO(Cudnn().version);
  std::vector<Case> cases;
  const auto add = [&](auto&& change) {
    Case c;
    c.bias = BiasType::kAlibi;
    change(c);
    cases.push_back(c);
  };
  for (const Dims dims : kDims) {
    for (const std::int64_t right : {-1, 0}) add([&](Case& c) { c.dims = dims, c.window_right = right; });
  }
  add([](Case& c) { c.dtype = Dtype::kFp16, c.format = QkvFormat::kSbhd, c.window_right = 0; });
  add([](Case& c) { c.queries = 100, c.keys = 333; });
  add([](Case& c) { c.queries = 100, c.keys = 333, c.anchor = CPPOOL_BOTTOM_RIGHT, c.window_right = 0; });
  add([](Case& c) { c.window_left = 50, c.window_right = 0; });
  add([](Case& c) { c.window_left = 37, c.window_right = 21; });
  add([](Case& c) { c.deterministic = true, c.window_right = 0; });
  add([](Case& c) { c.heads = 6, c.kv_heads = 1, c.max_logit = true; });  // not a power of two
  RunEach(device, cases);
}

TEST_CASE("cuDNN: the largest logits in one call against fp64") {
  if (!Ready()) return;
  const Device device;
  INFO(Cudnn().version);
  std::vector<Case> cases;
  const auto add = [&](auto&& change) {
    Case c;
    c.max_logit = true;
    change(c);
    cases.push_back(c);
  };
  for (const Dims dims : kDims) {
    for (const std::int64_t right : {-1, 0}) add([&](Case& c) { c.dims = dims, c.window_right = right; });
  }
  add([](Case& c) { c.format = QkvFormat::kSbhd, c.queries = 100, c.keys = 333; });
  add([](Case& c) { c.batch = 1, c.heads = 1, c.kv_heads = 1, c.queries = 77, c.keys = 77; });
  add([](Case& c) { c.window_left = 50, c.window_right = 0; });
  add([](Case& c) { c.queries = 1, c.keys = 64; });
  RunEach(device, cases);
}

TEST_CASE("cuDNN: gradients of a part of the keys are parts of the whole") {
  if (!Ready()) return;
  const Device device;
  for (const BiasType bias : {BiasType::kNone, BiasType::kPostScale, BiasType::kAlibi}) {
    Case c;
    c.batch = 1;
    c.queries = c.keys = 384;
    c.bias = bias;
    INFO(Describe(c));
    Tensors tensors(device, c, 2);
    const Outputs want = Reference(tensors.problem(), tensors.inputs());
    Outputs sum;
    std::vector<double> dq(want.dq.size(), 0);
    sum.dbias.resize(want.dbias.size());
    // The second part of a bias begins at an odd element.
    for (const auto& [begin, end] : {std::pair{0, 129}, std::pair{129, 384}}) {
      Rectangle where = c.whole();
      where.k_row = where.k_position = begin;
      where.keys = end - begin;
      const Outputs part = tensors.Backward(where, want.out, want.lse);
      for (std::size_t i = 0; i < dq.size(); ++i) dq[i] += part.dq[i];
      const auto append = [&](Values& to, const Values& from, int dim) {
        const auto row = static_cast<std::ptrdiff_t>(c.kv_heads) * dim;
        to.insert(to.end(), from.begin() + begin * row, from.begin() + end * row);
      };
      append(sum.dk, part.dk, c.dims.qk);
      append(sum.dv, part.dv, c.dims.v);
      for (std::size_t i = 0; i < part.dbias.size(); ++i) {
        const auto keys = static_cast<std::size_t>(where.keys);
        sum.dbias[i / keys * static_cast<std::size_t>(c.keys) + static_cast<std::size_t>(begin) + i % keys] =
            part.dbias[i];
      }
    }
    sum.dq.assign(dq.begin(), dq.end());
    ExpectBackward(sum, want, c.dtype);
  }
}

TEST_CASE("cuDNN: deterministic calls give the same bits") {
  if (!Ready()) return;
  const Device device;
  Case c;
  c.deterministic = true;
  c.heads = 16;
  c.queries = c.keys = 512;
  c.window_right = 0;
  if (const std::string refusal = RefusalOf(c.form(true, c.whole())); !refusal.empty()) {
    WARN(refusal);
    return;
  }
  Tensors tensors(device, c, 3);
  const Outputs forward = tensors.Forward(c.whole());
  const Outputs first = tensors.Backward(c.whole(), forward.out, forward.lse);
  for (int i = 0; i < 10; ++i) {
    CHECK(tensors.Forward(c.whole()) == forward);
    CHECK(tensors.Backward(c.whole(), forward.out, forward.lse) == first);
  }
}

TEST_CASE("cuDNN: ranks on threads of their own, at once") {
  if (!Ready()) return;
  Case c;
  c.window_right = 0;
  constexpr std::size_t kRanks = 4;
  std::vector<Outputs> outputs(kRanks);
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        const Device device;
        Tensors tensors(device, c, 4);
        for (int i = 0; i < 5; ++i) outputs[rank] = tensors.Forward(c.whole());
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const std::string& error : errors) CHECK(error == "");
  const Device device;
  const Tensors tensors(device, c, 4);
  ExpectForward(outputs[0], Reference(tensors.problem(), tensors.inputs()), c.dtype);
  for (const Outputs& other : outputs) CHECK(other == outputs[0]);
}

TEST_CASE("cuDNN: what it has no plan for is refused in its words") {
  if (!Ready()) return;
  const Device device;
  Case c;
  c.dims = {100, 100};
  CHECK(RefusalOf(c.form(false, c.whole())).find("multiple of 8") != std::string::npos);
  try {
    const PreparedCall call(device.rt(), Cudnn(), c.form(false, c.whole()));
    FAIL("it was prepared");
  } catch (const RuntimeError& error) {
    CHECK(error.status() == CPPOOL_UNSUPPORTED);
    CHECK(std::string(error.what()).find("multiple of 8") != std::string::npos);
  }
}

}  // namespace cppool::kernels::test
