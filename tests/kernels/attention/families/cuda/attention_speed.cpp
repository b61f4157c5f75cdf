// attention_speed [NAME [FAMILY]]: times each family's attention kernels on the first GPU for a list of
// shapes (those whose name contains NAME), after checking sampled rows against fp64. Prints milliseconds and
// TFLOP/s, forward and backward, the median of 20 runs after a warm-up.
//
// Operations are counted as in the answer to a `run`: per visible pair and head, the two products of the
// forward pass, 2 (dim_qk + dim_v), and the five of the backward pass, 2 (3 dim_qk + 2 dim_v), although
// `sm80` makes seven. In fp8 P and dS are cast with one scale each, and the reference reads what operands
// hold; where a family multiplies payloads, too, a second row has that. The FAMILY `cudnn` is the
// kernel of libcppool_cudnn.so; what it has no backward pass for is timed forward alone.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <span>

#include "kernels/attention/families/table/family.h"
#include "kernels/attention/kernel_library.h"
#include "kernels/attention/problem/transposed.h"
#include "kernels/numerics/fp8.h"
#include "tests/kernels/attention/families/cuda/reference.h"

namespace cppool::kernels::test {
namespace {

struct SpeedShape {
  const char* name;
  std::int64_t batch, seqlen;
  int heads, kv_heads, dim_qk, dim_v;
  bool causal;
  Dtype dtype = Dtype::kBf16;
  BiasType bias = BiasType::kNone;
  bool bias_heads = false;      // a tensor has shape 1hss, else 11ss, whose gradient is summed over heads too
  std::int32_t window = kOpen;  // a query sees so many keys before its own
  bool fp8 = false;             // the recipe current; the dtype is bf16
  bool keys_repeat = false;     // every 128: no maximum of a row rises after the second block of 128 keys

