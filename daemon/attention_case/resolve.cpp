#include "daemon/attention_case/resolve.h"

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <utility>
#include <vector>

#include "kernels/attention/kernel_library.h"
#include "kernels/attention/run.h"
#include "kernels/attention/schedule.h"
#include "protocol/json_text.h"
#include "protocol/models.h"
#include "protocol/parameters.h"

namespace cppool::attention_case {
namespace {

using kernels::AttentionSpec;
using kernels::AttnMaskType;
using kernels::BiasType;
using kernels::CpCommType;
using kernels::Dtype;
using kernels::Launches;
using kernels::QkvFormat;
using kernels::SoftmaxType;
using kernels::Transfers;
using protocol::ModelTable;

[[noreturn]] void Invalid(const std::string& why) { throw Refused(CPPOOL_INVALID_REQUEST, why); }

std::string Text(const Json& params, const char* name) { return params.at(name).get<std::string>(); }
std::int64_t Int(const Json& params, const char* name) { return params.at(name).get<std::int64_t>(); }
bool IsCausal(const std::string& mask) { return mask.find("causal") != std::string::npos; }

struct ModelRow {
  const ModelTable* table;
  const Json* parameters;
};

ModelRow FindRow(const Json& params) {
  const std::string name = Text(params, "model");
  const Json& backend = params.at("kernel_backend");
  std::vector<ModelRow> rows;
  std::set<std::string> known;
  for (const ModelTable& table : protocol::ModelTables()) {
    if (!backend.is_null() && backend != table.kernel_backend) continue;
    for (const auto& [row, parameters] : table.rows.items()) known.insert(row);
    if (const auto row = table.rows.find(name); row != table.rows.end()) rows.push_back({&table, &*row});
  }
  for (const ModelRow& row : rows) {
    if (*row.parameters == *rows.front().parameters) continue;
    Invalid("model '" + name + "' differs between " + rows.front().table->kernel_backend + " and " +
            row.table->kernel_backend + ": give kernel_backend too");
  }
  if (!rows.empty()) return rows.front();
  Invalid(protocol::Unknown("model", name, {known.begin(), known.end()}));
}

void ApplyModel(Json& params, const std::function<bool(const std::string&)>& given) {
  const ModelRow row = FindRow(params);
  const auto set = [&](const std::string& name, const Json& value) {
    if (!given(name)) params[name] = value;
  };
  for (const auto& [name, value] : row.parameters->items()) set(name, value);
  if (row.table->kernel_backend == "FusedAttention" && params.at("qkv_format") == "thd")
    set("pad_between_seqs", true);
}

// The value of a word; the schema has checked that it is one of these.
template <typename Value>
Value Choose(const Json& params, const char* name,
             std::initializer_list<std::pair<const char*, Value>> words) {
  for (const auto& [word, value] : words) {
    if (params.at(name) == word) return value;
  }
  Invalid(std::string(name) + " is " + params.at(name).dump() + ", which is not a known value");
}

std::string NotDivisible(const char* name, std::int64_t value, std::int64_t divisor, const std::string& why) {
  return std::string(name) + " is " + std::to_string(value) + " and must be divisible by " +
         std::to_string(divisor) + ": " + why;
}

// Keeps the first reason why the ranks cannot share the problem. It counts once all of the request has been
// read, so that what is wrong in any world is named first.
class Division {
 public:
  void Impossible(const std::string& why) {
    if (why_.empty()) why_ = why;
  }
  void Divides(const char* name, std::int64_t value, std::int64_t divisor, const std::string& why) {
    if (value % divisor != 0) Impossible(NotDivisible(name, value, divisor, why));
  }
  // An odd length is divided by no world.
  void Length(const char* name, std::int64_t value, int world_size) {
    const std::string why = "that is 2 * world_size, since each rank holds two chunks of every sequence";
    if (value % 2 != 0) Invalid(NotDivisible(name, value, 2 * world_size, why));
    Divides(name, value, 2 * world_size, why);
  }
  const std::string& why() const { return why_; }

