#include "kernels/cudnn/sdpa_graph.h"

#include <cudnn_frontend.h>

#include <cstddef>
#include <functional>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/cudnn/library.h"

// What the frontend calls instead of functions that it is linked with
// (NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING).
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace cppool::kernels::cudnn {
namespace {

namespace fe = cudnn_frontend;
using Graph = std::shared_ptr<fe::graph::Graph>;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kStats,
  kDout,
  kDq,
  kDk,
  kDv,
  kBias,
  kDbias,
  kSlopes,
  kMax,
  kSumExp,
  kQScale,  // these: of fp8
  kKScale,
  kOne,
  kPScale,
  kPScaleInverse,
  kAmaxP,
  kAmaxOut
};

// What a call in fp8 has in its workspace before cuDNN's: numbers that it reads, and amaxes that it writes.
constexpr std::size_t kNumberBytes = 256;
enum Number : std::size_t {
  kNumberOne,
  kNumberPScale,
  kNumberInverse,
  kGivenNumbers,
  kNumberAmaxP = 32,
  kNumberAmaxOut
};

std::string Dotted(std::size_t version) {
  if (version < 90000) version = version / 1000 * 10000 + version % 1000;  // before cuDNN 9
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// The frontend's texts end in line breaks or have them between the reasons of several plans.
std::string OneLine(const std::string& text) {
  std::string line;
  for (const char c : text) {
    if (c != '\n') {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += "; ";
    }
  }
  while (!line.empty() && (line.back() == ' ' || line.back() == ';')) line.pop_back();
  return line;
}

[[noreturn]] void Fail(const fe::error_t& error) {
  const std::string& text = error.err_msg;
  cppool_status status = CPPOOL_INTERNAL;
  switch (error.code) {
    case fe::error_code_t::GRAPH_NOT_SUPPORTED:
    case fe::error_code_t::GRAPH_EXECUTION_PLAN_CREATION_FAILED:
    case fe::error_code_t::HEURISTIC_QUERY_FAILED:
    case fe::error_code_t::UNSUPPORTED_GRAPH_FORMAT:
      status = CPPOOL_UNSUPPORTED;
      break;
    case fe::error_code_t::CUDNN_BACKEND_API_FAILED:
      status = text.find("NOT_SUPPORTED") != std::string::npos ? CPPOOL_UNSUPPORTED : CPPOOL_CUDA;
      break;
    case fe::error_code_t::CUDA_API_FAILED:
    case fe::error_code_t::GRAPH_EXECUTION_FAILED:
      status = CPPOOL_CUDA;
      break;
    default:
      break;
  }
  if (text.find("ALLOC_FAILED") != std::string::npos) status = CPPOOL_OUT_OF_MEMORY;
  throw Error(status, OneLine(text));
}

void Check(const fe::error_t& error) {
  if (error.is_bad()) Fail(error);
}

void Check(cudnnStatus_t status, const char* function) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw Error(CPPOOL_CUDA, std::string(function) + " failed: " + fe::detail::get_error_string(status));
}

// libcudnn, opened once. A failure stays what it is until the process ends.
struct Backend {
  std::string version;  // empty with a failure
  std::string failure;
};

const Backend& OpenBackend() {
  static const Backend backend = [] {
    Backend opened;
    const OpenedLibrary library = OpenCudnn();
    if (!library.handle) {
      opened.failure = library.failure;
      return opened;
    }
    fe::cudnn_dlhandle = library.handle;
    try {
      const std::size_t version = fe::detail::get_backend_version();
      if (version / 10000 != CUDNN_MAJOR) {
        opened.failure = "libcudnn is version " + Dotted(version) +
                         ", and this module was built for version " + std::to_string(CUDNN_MAJOR);
      } else {
        opened.version = Dotted(version) + " (built with " + Dotted(CUDNN_VERSION) + ", frontend " +
                         std::to_string(CUDNN_FRONTEND_MAJOR_VERSION) + "." +
                         std::to_string(CUDNN_FRONTEND_MINOR_VERSION) + ")";
      }
    } catch (const std::exception& error) {
      opened.failure = std::string("libcudnn: ") + error.what();
    }
    return opened;
  }();
  return backend;
}

// The frontend opens it itself, by its name, at its first call of the CUDA runtime.
const std::string& OpenRuntime() {
  static const std::string failure = OpenCudaRuntime(CUDART_VERSION / 1000).failure;
  return failure;
}

fe::DataType_t TypeOf(ElementType type) {
  switch (type) {
    case ElementType::kFp16:
      return fe::DataType_t::HALF;
    case ElementType::kBf16:
      return fe::DataType_t::BFLOAT16;
  }
  throw Error(CPPOOL_INTERNAL, "no such type of elements");
}

std::vector<std::int64_t> List(const std::array<std::int64_t, 4>& values) {
  return {values.begin(), values.end()};
}

std::int64_t Count(const TensorForm& form) {
  return std::accumulate(form.dims.begin(), form.dims.end(), std::int64_t{1}, std::multiplies<>());
}

std::unique_ptr<fe::graph::Graph> NewGraph(fe::DataType_t io, int compute_capability) {
  auto graph = std::make_unique<fe::graph::Graph>();
  graph->set_io_data_type(io)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT)
      .set_sm_version(compute_capability);
  return graph;
}

