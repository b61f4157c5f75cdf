#include "kernels/cudnn/sdpa_graph.h"

#include <cudnn_frontend.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/cudnn/library.h"

// What the frontend calls instead of functions that it is linked with (NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING).
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace cppool::kernels::cudnn {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

enum Uid : std::int64_t { kQ = 1, kK, kV, kOut, kStats, kDout, kDq, kDk, kDv };

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

class Builder {
 public:
  Builder(const SdpaCall& call, int compute_capability) : call_(call), graph_(new fe::graph::Graph) {
    graph_->set_io_data_type(TypeOf(call.type))
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(compute_capability);
    const Tensor q = Input(kQ, "q", call.q), k = Input(kK, "k", call.k), v = Input(kV, "v", call.v);
    if (!call.backward) {
      auto options = fe::graph::SDPA_attributes().set_name("forward").set_generate_stats(true);
      auto [out, stats] = graph_->sdpa(q, k, v, SetMask(options));
      Output(kOut, out, call.out, TypeOf(call.type));
      Output(kStats, stats, call.stats, fe::DataType_t::FLOAT);
      return;
    }
    const Tensor out = Input(kOut, "out", call.out), dout = Input(kDout, "dout", call.dout);
    const Tensor stats = Input(kStats, "stats", call.stats);
    stats->set_data_type(fe::DataType_t::FLOAT);
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("backward")
                       .set_deterministic_algorithm(call.deterministic);
    auto [dq, dk, dv] = graph_->sdpa_backward(q, k, v, out, dout, stats, SetMask(options));
    Output(kDq, dq, call.dq, TypeOf(call.type));
    Output(kDk, dk, call.dk, TypeOf(call.type));
    Output(kDv, dv, call.dv, TypeOf(call.type));
  }

  std::unique_ptr<fe::graph::Graph> Take() { return std::move(graph_); }

 private:
  Tensor Input(Uid uid, const char* name, const TensorForm& form) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_uid(uid)
                              .set_name(name)
                              .set_dim(List(form.dims))
                              .set_stride(List(form.strides))
                              .set_data_type(TypeOf(call_.type)));
  }
  static void Output(Uid uid, const Tensor& tensor, const TensorForm& form, fe::DataType_t type) {
    tensor->set_output(true)
        .set_uid(uid)
        .set_dim(List(form.dims))
        .set_stride(List(form.strides))
        .set_data_type(type);
  }
  template <typename Options>
  Options& SetMask(Options& options) const {
    options.set_attn_scale(static_cast<float>(call_.scale))
        .set_diagonal_alignment(call_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                   : fe::DiagonalAlignment_t::TOP_LEFT);
    if (call_.left_bound) options.set_diagonal_band_left_bound(*call_.left_bound);
    if (call_.right_bound) options.set_diagonal_band_right_bound(*call_.right_bound);
    return options;
  }

  const SdpaCall& call_;
  std::unique_ptr<fe::graph::Graph> graph_;
};

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
}

struct SdpaGraph::State {
  bool backward;
  std::unique_ptr<fe::graph::Graph> graph;
  std::size_t workspace_bytes = 0;
};

std::optional<std::string> SdpaGraph::Refusal(const SdpaCall& call, int compute_capability) {
  Version();
  const fe::error_t error = Builder(call, compute_capability).Take()->validate();
  if (error.is_good()) return std::nullopt;
  return OneLine(error.err_msg);
}

SdpaGraph::SdpaGraph(const SdpaCall& call, int compute_capability, const Handle& handle)
    : state_(new State{call.backward, Builder(call, compute_capability).Take()}) {
  fe::graph::Graph& graph = *state_->graph;
  const auto cudnn = static_cast<cudnnHandle_t>(handle.get());
  Check(graph.validate());
  Check(graph.build_operation_graph(cudnn));
  Check(graph.create_execution_plans({fe::HeurMode_t::A}));
  Check(graph.check_support());
  Check(graph.build_plans());
  std::int64_t bytes = 0;
  Check(graph.get_workspace_size(bytes));
  state_->workspace_bytes = static_cast<std::size_t>(bytes);
  // Captures a run on a stream of its own and throws it away, which loads the kernels without running them. Where that
  // fails the first run loads them.
  Check(fe::detail::set_stream(cudnn, nullptr), "cudnnSetStream");
  (void)graph.warmup(cudnn);
}

SdpaGraph::~SdpaGraph() = default;

std::size_t SdpaGraph::workspace_bytes() const { return state_->workspace_bytes; }

void SdpaGraph::Run(const Handle& handle, const cppool_attention_tensors& tensors, void* workspace,
                    cppool_stream stream) const {
  std::unordered_map<std::int64_t, void*> data = {{kQ, tensors.q->data},
                                                  {kK, tensors.k->data},
                                                  {kV, tensors.v->data},
                                                  {kOut, tensors.out->data},
                                                  {kStats, tensors.lse->data}};
  if (state_->backward) {
    data.insert({{kDout, tensors.dout->data},
                 {kDq, tensors.dq->data},
                 {kDk, tensors.dk->data},
                 {kDv, tensors.dv->data}});
  }
  const auto cudnn = static_cast<cudnnHandle_t>(handle.get());
  Check(fe::detail::set_stream(cudnn, reinterpret_cast<cudaStream_t>(stream)), "cudnnSetStream");
  Check(state_->graph->execute(cudnn, data, workspace));
}

}  // namespace cppool::kernels::cudnn
