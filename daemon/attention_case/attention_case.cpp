#include "daemon/attention_case/attention_case.h"

#include <cstdint>
#include <cstdio>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/attention_case/files.h"
#include "daemon/attention_case/resolve.h"
#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "kernels/backend.h"
#include "kernels/error.h"

namespace cppool {
namespace {

using attention_case::Json;
using attention_case::Refused;

// The parameters of a request, read once and shared by its ranks.
struct Prepared {
  Json params;
  kernels::AttentionSpec spec;
  std::shared_ptr<const kernels::AttentionFamily> family;
  Json ran;  // `kernels` of the answer
};

cppool_status Validate(cppool_validation* v) {
  try {
    const cppool_attention_kernel* kernel = nullptr;
    if (const cppool_status status = v->kernel(v, &kernel); status != CPPOOL_OK) return status;
    auto prepared = std::make_unique<Prepared>();
    prepared->params = attention_case::Resolve(
        Json::parse(v->params_json), [v](const std::string& name) { return v->given(v, name.c_str()) != 0; });
    const Json& params = prepared->params;
    attention_case::CheckRelations(params, v->world_size);
    kernels::AttentionSpec& spec = prepared->spec = attention_case::ToSpec(params, v->world_size);
    if (v->dump) attention_case::CheckDump(v->dump, v->inputs, spec, v->world_size);
    if (v->inputs) attention_case::CheckInputs(v->inputs, spec);
    const bool on_host = std::string_view(v->backend) == "host";
    if (spec.transfers == kernels::Transfers::kPeer && on_host)
      throw Refused(CPPOOL_UNSUPPORTED, "transfers 'peer' copies between GPUs, and the backend is host");
    prepared->family = attention_case::ChooseKernels(kernel, v->backend, spec, v->world_size);
    const kernels::AttentionFamily& family = *prepared->family;
    v->needs(v, attention_case::SetLaunches(spec, family, v->world_size, on_host,
                                            [v](double bytes) { return v->has_room(v, bytes) != 0; }));
    Json& names = prepared->ran;
    names = {{"name", family.kernels()}, {"version", family.version()}, {"family", family.name()}};
    // A library's kernels multiply what they like.
    if (spec.fp8 && !kernel) {
      const kernels::Capabilities can = family.capabilities(kernels::RequestOf(spec));
      const bool native = can.forward_qk == kernels::Fp8Form::kPayload;
      names["fp8_products"] = native ? "native" : "bf16";
      spec.fp8->products = native ? kernels::Fp8Products::kNative : kernels::Fp8Products::kBf16;
    }
    // A library's names may be any bytes.
    v->kernels(v, names.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    v->replace_params(v, params.dump().c_str());
    v->prepare(v, prepared.release(), [](void* object) { delete static_cast<Prepared*>(object); });
    return CPPOOL_OK;
  } catch (const Refused& refused) {
    v->fail(v, refused.what());
    return refused.status();
  } catch (const std::exception& error) {
    v->fail(v, error.what());
    return CPPOOL_INTERNAL;
  }
}

class Report : public kernels::AttentionReport {
 public:
  // tolerances: receives those of the checks, by tensor and what it is compared with.
  Report(cppool_case_context* context, Json* tolerances) : c_(context), tolerances_(*tolerances) {
    tolerances_ = Json::object();
  }
  bool NextIteration() override { return c_->next_iteration(c_) != 0; }
  void Work(const std::string& stage, double flops) override { c_->work(c_, stage.c_str(), flops); }
  void Check(kernels::CheckedTensor tensor, const std::string& against,
             const kernels::Verdict& verdict) override {
    // With values that are not finite there is no largest error.
    const double not_finite = std::numeric_limits<double>::quiet_NaN();
    const bool finite = verdict.mismatches == 0;
    const cppool_check check{kernels::NameOf(tensor),
                             against.c_str(),
                             finite ? verdict.max_abs_err : not_finite,
                             finite ? verdict.rel_err : not_finite,
                             verdict.tolerance,
                             verdict.ok,
                             verdict.ratio};
    c_->check(c_, &check);
    tolerances_[kernels::NameOf(tensor)][against] = verdict.tolerance;
    if (verdict.worst || verdict.bad || !verdict.where.empty()) {
      Json index = Json::object();
      if (verdict.worst)
        for (const auto& [name, value] : verdict.worst->index) index[name] = value;
      const std::string text = index.dump();
      const cppool_location location{verdict.worst ? text.c_str() : nullptr,
                                     verdict.worst ? verdict.worst->got : 0,
                                     verdict.worst ? verdict.worst->wanted : 0,
                                     verdict.bad ? static_cast<std::int64_t>(*verdict.bad) : -1,
                                     verdict.where.empty() ? nullptr : verdict.where.c_str()};
      c_->locate(c_, &location);
    }
    if (verdict.block_ratio > 0) {
      block_ratio_[kernels::NameOf(tensor)][against] = verdict.block_ratio;
      c_->result(c_, "block_ratio", block_ratio_.dump().c_str());
    }
    if (failed_block_.empty()) failed_block_ = verdict.block;
  }
  void Moves(kernels::Transfers transfers, kernels::Launches launches) override {
    c_->result(c_, "transfers", transfers == kernels::Transfers::kPeer ? "\"peer\"" : "\"comm\"");
    c_->result(c_, "launches", launches == kernels::Launches::kOne ? "\"one\"" : "\"steps\"");
  }
  void Digest(std::uint64_t digest) override {
    char json[24];
    std::snprintf(json, sizeof(json), "\"%016llx\"", static_cast<unsigned long long>(digest));
    c_->result(c_, "digest", json);
  }
  // The first block whose errors are too large, in words; empty: there is none.
  const std::string& failed_block() const { return failed_block_; }

 private:
  cppool_case_context* c_;
  Json& tolerances_;
  Json block_ratio_ = Json::object();
  std::string failed_block_;
};

cppool_status Run(cppool_case_context* c) {
  try {
    const auto& [params, spec, family, ran] = *static_cast<const Prepared*>(c->prepared);
    Json about{{"parameters", params},
               {"kernels", ran},
               {"world_size", c->runtime->world_size},
               {"backend", c->runtime->backend}};
    Report report(c, &about["tolerances"]);
    // Adjacent ranks exchange heads, and those of a node are adjacent.
    const kernels::Place place = kernels::PlaceOf(c->runtime);
    if (spec.comm == kernels::CpCommType::kA2aP2p && !place.whole())
      c->result(c, "a2a_groups", place.ranks % spec.a2a_size == 0 ? "\"in_node\"" : "\"across_nodes\"");
    std::optional<attention_case::InputFiles> inputs;
    if (c->inputs) inputs.emplace(c->inputs);
    std::optional<attention_case::DumpFiles> dump;
    if (c->dump) {
      dump.emplace(c->dump, spec, c->runtime->world_size, c->checks != 0, about);
    }
    kernels::RunAttention(c->runtime, *family, spec, c->checks != 0, report, inputs ? &*inputs : nullptr,
                          dump ? &*dump : nullptr);
    if (report.failed_block().empty()) return CPPOOL_OK;
    c->fail(c, report.failed_block().c_str());
    return CPPOOL_MISMATCH;
  } catch (const kernels::RuntimeError& error) {
    c->fail_by(c, error.what(), error.culprit());
    return error.status();
  } catch (const std::exception& error) {
    c->fail(c, error.what());
    return CPPOOL_INTERNAL;
  }
}

}  // namespace

const cppool_case* AttentionCase() {
  static const cppool_case definition{
      CPPOOL_CASE_ABI,
      sizeof(cppool_case),
      "attention",
      "context-parallel attention, forward and backward, checked against the "
      "same kernels without CP and an fp64 oracle",
      attention_case::kParameters,
      attention_case::kParameterCount,
      &Validate,
      &Run,
      CPPOOL_CASE_DUMPS | CPPOOL_CASE_TAKES_INPUTS | CPPOOL_CASE_CHOOSES_KERNELS};
  return &definition;
}

}  // namespace cppool