// Rounds up to the alignment of a workspace, in bytes.
std::size_t RoundUp(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// score - slope * |key - query - diagonal|. cuDNN's own ALiBi, set_alibi_mask, computes its slopes from the
// number of heads, counts from the first key, and takes causal masks alone; this becomes the same kernel with
// other numbers.
Tensor SubtractAlibi(const Graph& graph, const Tensor& scores, const Tensor& slopes, std::int64_t diagonal) {
  using fe::graph::Pointwise_attributes;
  const auto integers = [](const char* name, fe::PointwiseMode_t mode) {
    return Pointwise_attributes().set_name(name).set_mode(mode).set_compute_data_type(fe::DataType_t::INT32);
  };
  const auto index = [&](const char* name, std::int64_t axis) {
    Tensor made = graph->pointwise(scores, integers(name, fe::PointwiseMode_t::GEN_INDEX).set_axis(axis));
    made->set_data_type(fe::DataType_t::INT32);
    return made;
  };
  Tensor distance = graph->pointwise(index("key", 3), index("query", 2),
                                     integers("key_minus_query", fe::PointwiseMode_t::SUB));
  distance->set_data_type(fe::DataType_t::INT32);
  if (diagonal != 0) {
    const auto number = std::make_shared<fe::graph::Tensor_attributes>(static_cast<std::int32_t>(diagonal));
    distance = graph->pointwise(distance, number, integers("minus_diagonal", fe::PointwiseMode_t::SUB));
    distance->set_data_type(fe::DataType_t::INT32);
  }
  const auto floats = [](const char* name, fe::PointwiseMode_t mode) {
    return Pointwise_attributes().set_name(name).set_mode(mode);
  };
  distance = graph->pointwise(distance, floats("distance", fe::PointwiseMode_t::ABS));
  distance->set_data_type(fe::DataType_t::FLOAT);
  const Tensor alibi = graph->pointwise(distance, slopes, floats("alibi", fe::PointwiseMode_t::MUL));
  return graph->pointwise(scores, alibi, floats("minus_alibi", fe::PointwiseMode_t::SUB));
}

// Makes the graph of a call, or of what the frontend is to check of it.
class Builder {
 public:
  Builder(const SdpaCall& call, int compute_capability)
      : call_(call), graph_(NewGraph(TypeOf(call.type), compute_capability)) {
    if (call.fp8) {
      Fp8Forward();
    } else if (call.backward) {
      Backward();
    } else {
      Forward();
    }
  }

  std::unique_ptr<fe::graph::Graph> Take() { return std::move(graph_); }

 private:
  void Forward() {
    const Tensor q = Input(kQ, "q", call_.q), k = Input(kK, "k", call_.k), v = Input(kV, "v", call_.v);
    auto options = fe::graph::SDPA_attributes().set_name("forward").set_generate_stats(!call_.max_logit);
    SetScores(options);
    if (call_.max_logit) {
      // Before 9.21 cuDNN has the maximum only with the sum of exponentials in place of stats.
      options.set_logit_max(RowOutput(kMax, "max")).set_score_sum_exp(RowOutput(kSumExp, "sum_exp"));
    }
    auto [out, stats] = graph_->sdpa(q, k, v, options);
    Output(kOut, out, call_.out, TypeOf(call_.type));
    if (stats) Output(kStats, stats, call_.stats, fe::DataType_t::FLOAT);
  }

  // With 1 for the scale of v, and of out, the elements of out are in units of v's: its scale is v's.
  void Fp8Forward() {
    const TensorForm single{{1, 1, 1, 1}, {1, 1, 1, 1}};
    const auto payload = [&](Uid uid, const char* name, const TensorForm& form) {
      return Input(uid, name, form, fe::DataType_t::FP8_E4M3);
    };
    const auto number = [&](Uid uid, const char* name) {
      return Input(uid, name, single, fe::DataType_t::FLOAT);
    };
    auto options = fe::graph::SDPA_fp8_attributes().set_name("forward").set_generate_stats(true);
    SetScores(options);
    const Tensor one = number(kOne, "scale of v and out");
    auto [out, stats, amax_p, amax_out] = graph_->sdpa_fp8(
        payload(kQ, "q", call_.q), payload(kK, "k", call_.k), payload(kV, "v", call_.v),
        number(kQScale, "scale of q"), number(kKScale, "scale of k"), one,
        number(kPScaleInverse, "inverse of p_scale"), number(kPScale, "p_scale"), one, options);
    Output(kOut, out, call_.out, fe::DataType_t::FP8_E4M3);
    Output(kStats, stats, call_.stats, fe::DataType_t::FLOAT);
    Output(kAmaxP, amax_p, single, fe::DataType_t::FLOAT);
    Output(kAmaxOut, amax_out, single, fe::DataType_t::FLOAT);
  }

  void Backward() {
    const Tensor q = Input(kQ, "q", call_.q), k = Input(kK, "k", call_.k), v = Input(kV, "v", call_.v);
    const Tensor out = Input(kOut, "out", call_.out), dout = Input(kDout, "dout", call_.dout);
    const Tensor stats = Input(kStats, "stats", call_.stats, fe::DataType_t::FLOAT);
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("backward")
                       .set_deterministic_algorithm(call_.deterministic);
    SetScores(options);
    if (call_.dbias != TensorForm{}) {
      const Tensor dbias = Input(kDbias, "dbias", call_.dbias);
      dbias->set_output(true);
      options.set_dbias(dbias);
    }
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, dout, stats, options);
    Output(kDq, dq, call_.dq, TypeOf(call_.type));
    Output(kDk, dk, call_.dk, TypeOf(call_.type));
    Output(kDv, dv, call_.dv, TypeOf(call_.type));
  }

  Tensor Input(Uid uid, const char* name, const TensorForm& form) {
    return Input(uid, name, form, TypeOf(call_.type));
  }
  Tensor Input(Uid uid, const char* name, const TensorForm& form, fe::DataType_t type) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_uid(uid)
                              .set_name(name)
                              .set_dim(List(form.dims))
                              .set_stride(List(form.strides))
                              .set_data_type(type));
  }
  Tensor RowOutput(Uid uid, const char* name) {
    const Tensor rows = Input(uid, name, call_.stats, fe::DataType_t::FLOAT);
    rows->set_output(true);
    return rows;
  }
  static void Output(Uid uid, const Tensor& tensor, const TensorForm& form, fe::DataType_t type) {
    tensor->set_output(true)
        .set_uid(uid)
        .set_dim(List(form.dims))
        .set_stride(List(form.strides))
        .set_data_type(type);
  }

  // What becomes of q * k: the scale, what is added, the mask.
  template <typename Options>
  void SetScores(Options& options) {
    options.set_attn_scale(static_cast<float>(call_.scale));
    if (call_.bias != TensorForm{}) {
      const Tensor bias = Input(kBias, "bias", call_.bias);
      bias->set_alignment(2);  // bytes: it may begin anywhere in a larger tensor
      options.set_bias(bias);
    }
    const auto alignment =
        call_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT : fe::DiagonalAlignment_t::TOP_LEFT;
    if (!call_.alibi) {
      options.set_diagonal_alignment(alignment);
      if (call_.left_bound) options.set_diagonal_band_left_bound(*call_.left_bound);
      if (call_.right_bound) options.set_diagonal_band_right_bound(*call_.right_bound);
      return;
    }
    // Beside changes of the scores by its caller the frontend takes no mask, which then is one of these
    // changes. In the backward pass they need nothing: the gradients of sums are those of their terms, and P
    // is 0 where nothing is seen.
    const std::int64_t heads = call_.q.dims[1];
    const Tensor slopes =
        Input(kSlopes, "slopes", {{1, heads, 1, 1}, {heads, 1, 1, 1}}, fe::DataType_t::FLOAT);
    slopes->set_alignment(4);  // bytes: of some of a rank's heads
    options.set_score_mod([call = call_, alignment, slopes](const Graph& graph, const Tensor& scores) {
      const Tensor added = SubtractAlibi(graph, scores, slopes, call.alibi_diagonal);
      return fe::graph::attn::score_modifiers::sliding_window_mask(graph, added, alignment, call.left_bound,
                                                                   call.right_bound, call.q.dims[2],
                                                                   call.k.dims[2], nullptr, nullptr);
    });
  }

  const SdpaCall& call_;
  std::unique_ptr<fe::graph::Graph> graph_;
};

