#include "kernels/attention/families/table/kernel.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "kernels/attention/families/table/trial_tensors.h"

namespace cppool::kernels::table {

TableKernel::TableKernel(cppool_runtime* runtime, const TableFamily& family)
    : rt_(runtime),
      family_(family),
      kernel_(family.kernel()),
      asker_(kernel_),
      ops_(MakeTensorOps(runtime)) {}

TableKernel::~TableKernel() {
  if (rt_->device < 0 || std::uncaught_exceptions() > 0) return;
  rt_->stream_synchronize(rt_, rt_->stream);
}

void TableKernel::Load(const KernelRequest& request) {
  if (const auto refusal = family_.Refusal(request)) throw RuntimeError(CPPOOL_UNSUPPORTED, *refusal);
  ops_->Load();
}

std::unique_ptr<BlockPlan> TableKernel::Plan(const KernelRequest& request, const Layout& query,
                                             const Layout& key, const std::vector<Band>& bands,
                                             cppool_stream stream) {
  Load(request);
  BlockCut cut = CutBlock(asker_, request, query, key, bands);
  if (cut.refusal) throw RuntimeError(CPPOOL_UNSUPPORTED, *cut.refusal);
  auto plan =
      std::make_unique<TablePlan>(std::move(cut.calls), request, CountPairs(query, key, bands), query, key);
  plan->forward = Prepare(plan->block.forward);
  plan->backward = Prepare(plan->block.backward);
  plan->forward_tables = Upload(plan->block.forward.tables, stream);
  plan->backward_tables = Upload(plan->block.backward.tables, stream);
  plan->tokens = ops_->Rows(query, stream);
  return plan;
}

Buffer TableKernel::Upload(const std::vector<std::int32_t>& tables, cppool_stream stream) {
  if (tables.empty()) return {};
  Buffer buffer(rt_, tables.size() * sizeof(tables[0]), stream);
  Check(rt_, rt_->copy(rt_, buffer.get(), tables.data(), buffer.bytes(), stream));
  Check(rt_, rt_->stream_synchronize(rt_, stream));  // the plan, with the tables, may go at any time
  return buffer;
}

std::vector<Prepared> TableKernel::Prepare(const PassCalls& pass) {
  std::vector<Prepared> calls;
  for (const CallForm& form : pass.forms) {
    const auto known = std::find_if(prepared_.begin(), prepared_.end(),
                                    [&](const Prepared& each) { return each.call->form() == form; });
    if (known == prepared_.end()) {
      Prepared made{std::make_shared<PreparedCall>(rt_, kernel_, form), nullptr};
      const CallForm strided = Strided(form);
      if (trials_ && !asker_.Refusal(strided))
        made.strided = std::make_shared<PreparedCall>(rt_, kernel_, strided);
      const std::size_t bytes = made.call->workspace_bytes();
      if (bytes > workspace_.bytes()) GrowWorkspace(bytes);
      prepared_.push_back(made);
      calls.push_back(made);
    } else {
      calls.push_back(*known);
    }
  }
  return calls;
}

void TableKernel::GrowWorkspace(std::size_t bytes) {
  try {
    workspace_ = Buffer(rt_, bytes, rt_->stream);
  } catch (const RuntimeError& error) {
    throw RuntimeError(error.status(), "kernel " + std::string(kernel_.name) + " asks for " +
                                           std::to_string(bytes) + " bytes of workspace: " + error.what());
  }
}

void TableKernel::Run(const Prepared& prepared, const CallArea& area, const CallData& data,
                      cppool_stream stream) {
  if (!trial_) {
    prepared.call->Run(data, workspace_.get(), stream);
    return;
  }
  TrialCall call;
  call.kernel = kernel_.name;
  call.tensors = TrialTensors(prepared.call->form(), area, data);
  call.workspace_bytes = prepared.call->workspace_bytes();
  const auto run = [stream](const PreparedCall& of) -> TrialCall::Run {
    return [&of, stream](const std::vector<void*>& places, void* workspace) {
      CallData moved{};
      for (std::size_t i = 0, next = 0; i < kCallTensors; ++i) {
        if (of.form().tensors[i].ndim > 0) moved[i] = places[next++];
      }
      of.Run(moved, workspace, stream);
    };
  };
  call.run = run(*prepared.call);
  if (prepared.strided) {
    call.strided_tensors = TrialTensors(prepared.strided->form(), area, {});
    call.workspace_bytes = std::max(call.workspace_bytes, prepared.strided->workspace_bytes());
    call.run_strided = run(*prepared.strided);
  }
  trial_->Run(call, stream);
}

}  // namespace cppool::kernels::table