  Band band() const { return {-window, causal ? 0 : kOpen}; }
};

constexpr SpeedShape kShapes[] = {
    {"gqa 2x4096 d128", 2, 4096, 32, 4, 128, 128, true},
    {"mha 2x4096 d128", 2, 4096, 32, 32, 128, 128, true},
    {"full 2x4096 d128", 2, 4096, 32, 4, 128, 128, false},
    {"fp16 2x4096 d128", 2, 4096, 32, 4, 128, 128, true, Dtype::kFp16},
    {"long 1x16384 d128", 1, 16384, 16, 16, 128, 128, true},
    {"long 1x16384 d64", 1, 16384, 16, 16, 64, 64, true},
    {"long 1x16384 d256", 1, 16384, 16, 16, 256, 256, true},
    {"long 1x65536 d128", 1, 65536, 16, 16, 128, 128, true},
    {"long 1x65536 d64", 1, 65536, 16, 16, 64, 64, true},
    {"long full 1x16384 d128", 1, 16384, 16, 16, 128, 128, false},
    {"long full 1x65536 d64", 1, 65536, 16, 16, 64, 64, false},
    {"fp8 long 1x16384 d128", 1, 16384, 16, 16, 128, 128, true, Dtype::kBf16, BiasType::kNone, false, kOpen,
     true},
    {"fp8 long full 1x16384 d128", 1, 16384, 16, 16, 128, 128, false, Dtype::kBf16, BiasType::kNone, false,
     kOpen, true},
    {"fp8 long 1x16384 d64", 1, 16384, 16, 16, 64, 64, true, Dtype::kBf16, BiasType::kNone, false, kOpen,
     true},
    {"fp8 long repeated keys 1x16384 d128", 1, 16384, 16, 16, 128, 128, true, Dtype::kBf16, BiasType::kNone,
     false, kOpen, true, true},
    {"fp8 long repeated keys 1x16384 d64", 1, 16384, 16, 16, 64, 64, true, Dtype::kBf16, BiasType::kNone,
     false, kOpen, true, true},
    {"fp8 long 1x16384 d256", 1, 16384, 16, 16, 256, 256, true, Dtype::kBf16, BiasType::kNone, false, kOpen,
     true},
    {"gqa 2x4096 d64", 2, 4096, 64, 8, 64, 64, true},
    {"mla 2x4096 d192/128", 2, 4096, 32, 32, 192, 128, true},
    {"gqa 2x4096 d128/64", 2, 4096, 32, 4, 128, 64, true},
    {"gqa 2x4096 d256", 2, 4096, 16, 2, 256, 256, true},
    {"fp8 2x4096 d64", 2, 4096, 64, 8, 64, 64, true, Dtype::kBf16, BiasType::kNone, false, kOpen, true},
    {"fp8 2x4096 d192/128", 2, 4096, 32, 32, 192, 128, true, Dtype::kBf16, BiasType::kNone, false, kOpen,
     true},
    {"fp8 2x4096 d128/64", 2, 4096, 32, 4, 128, 64, true, Dtype::kBf16, BiasType::kNone, false, kOpen, true},
    {"fp8 2x4096 d256", 2, 4096, 16, 2, 256, 256, true, Dtype::kBf16, BiasType::kNone, false, kOpen, true},
    {"window 2x4096 d128", 2, 4096, 32, 4, 128, 128, true, Dtype::kBf16, BiasType::kNone, false, 512},
    {"bias 2x4096 d128", 2, 4096, 32, 4, 128, 128, true, Dtype::kBf16, BiasType::kPostScale},
    {"bias of heads 2x4096 d128", 2, 4096, 32, 32, 128, 128, true, Dtype::kBf16, BiasType::kPostScale, true},
    {"alibi 2x4096 d128", 2, 4096, 32, 4, 128, 128, true, Dtype::kBf16, BiasType::kAlibi},
    {"bias 2x4096 d64", 2, 4096, 64, 8, 64, 64, true, Dtype::kBf16, BiasType::kPostScale},
    {"bias 2x4096 d192/128", 2, 4096, 32, 32, 192, 128, true, Dtype::kBf16, BiasType::kPostScale},
    {"bias 2x4096 d128/64", 2, 4096, 32, 4, 128, 64, true, Dtype::kBf16, BiasType::kPostScale},
    {"bias 2x4096 d256", 2, 4096, 16, 2, 256, 256, true, Dtype::kBf16, BiasType::kPostScale},
};

class Timer {
 public:
  Timer() {
    if (cudaEventCreate(&begin_) != cudaSuccess || cudaEventCreate(&end_) != cudaSuccess) {
      throw RuntimeError(CPPOOL_CUDA, "no events");
    }
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // The median and the spread (maximum minus minimum) in milliseconds.
  std::pair<float, float> Median(cudaStream_t stream, const std::function<void()>& work) {
    std::vector<float> times;
    for (int i = 0; i < 25; ++i) {
      cudaEventRecord(begin_, stream);
      work();
      cudaEventRecord(end_, stream);
      if (cudaEventSynchronize(end_) != cudaSuccess)
        throw RuntimeError(CPPOOL_CUDA, cudaGetErrorString(cudaGetLastError()));
      float time = 0;
      cudaEventElapsedTime(&time, begin_, end_);
      if (i >= 5) times.push_back(time);
    }
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times.back() - times.front()};
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

struct Sample {
  std::vector<double> want, got;

  double Error() const {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      error += (got[i] - want[i]) * (got[i] - want[i]);
      size += want[i] * want[i];
    }
    return std::sqrt(error / size);
  }
};

double Dot(const float* a, const float* b, int dim) {
  double sum = 0;
  for (int i = 0; i < dim; ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

// The bias of the logit of a query and a key at these positions.
double BiasAt(const Inputs& in, std::int64_t seqlen, int head, std::int64_t query, std::int64_t key) {
  if (!in.alibi_slopes.empty())
    return -in.alibi_slopes[static_cast<std::size_t>(head)] * static_cast<double>(std::abs(key - query));
  if (in.bias.empty()) return 0;
  const std::int64_t of_head = seqlen * seqlen;
  const bool heads = static_cast<std::int64_t>(in.bias.size()) > of_head;
  return in.bias[static_cast<std::size_t>((heads ? head * of_head : 0) + query * seqlen + key)];
}

// The largest relative error of out, dq, dk and dv, each on a few rows. The reference for dk and dv uses lse
// and delta of the kernels.
double SampledError(const Problem& problem, const SpeedShape& speed, const Inputs& in, const Outputs& got,
                    const Values& delta, bool trains) {
  const std::int64_t seqlen = speed.seqlen;
  const KernelShape& s = problem.shape;
  Sample out, dq, dk, dv;
  for (std::int64_t sample = 0; sample < 6; ++sample) {
    const std::int64_t i = sample < 5 ? (seqlen - 1) * sample / 4 : 77;
    const int head = static_cast<int>(sample * 13) % s.heads, kv_head = head / s.group;
    const auto q_at = static_cast<std::size_t>(i * s.heads + head);
    const std::int64_t first = std::max<std::int64_t>(0, i - speed.window);  // key that the query sees
    std::vector<double> p(static_cast<std::size_t>((speed.causal ? i + 1 : seqlen) - first));
    std::vector<double> o(static_cast<std::size_t>(s.dim_v)), g(static_cast<std::size_t>(s.dim_qk));
    double most = -1e30, sum = 0, rowsum = 0;
    const auto kv_at = [&](std::int64_t j) { return static_cast<std::size_t>(j * s.kv_heads + kv_head); };
    const auto qk = static_cast<std::size_t>(s.dim_qk), vd = static_cast<std::size_t>(s.dim_v);
    for (std::size_t j = 0; j < p.size(); ++j) {
      const std::int64_t key = first + static_cast<std::int64_t>(j);
      p[j] = s.scale * Dot(&in.q[q_at * qk], &in.k[kv_at(key) * qk], s.dim_qk) +
             BiasAt(in, seqlen, head, i, key);
      most = std::max(most, p[j]);
    }
    for (double& x : p) sum += x = std::exp(x - most);
    const auto key_at = [&](std::size_t j) { return kv_at(first + static_cast<std::int64_t>(j)); };
    for (std::size_t j = 0; j < p.size(); ++j)
      for (std::size_t d = 0; d < vd; ++d) o[d] += p[j] / sum * in.v[key_at(j) * vd + d];
    for (std::size_t d = 0; d < vd; ++d) rowsum += o[d] * in.dout[q_at * vd + d];
    for (std::size_t j = 0; j < p.size(); ++j) {
      const double ds =
          s.scale * p[j] / sum * (Dot(&in.dout[q_at * vd], &in.v[key_at(j) * vd], s.dim_v) - rowsum);
      for (std::size_t d = 0; d < qk; ++d) g[d] += ds * in.k[key_at(j) * qk + d];
    }
    out.want.insert(out.want.end(), o.begin(), o.end());
    dq.want.insert(dq.want.end(), g.begin(), g.end());
    for (std::size_t d = 0; d < vd; ++d) out.got.push_back(got.out[q_at * vd + d]);
    for (std::size_t d = 0; d < qk; ++d) dq.got.push_back(got.dq[q_at * qk + d]);

    const std::size_t at = kv_at(i);  // the key at the query's position
    const std::int64_t end = std::min(seqlen, i + speed.window + 1);
    std::vector<double> gk(qk), gv(vd);
    for (int h = kv_head * s.group; h < (kv_head + 1) * s.group; ++h) {
      for (std::int64_t t = speed.causal ? i : 0; t < end; ++t) {
        const auto row = static_cast<std::size_t>(t * s.heads + h);
        const double logit =
            s.scale * Dot(&in.q[row * qk], &in.k[at * qk], s.dim_qk) + BiasAt(in, seqlen, h, t, i);
        const double prob = std::exp(logit - got.lse[row]);
        const double ds = s.scale * prob * (Dot(&in.dout[row * vd], &in.v[at * vd], s.dim_v) - delta[row]);
        for (std::size_t d = 0; d < vd; ++d) gv[d] += prob * in.dout[row * vd + d];
        for (std::size_t d = 0; d < qk; ++d) gk[d] += ds * in.q[row * qk + d];
      }
    }
    dk.want.insert(dk.want.end(), gk.begin(), gk.end());
    dv.want.insert(dv.want.end(), gv.begin(), gv.end());
    for (std::size_t d = 0; d < qk; ++d) dk.got.push_back(got.dk[at * qk + d]);
    for (std::size_t d = 0; d < vd; ++d) dv.got.push_back(got.dv[at * vd + d]);
  }
  const double errors[] = {out.Error(), dq.Error(), dk.Error(), dv.Error()};
  double worst = 0;
  for (const double error : std::span(errors).first(trains ? 4 : 1))
    worst = error > worst || std::isnan(error) ? error : worst;
  return worst;
}

// What payloads are multiplied with, and dS before its cast, which the samples' dS do not exceed.
constexpr float kPayloadScale = 1 / 64.0f, kDsScale = 256;

// The values that payloads hold in place of these.
std::vector<float> OnGrid(std::vector<float> values, float (*round)(float)) {
  for (float& x : values) x = round(x / kPayloadScale) * kPayloadScale;
  return values;
}

// Returns whether the samples agree, or the family has no kernels for the shape.
bool Measure(const Device& device, const char* family, const SpeedShape& speed, Fp8Products products) {
  KernelShape shape;
  shape.dtypes = TensorDtypes(speed.dtype);
  shape.dim_qk = speed.dim_qk, shape.dim_v = speed.dim_v;
  shape.heads = speed.heads, shape.kv_heads = speed.kv_heads, shape.group = speed.heads / speed.kv_heads;
  shape.scale = 1 / std::sqrt(static_cast<float>(speed.dim_qk));
  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(speed.batch, speed.seqlen));
  const std::vector<Band> bands(static_cast<std::size_t>(speed.batch), speed.band());
  const Problem problem{shape, layout, layout, bands, speed.bias, {false, speed.bias_heads, true}};
  const Dtype dtype = speed.dtype;
  KernelRequest request = RequestOf(problem);
  if (speed.fp8) request.fp8 = Fp8Recipe{ScalingMode::kCurrent, true, true, true, true, products};
  const auto refused = [&] {
    if (device.family().Refusal(request)) return true;
    const auto asker = device.family().AskBlocks();
    return asker && asker->Refusal(request, layout, layout, bands).has_value();
  };
  if (refused()) {
    request.training = false;
    if (!speed.fp8 || refused()) return true;
  }
  AttentionKernel& kernel = device.kernel();
  kernel.Load(request);
  const auto count = [&](int heads, int dim) { return static_cast<std::size_t>(layout.rows * heads * dim); };
  const auto make = [dtype](unsigned seed, std::size_t size) {  // on a thread: the GPU waits for it
    return std::async(std::launch::async, [=] {
      std::mt19937 random(seed);
      return Random(random, size, dtype);
    });
  };
  auto of_q = make(1, count(speed.heads, speed.dim_qk)), of_k = make(2, count(speed.kv_heads, speed.dim_qk));
  auto of_v = make(3, count(speed.kv_heads, speed.dim_v)), of_dout = make(4, count(speed.heads, speed.dim_v));
  Inputs in{of_q.get(), of_k.get(), of_v.get(), of_dout.get()};
  if (speed.fp8) {
    for (auto* tensor : {&in.q, &in.k, &in.v}) *tensor = OnGrid(std::move(*tensor), &RoundToE4M3);
    in.dout = OnGrid(std::move(in.dout), &RoundToE5M2);
  }
  if (speed.keys_repeat) {
    const auto block = static_cast<std::size_t>(128 * speed.kv_heads * speed.dim_qk);
    for (std::size_t i = block; i < in.k.size(); ++i) in.k[i] = in.k[i - block];
  }
  const auto upload = [&](std::vector<float> values) {
    if (speed.fp8) {
      for (float& x : values) x /= kPayloadScale;
    }
    return ToDevice(device, values, dtype);
  };
  const Buffer q = upload(in.q), k = upload(in.k), v = upload(in.v), dout = upload(in.dout);
  const Buffer of_delta = speed.fp8 ? ToDevice(device, in.dout, dtype) : Buffer();
  const void* const true_dout = speed.fp8 ? of_delta.get() : dout.get();
  const Buffer scales = ToDevice(device, {kPayloadScale, kDsScale, 1 / kDsScale}, Dtype::kFp32);
  const float* const scale = speed.fp8 ? scales.get<float>() : nullptr;
  const Buffer out = Poisoned(device, in.dout.size(), dtype),
               lse = Poisoned(device, count(speed.heads, 1), Dtype::kFp32);
  const Buffer delta = Poisoned(device, count(speed.heads, 1), Dtype::kFp32),
               dq = Poisoned(device, in.q.size(), dtype);
  const Buffer dk = Poisoned(device, in.k.size(), dtype), dv = Poisoned(device, in.v.size(), dtype);
  const BiasDims bias_dims(problem);
  if (speed.bias == BiasType::kPostScale) in.bias = make(5, bias_dims.count()).get();
  if (speed.bias == BiasType::kAlibi) in.alibi_slopes = AlibiSlopes(speed.heads);
  const Buffer bias = in.bias.empty() ? Buffer() : ToDevice(device, in.bias, dtype);
  const Buffer slopes = in.alibi_slopes.empty() ? Buffer() : ToDevice(device, in.alibi_slopes, Dtype::kFp32);
  const Buffer dbias = in.bias.empty() ? Buffer() : Poisoned(device, bias_dims.count(), Dtype::kFp32);
  const BiasArgs bias_args{{bias.get(), dtype}, 0, bias_dims.head_stride, speed.seqlen, slopes.get<float>()};
  const auto plan = kernel.Plan(request, layout, layout, problem.bands, device.stream());
  KernelRequest fixed_order = request;
  fixed_order.deterministic = true;
  const auto fixed_plan = kernel.Plan(fixed_order, layout, layout, problem.bands, device.stream());
  const Buffer workspace(device.rt(), device.family().WorkspaceBytes(request, layout.rows, layout.rows) + 1,
                         device.stream());
  ForwardArgs forward;
  forward.plan = plan.get();
  forward.q = {q.get(), dtype, scale}, forward.k = {k.get(), dtype, scale};
  forward.v = {v.get(), dtype, scale};
  if (speed.fp8) forward.p_scale = PScale(*request.fp8);
  const Capabilities can = device.family().capabilities(request);
  const bool payloads = speed.fp8 && can.forward_qk == Fp8Form::kPayload,
             transposes = speed.fp8 && can.forward_v == Fp8Form::kTransposed;
  const auto payload = [&](const std::vector<float>& values) {
    std::vector<std::uint8_t> bytes;
    for (const float x : values) bytes.push_back(FloatToE4M3(x / kPayloadScale));
    Buffer buffer(device.rt(), bytes.size(), device.stream());
    Check(device.rt(),
          device.rt()->copy(device.rt(), buffer.get(), bytes.data(), bytes.size(), device.stream()));
    device.Wait();
    return buffer;
  };
  const Buffer q8 = payloads ? payload(in.q) : Buffer(), k8 = payloads ? payload(in.k) : Buffer(),
               v8 = payloads ? payload(in.v) : Buffer();
  const auto slots = device.ops().fp8().Slots(layout, device.stream());
  const Buffer transposed(
      device.rt(), static_cast<std::size_t>(transposes ? SlotsOf(layout) * speed.kv_heads * speed.dim_v : 1),
      device.stream());
  const auto run_transpose = [&] {
    device.ops().fp8().Transpose(*slots, speed.kv_heads, speed.dim_v, {v8.get(), Dtype::kE4M3},
                                 transposed.get<std::uint8_t>(), device.stream());
  };
  if (payloads) {
    forward.q = {q8.get(), Dtype::kE4M3, scale}, forward.k = {k8.get(), Dtype::kE4M3, scale};
    forward.v = {v8.get(), Dtype::kE4M3, scale};
  }
  if (transposes) {
    run_transpose();
    forward.v.data = transposed.get();
  }
  forward.workspace = workspace.get();
  forward.out = {out.get(), dtype}, forward.lse = lse.get<float>();
  forward.bias = bias_args;
  BackwardArgs backward;
  backward.bias = bias_args;
  backward.plan = plan.get();
  backward.q = {q.get(), dtype, scale}, backward.k = {k.get(), dtype, scale};
  backward.v = {v.get(), dtype, scale}, backward.dout = {dout.get(), dtype, scale};
  if (speed.fp8) backward.casts = {PScale(*request.fp8), scale + 1};
  backward.lse = lse.get<float>(), backward.delta = delta.get<float>();
  backward.dq = {dq.get(), dtype}, backward.dk = {dk.get(), dtype}, backward.dv = {dv.get(), dtype};
  backward.out = {out.get(), dtype};
  backward.workspace = workspace.get();
  BackwardArgs only_query = backward, only_key = backward, fixed = backward;
  fixed.plan = fixed_plan.get();
  only_query.key.wanted = only_key.query.wanted = false;

  const auto run_forward = [&] { kernel.Forward(shape, forward, device.stream()); };
  const auto run_delta = [&] {
    device.ops().Delta(layout.rows * shape.heads, shape.dim_v, {out.get(), dtype}, {true_dout, dtype},
                       delta.get<float>(), device.stream());
  };
  const auto run_query = [&] { kernel.Backward(shape, only_query, device.stream()); };
  const auto run_key = [&] { kernel.Backward(shape, only_key, device.stream()); };
  const auto run_bias = [&] {
    kernel.BackwardBias(shape, backward, {dbias.get<float>(), 0, bias_dims.head_stride, speed.seqlen},
                        device.stream());
  };
  const auto run_backward = [&] { kernel.Backward(shape, backward, device.stream()); };
  const auto run_fixed = [&] { kernel.Backward(shape, fixed, device.stream()); };
  const bool apart = can.gradients_apart;
  run_forward();
  if (request.training) run_delta(), run_backward();
  device.Wait();
  const Outputs got{ToHost(device, out, in.dout.size(), dtype),
                    ToHost(device, lse, count(speed.heads, 1), Dtype::kFp32),
                    ToHost(device, dq, in.q.size(), dtype), ToHost(device, dk, in.k.size(), dtype),
                    ToHost(device, dv, in.v.size(), dtype)};
  const double error = SampledError(
      problem, speed, in, got, ToHost(device, delta, count(speed.heads, 1), Dtype::kFp32), request.training);
  const bool good = error < (speed.fp8 ? 0.08 : dtype == Dtype::kBf16 ? 1e-2 : 2e-3);  // false for NaN

  Timer timer;
  const cudaStream_t stream = reinterpret_cast<cudaStream_t>(device.stream());
  const double of_dim = 2.0 * static_cast<double>(plan->pairs()) * speed.heads;  // operations of a product
  const double operations = of_dim * (speed.dim_qk + speed.dim_v);
  const auto [forward_ms, forward_spread] = timer.Median(stream, run_forward);
  if (!request.training) {
    std::printf("%-5s %-25s forward %7.3f ms (+-%.3f) %4.0f TFLOP/s | error %.1e %s | of payloads\n", family,
                speed.name, forward_ms, forward_spread, operations / forward_ms * 1e-9, error,
                good ? "ok" : "WRONG");
    std::fflush(stdout);
    return good;
  }
  const auto [delta_ms, delta_spread] = timer.Median(stream, run_delta);
  const auto [all_ms, all_spread] = timer.Median(stream, run_backward);
  const auto rate = [&](float ms) { return of_dim * (3 * speed.dim_qk + 2 * speed.dim_v) / ms * 1e-9; };
  std::printf(
      "%-5s %-25s forward %7.3f ms (+-%.3f) %4.0f TFLOP/s | backward %7.3f ms = delta %.3f + %.3f (+-%.3f) "
      "%4.0f TFLOP/s | error %.1e %s",
      family, speed.name, forward_ms, forward_spread, operations / forward_ms * 1e-9, delta_ms + all_ms,
      delta_ms, all_ms, all_spread, rate(delta_ms + all_ms), error, good ? "ok" : "WRONG");
  if (apart) {
    std::printf(" | dq alone %.3f ms, dk and dv alone %.3f ms\n", timer.Median(stream, run_query).first,
                timer.Median(stream, run_key).first);
  } else {
    const float fixed_ms = delta_ms + timer.Median(stream, run_fixed).first;
    std::printf(" | deterministic %.3f ms %.0f TFLOP/s\n", fixed_ms, rate(fixed_ms));
  }
  if (transposes) {
    const auto [transpose_ms, transpose_spread] = timer.Median(stream, run_transpose);
    std::printf(
        "%-5s %-25s the forward pass above with products of payloads; transposition of v %.3f ms (+-%.3f)\n",
        family, speed.name, transpose_ms, transpose_spread);
  }
  if (dbias) {
    const auto [bias_ms, bias_spread] = timer.Median(stream, run_bias);
    std::printf("%-5s %-25s dbias %.3f ms (+-%.3f)\n", family, speed.name, bias_ms, bias_spread);
  }
  std::fflush(stdout);
  return good;
}

}  // namespace
}  // namespace cppool::kernels::test

int main(int argc, char** argv) {
  using namespace cppool::kernels;
  try {
    bool good = true;
    const auto measure = [&](const char* name, const AttentionFamily& family,
                             const std::vector<Fp8Products>& of_fp8) {
      if (argc > 2 && std::strcmp(name, argv[2]) != 0) return;
      const test::Device device(family);
      for (const auto& shape : test::kShapes) {
        if (argc > 1 && !std::strstr(shape.name, argv[1])) continue;
        for (const Fp8Products products : shape.fp8 ? of_fp8 : std::vector{Fp8Products::kAuto})
          good = test::Measure(device, name, shape, products) && good;
      }
    };
    for (const AttentionFamily* family : AttentionFamilies("cuda"))
      measure(family->name(), *family, {Fp8Products::kBf16, Fp8Products::kNative});
    if (argc > 2 && std::strcmp(argv[2], "cudnn") == 0) {
      const KernelLibrary library(dlopen(CudnnModule().c_str(), RTLD_NOW | RTLD_LOCAL), CudnnModule());
      measure("cudnn", table::TableFamily(library.Find("cudnn", "cuda")), {Fp8Products::kAuto});
    }
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_speed: %s\n", error.what());
    return 2;
  }
}