// stats = max + log(sum_exp), element by element.
std::unique_ptr<fe::graph::Graph> StatsGraph(const TensorForm& form, int compute_capability) {
  auto graph = NewGraph(fe::DataType_t::FLOAT, compute_capability);
  const std::int64_t count = Count(form);
  // cuDNN has no plan for the four dimensions of `form`.
  const std::vector<std::int64_t> dims = {1, 1, count}, strides = {count, count, 1};
  const auto input = [&](Uid uid, const char* name) {
    return graph->tensor(
        fe::graph::Tensor_attributes().set_uid(uid).set_name(name).set_dim(dims).set_stride(strides));
  };
  const Tensor max = input(kMax, "max"), sum = input(kSumExp, "sum_exp");
  const Tensor log = graph->pointwise(
      sum, fe::graph::Pointwise_attributes().set_name("log").set_mode(fe::PointwiseMode_t::LOG));
  graph
      ->pointwise(max, log,
                  fe::graph::Pointwise_attributes().set_name("add").set_mode(fe::PointwiseMode_t::ADD))
      ->set_output(true)
      .set_uid(kStats)
      .set_dim(dims)
      .set_stride(strides);
  return graph;
}

// Makes the graph's plan and returns the bytes of its workspace.
std::size_t BuildPlan(fe::graph::Graph& graph, const Handle& handle) {
  const auto cudnn = static_cast<cudnnHandle_t>(handle.get());
  Check(graph.validate());
  Check(graph.build_operation_graph(cudnn));
  Check(graph.create_execution_plans({fe::HeurMode_t::A}));
  Check(graph.check_support());
  Check(graph.build_plans());
  std::int64_t bytes = 0;
  Check(graph.get_workspace_size(bytes));
  // Captures a run and throws it away, which loads the kernels without running them. Where that fails the
  // first run loads them.
  Check(fe::detail::set_stream(cudnn, static_cast<cudaStream_t>(handle.plan_stream())), "cudnnSetStream");
  (void)graph.warmup(cudnn);
  return static_cast<std::size_t>(bytes);
}