 private:
  std::string why_;
};

// One rank exchanges with none, and all of them have no ring: those are other schedules, and running them
// under this name would hide it.
void CheckA2aSize(std::int64_t a2a_size, int world_size, Division& division) {
  std::string allowed;
  bool found = false;
  for (int size = 2; size < world_size; ++size) {
    if (world_size % size != 0) continue;
    allowed += (allowed.empty() ? "" : ", ") + std::to_string(size);
    found = found || size == a2a_size;
  }
  if (found) return;
  const std::string is = "a2a_size is " + std::to_string(a2a_size) + " and must be ";
  if (a2a_size == 1) Invalid(is + "from 2 to world_size / 2; for 1 use cp_comm_type 'p2p'");
  if (allowed.empty()) {
    return division.Impossible(
        "cp_comm_type 'a2a+p2p' needs a world_size with a divisor between 1 and itself (4, 6, 8, 9, ...), "
        "and this is " +
        std::to_string(world_size));
  }
  division.Impossible(is + "one of " + allowed + ": it divides world_size " + std::to_string(world_size) +
                      (a2a_size == world_size ? "; for world_size use cp_comm_type 'a2a'" : ""));
}

}  // namespace

Json Resolve(Json params, const std::function<bool(const std::string&)>& given) {
  if (!params.at("model").is_null()) ApplyModel(params, given);
  const auto derive = [&](const char* name, const char* from) {
    if (params.at(name).is_null()) params[name] = params.at(from);
  };
  derive("max_seqlen_kv", "max_seqlen_q");
  derive("num_gqa_groups", "num_heads");
  derive("head_dim_v", "head_dim_qk");
  if (params.at("softmax_scale").is_null()) {
    params["softmax_scale"] = 1 / std::sqrt(static_cast<double>(Int(params, "head_dim_qk")));
  }

  std::string mask = Text(params, "attn_mask_type");
  if (params.at("qkv_format") == "thd") {
    if (mask == "no_mask") mask = "padding";
    if (mask == "causal") mask = "padding_causal";
    if (mask == "causal_bottom_right") mask = "padding_causal_bottom_right";
    params["attn_mask_type"] = mask;
  }
  Json& window = params.at("window_size");
  if (IsCausal(mask)) {
    window[1] = 0;
  } else if (window == Json{-1, 0}) {
    window[1] = -1;
  }
  ResolveFp8(params);
  return params;
}

void CheckRelations(const Json& params, int world_size) {
  const std::int64_t heads = Int(params, "num_heads"), groups = Int(params, "num_gqa_groups");
  if (heads % groups != 0) {
    Invalid(NotDivisible("num_heads", heads, groups,
                         "that is num_gqa_groups, and each group has as many query heads"));
  }
  Division division;
  division.Length("max_seqlen_q", Int(params, "max_seqlen_q"), world_size);
  division.Length("max_seqlen_kv", Int(params, "max_seqlen_kv"), world_size);
  const std::string comm = Text(params, "cp_comm_type");
  if (comm == "a2a") {
    division.Divides("num_heads", heads, world_size,
                     "that is world_size, since cp_comm_type 'a2a' gives each rank as many heads");
  } else if (comm == "a2a+p2p") {
    const std::int64_t a2a_size = Int(params, "a2a_size");
    CheckA2aSize(a2a_size, world_size, division);
    division.Divides(
        "num_heads", heads, a2a_size,
        "that is a2a_size, since cp_comm_type 'a2a+p2p' gives each rank of an exchange as many heads");
  }
  division.Impossible(CheckSequences(params, world_size));
  division.Impossible(CheckFp8(params, world_size));
  if (!division.why().empty()) throw Refused(CPPOOL_INAPPLICABLE, division.why());
}

std::shared_ptr<const kernels::AttentionFamily> ChooseKernels(const cppool_attention_kernel* wanted,
                                                              const std::string& backend,
                                                              const AttentionSpec& spec, int world_size) {
  const kernels::KernelRequest request = kernels::RequestOf(spec);
  if (!wanted) {
    const kernels::FamilyChoice choice = kernels::ChooseFamily(backend, request);
    if (!choice.family) throw Refused(CPPOOL_UNSUPPORTED, choice.refusal);
    return {std::shared_ptr<void>(), choice.family};  // it lives as long as the process
  }
  std::shared_ptr<const kernels::AttentionFamily> family = kernels::MakeFamily(*wanted);
  if (const auto refusal = family->Refusal(request)) throw Refused(CPPOOL_UNSUPPORTED, *refusal);
  if (const auto refusal = kernels::ScheduleRefusal(*family, spec, world_size))
    throw Refused(CPPOOL_UNSUPPORTED, *refusal);
  return family;
}

AttentionSpec ToSpec(const Json& params, int world_size) {
  AttentionSpec spec;
  spec.batch = Int(params, "batch_size");
  spec.seqlen_q = Int(params, "max_seqlen_q");
  spec.seqlen_kv = Int(params, "max_seqlen_kv");
  spec.heads = params.at("num_heads").get<int>();
  spec.kv_heads = params.at("num_gqa_groups").get<int>();
  spec.dim_qk = params.at("head_dim_qk").get<int>();
  spec.dim_v = params.at("head_dim_v").get<int>();
  spec.dtypes = kernels::TensorDtypes(Choose<Dtype>(
      params, "dtype", {{"fp16", Dtype::kFp16}, {"bf16", Dtype::kBf16}, {"fp8", Dtype::kBf16}}));
  spec.fp8 = RecipeOf(params);
  spec.format =
      Choose<QkvFormat>(params, "qkv_format",
                        {{"bshd", QkvFormat::kBshd}, {"sbhd", QkvFormat::kSbhd}, {"thd", QkvFormat::kThd}});
  spec.comm = Choose<CpCommType>(params, "cp_comm_type",
                                 {{"p2p", CpCommType::kP2p},
                                  {"all_gather", CpCommType::kAllGather},
                                  {"a2a", CpCommType::kA2a},
                                  {"a2a+p2p", CpCommType::kA2aP2p}});
  spec.a2a_size = params.at("a2a_size").get<int>();
  spec.transfers =
      Choose<Transfers>(params, "transfers",
                        {{"auto", Transfers::kAuto}, {"comm", Transfers::kComm}, {"peer", Transfers::kPeer}});
  spec.launches = Choose<Launches>(
      params, "launches", {{"auto", Launches::kAuto}, {"steps", Launches::kSteps}, {"one", Launches::kOne}});
  spec.mask =
      Choose<AttnMaskType>(params, "attn_mask_type",
                           {{"no_mask", AttnMaskType::kNoMask},
                            {"causal", AttnMaskType::kCausal},
                            {"causal_bottom_right", AttnMaskType::kCausalBottomRight},
                            {"padding", AttnMaskType::kPadding},
                            {"padding_causal", AttnMaskType::kPaddingCausal},
                            {"padding_causal_bottom_right", AttnMaskType::kPaddingCausalBottomRight}});
  spec.pad_between_seqs = params.at("pad_between_seqs").get<bool>();
  spec.bias = Choose<BiasType>(
      params, "attn_bias_type",
      {{"no_bias", BiasType::kNone}, {"post_scale_bias", BiasType::kPostScale}, {"alibi", BiasType::kAlibi}});
  const std::string shape = Text(params, "bias_shape");  // in "1hss" a 1 stands for an axis that is broadcast
  spec.bias_shape = {shape[0] == 'b', shape[1] == 'h', shape[2] == 's'};
  spec.softmax = Choose<SoftmaxType>(params, "softmax_type",
                                     {{"vanilla", SoftmaxType::kVanilla},
                                      {"off-by-one", SoftmaxType::kOffByOne},
                                      {"learnable", SoftmaxType::kLearnable}});
  spec.max_logit = params.at("return_max_logit").get<bool>();
  spec.deterministic = params.at("deterministic").get<bool>();
  spec.window_left = params.at("window_size").at(0).get<std::int64_t>();
  spec.window_right = params.at("window_size").at(1).get<std::int64_t>();
  spec.scale = params.at("softmax_scale").get<double>();
  spec.training = params.at("is_training").get<bool>();
  spec.seed = params.at("seed").get<std::uint64_t>();
  SetSequences(params, world_size, spec);
  return spec;
}

double SetLaunches(AttentionSpec& spec, const kernels::AttentionFamily& family, int world_size, bool on_host,
                   const std::function<bool(double)>& has_room) {
  const auto bytes = [&] { return kernels::AttentionBytes(family, spec, world_size, on_host); };
  if (spec.launches != Launches::kSteps && world_size > 1) {
    const auto why = kernels::WhyNotOneLaunch(family, spec);
    if (why && spec.launches == Launches::kOne) throw Refused(CPPOOL_UNSUPPORTED, "launches 'one': " + *why);
    // No host copies between devices, which one launch takes unless it is asked for.
    const bool may_be_one = !why && !on_host;
    if (spec.launches == Launches::kAuto && !(may_be_one && has_room(bytes())))
      spec.launches = Launches::kSteps;
  }
  return bytes();
}

}  // namespace cppool::attention_case