// Small copies are taken from the host at once.
void CopyToDevice(void* to, const void* from, std::size_t bytes, cppool_stream stream) {
  static const auto copy = reinterpret_cast<decltype(&cudaMemcpyAsync)>(
      fe::detail::get_cuda_symbol(fe::detail::CudaLibrary::CUDART, "cudaMemcpyAsync"));
  const cudaError_t error =
      copy(to, from, bytes, cudaMemcpyHostToDevice, reinterpret_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) throw Error(CPPOOL_CUDA, "cudaMemcpyAsync: error " + std::to_string(error));
}

std::optional<std::string> Validate(const SdpaCall& call, int compute_capability) {
  const fe::error_t error = Builder(call, compute_capability).Take()->validate();
  if (error.is_good()) return std::nullopt;
  return OneLine(error.err_msg);
}

}  // namespace

const std::string& Version() {
  const Backend& backend = OpenBackend();
  if (!backend.failure.empty()) throw Error(CPPOOL_UNSUPPORTED, backend.failure);
  return backend.version;
}

Handle::Handle() {
  Version();
  if (!OpenRuntime().empty()) throw Error(CPPOOL_UNSUPPORTED, OpenRuntime());
  cudnnHandle_t handle = nullptr;
  Check(fe::detail::create_handle(&handle), "cudnnCreate");
  handle_ = handle;
  // Not the default stream: no thread may name that while a stream that waits for it is captured, and ranks
  // make plans at once.
  const auto create = reinterpret_cast<decltype(&cudaStreamCreateWithFlags)>(
      fe::detail::get_cuda_symbol(fe::detail::CudaLibrary::CUDART, "cudaStreamCreateWithFlags"));
  cudaStream_t stream = nullptr;
  if (const cudaError_t error = create(&stream, cudaStreamNonBlocking); error != cudaSuccess)
    throw Error(CPPOOL_CUDA, "cudaStreamCreateWithFlags: error " + std::to_string(error));
  plan_stream_ = stream;
}

struct SdpaGraph::State {
  SdpaCall call;
  std::unique_ptr<fe::graph::Graph> graph;
  // With max_logit: the graph that follows, and where in the workspace it finds the sums of exponentials.
  std::unique_ptr<fe::graph::Graph> stats_graph;
  std::size_t sum_exp_offset = 0, stats_offset = 0;
  std::size_t workspace_bytes = 0;
  std::array<float, kGivenNumbers> numbers{};  // of fp8
};

std::optional<std::string> SdpaGraph::Refusal(const SdpaCall& call, int compute_capability) {
  Version();
  if (call.alibi) {  // the limits of the mask, which the frontend checks only where it is not part of a
                     // score_mod
    SdpaCall masked = call;
    masked.alibi = false;
    if (auto refusal = Validate(masked, compute_capability)) return refusal;
  }
  return Validate(call, compute_capability);
}

SdpaGraph::SdpaGraph(const SdpaCall& call, int compute_capability, const Handle& handle)
    : state_(new State{call, Builder(call, compute_capability).Take(), nullptr, 0, 0, 0}) {
  state_->workspace_bytes = BuildPlan(*state_->graph, handle);
  if (call.fp8) {
    state_->numbers = {1.0f, call.p_scale, 1 / call.p_scale};
    state_->workspace_bytes += kNumberBytes;
  }
  if (!call.max_logit) return;
  state_->stats_graph = StatsGraph(call.stats, compute_capability);
  const std::size_t bytes = BuildPlan(*state_->stats_graph, handle);
  state_->sum_exp_offset = RoundUp(state_->workspace_bytes);
  state_->stats_offset =
      state_->sum_exp_offset + RoundUp(static_cast<std::size_t>(Count(call.stats)) * sizeof(float));
  state_->workspace_bytes = state_->stats_offset + bytes;
}

SdpaGraph::~SdpaGraph() = default;

std::size_t SdpaGraph::workspace_bytes() const { return state_->workspace_bytes; }

void SdpaGraph::Run(const Handle& handle, const cppool_attention_tensors& tensors, void* workspace,
                    cppool_stream stream) const {
  const SdpaCall& call = state_->call;
  auto* const bytes = static_cast<std::byte*>(workspace);
  void* of_plan = workspace;
  std::unordered_map<std::int64_t, void*> data = {
      {kQ, tensors.q->data}, {kK, tensors.k->data}, {kV, tensors.v->data}, {kOut, tensors.out->data}};
  if (call.backward) {
    data.insert({{kStats, tensors.lse->data},
                 {kDout, tensors.dout->data},
                 {kDq, tensors.dq->data},
                 {kDk, tensors.dk->data},
                 {kDv, tensors.dv->data}});
    if (tensors.dbias) data.insert({kDbias, tensors.dbias->data});
  } else if (call.max_logit) {
    data.insert({{kMax, tensors.max_logit->data}, {kSumExp, bytes + state_->sum_exp_offset}});
  } else {
    data.insert({kStats, tensors.lse->data});
  }
  if (call.fp8) {
    const auto number = [&](std::size_t which) { return bytes + which * sizeof(float); };
    CopyToDevice(bytes, state_->numbers.data(), sizeof(state_->numbers), stream);
    data.insert({{kQScale, tensors.q->scale->data},
                 {kKScale, tensors.k->scale->data},
                 {kOne, number(kNumberOne)},
                 {kPScale, number(kNumberPScale)},
                 {kPScaleInverse, number(kNumberInverse)},
                 {kAmaxP, number(kNumberAmaxP)},
                 {kAmaxOut, number(kNumberAmaxOut)}});
    of_plan = bytes + kNumberBytes;
  }
  if (tensors.bias) data.insert({kBias, tensors.bias->data});
  if (call.alibi) data.insert({kSlopes, tensors.alibi_slopes->data});
  const auto cudnn = static_cast<cudnnHandle_t>(handle.get());
  Check(fe::detail::set_stream(cudnn, reinterpret_cast<cudaStream_t>(stream)), "cudnnSetStream");
  Check(state_->graph->execute(cudnn, data, of_plan));
  if (!state_->stats_graph) return;
  std::unordered_map<std::int64_t, void*> rows = {
      {kMax, data.at(kMax)}, {kSumExp, data.at(kSumExp)}, {kStats, tensors.lse->data}};
  Check(state_->stats_graph->execute(cudnn, rows, bytes + state_->stats_offset));
}

}  // namespace cppool::kernels::cudnn
