#include "daemon/prepare.h"

#include <cstdio>
#include <exception>

#include "base/new_file.h"
#include "daemon/failure_kind.h"
#include "daemon/library.h"
#include "daemon/parameter_reader.h"
#include "kernels/float_environment.h"
#include "protocol/json_text.h"

namespace cppool::daemon {
namespace {

using protocol::FailureKind;
using protocol::Json;

// The cppool_validation of a case's `validate`, and what the case reported through it.
class Validation {
 public:
  Validation(const PreparedRun& run, const Json& given, const char* backend, int world_size,
             const std::function<bool(double)>& has_room)
      : given_(given),
        kernels_wanted_(run.wanted_kernels),
        has_room_(has_room),
        reader_(run.params, run.registered.schema) {
    c_.abi = CPPOOL_CASE_ABI;
    c_.struct_size = sizeof(c_);
    c_.backend = backend;
    c_.world_size = world_size;
    c_.params_json = run.params_json.c_str();
    c_.dump = run.options.dump.empty() ? nullptr : run.options.dump.c_str();
    c_.inputs = run.options.inputs.empty() ? nullptr : run.options.inputs.c_str();
    const auto& [words, library, find] = run.wanted_kernels;
    c_.kernels_copy = library ? library->copy.c_str() : nullptr;
    c_.wanted_kernels = words.empty() ? nullptr : words.c_str();
    c_.self = this;
    c_.integer = [](cppool_validation* c, const char* name) { return Self(c).reader_.Integer(name); };
    c_.number = [](cppool_validation* c, const char* name) { return Self(c).reader_.Number(name); };
    c_.boolean = [](cppool_validation* c, const char* name) -> int { return Self(c).reader_.Boolean(name); };
    c_.string = [](cppool_validation* c, const char* name) { return Self(c).reader_.String(name); };
    c_.given = [](cppool_validation* c, const char* name) -> int {
      const auto value = Self(c).given_.find(name);
      return value != Self(c).given_.end() && !value->is_null();
    };
    c_.fail = [](cppool_validation* c, const char* detail) { Self(c).detail_ = detail ? detail : ""; };
    c_.needs = [](cppool_validation* c, double bytes) { Self(c).bytes_per_rank_ = bytes; };
    c_.has_room = [](cppool_validation* c, double bytes) -> int {
      const auto& has_room = Self(c).has_room_;
      return !has_room || has_room(bytes);
    };
    c_.replace_params = [](cppool_validation* c, const char* text) { Self(c).replaced_ = text ? text : ""; };
    c_.prepare = [](cppool_validation* c, void* object, void (*release)(void*)) {
      Self(c).prepared_ = std::shared_ptr<const void>(object, [object, release](const void*) {
        const kernels::FloatEnvironment kept;
        if (release) release(object);
      });
    };
    c_.kernel = [](cppool_validation* c, const cppool_attention_kernel** kernel) {
      return Self(c).FindKernel(*kernel);
    };
    c_.kernels = [](cppool_validation* c, const char* json) { Self(c).kernels_ = json ? json : ""; };
  }
  Validation(const Validation&) = delete;
  Validation& operator=(const Validation&) = delete;

  cppool_validation* get() { return &c_; }
  const std::string& misuse() const { return reader_.misuse(); }
  const std::string& detail() const { return detail_; }
  double bytes_per_rank() const { return bytes_per_rank_; }
  const std::optional<std::string>& replaced() const { return replaced_; }
  const std::shared_ptr<const void>& prepared() const { return prepared_; }
  const std::optional<std::string>& kernels() const { return kernels_; }

 private:
  static Validation& Self(cppool_validation* c) { return *static_cast<Validation*>(c->self); }

  cppool_status FindKernel(const cppool_attention_kernel*& kernel) {
    try {
      kernel = kernels_wanted_.find ? kernels_wanted_.find() : nullptr;
      return CPPOOL_OK;
    } catch (const LibraryError& error) {
      detail_ = error.what();
      return CPPOOL_INVALID_REQUEST;
    } catch (const std::exception& error) {  // none leaves a function of C
      detail_ = error.what();
      return CPPOOL_INTERNAL;
    }
  }

  cppool_validation c_{};
  const Json& given_;
  const WantedKernels& kernels_wanted_;
  const std::function<bool(double)>& has_room_;
  ParameterReader reader_;
  std::string detail_;
  double bytes_per_rank_ = 0;
  std::optional<std::string> replaced_;
  std::shared_ptr<const void> prepared_;
  std::optional<std::string> kernels_;
};

// A text that a case gave. `doing` begins the error's text.
Json ParseObject(const std::string& text, const std::string& doing) {
  std::string why;
  try {
    Json json = protocol::ParseJson(text);
    if (json.is_object()) return json;
  } catch (const protocol::InvalidRequest& error) {
    why = std::string(": ") + error.what();
  }
  throw Refusal(FailureKind::kInternal, doing + " a text that is not a JSON object" + why);
}

Json ParseKernels(const std::string& text, const std::string& name) {
  Json kernels = ParseObject(text, "validate of case '" + name + "' named its kernels by");
  const auto has = [&](const char* key) { return kernels.contains(key) && kernels.at(key).is_string(); };
  if (!has("name") || !has("version") || !has("family")) {
    throw Refusal(
        FailureKind::kInternal,
        "validate of case '" + name + "' named its kernels without \"name\", \"version\" and \"family\"");
  }
  return kernels;
}

const RegisteredCase& FindCase(const CaseRegistry& registry, const std::string& name) {
  if (const RegisteredCase* found = registry.Find(name)) return *found;
  throw Refusal(FailureKind::kInvalidRequest, protocol::Unknown("case", name, registry.Names()));
}

void RequireFeature(const PreparedRun& run, std::uint32_t feature, const char* key,
                    const std::string& value) {
  if (value.empty() || (run.registered.features & feature)) return;
  throw Refusal(FailureKind::kInvalidRequest,
                "case '" + run.registered.name + "' has no \"" + key + "\": leave the key out");
}

kernels::Fault ToFault(const Fault& request, int world_size, const std::optional<FaultMeans>& means) {
  const auto refuse = [](const std::string& why) { throw Refusal(FailureKind::kInvalidRequest, why); };
  if (!means) refuse("this daemon takes no \"fault\": start it with --allow-faults");
  const auto kind = kernels::FaultKindOf(request.kind);
  if (!kind) refuse(protocol::Unknown("kind of fault", request.kind, kernels::FaultKindNames()));
  if (request.rank >= world_size) {
    refuse("the \"rank\" of \"fault\" must be from 0 to " + std::to_string(world_size - 1) + ", not " +
           std::to_string(request.rank));
  }
  return {*kind,
          request.rank,
          request.stage,
          static_cast<int>(request.count),
          means->half_answer,
          means->write_answer};
}

void AskCase(PreparedRun& run, const Json& given, const std::string& backend, int world_size,
             const std::function<bool(double)>& has_room) {
  const cppool_case* definition = run.registered.definition;
  Validation validation(run, given, backend.c_str(), world_size, has_room);
  cppool_status status = CPPOOL_OK;
  try {
    const kernels::FloatEnvironment kept;
    status = definition->validate(validation.get());
  } catch (const std::exception& error) {
    throw Refusal(FailureKind::kInternal,
                  "validate of case '" + run.registered.name + "' threw: " + error.what());
  } catch (...) {
    throw Refusal(FailureKind::kInternal, "validate of case '" + run.registered.name +
                                              "' threw something that is not a std::exception");
  }
  if (!validation.misuse().empty()) throw Refusal(FailureKind::kInternal, validation.misuse());
  if (status != CPPOOL_OK) {
    throw Refusal(ToFailureKind(status), validation.detail().empty() ? "case '" + run.registered.name +
                                                                           "' does not take these parameters"
                                                                     : validation.detail());
  }
  run.bytes_per_rank = validation.bytes_per_rank();
  run.prepared = validation.prepared();
  if (validation.kernels()) run.kernels = ParseKernels(*validation.kernels(), run.registered.name);
  if (!validation.replaced()) return;
  run.params = ParseObject(*validation.replaced(),
                           "validate of case '" + run.registered.name + "' replaced the parameters by");
  run.params_json = *validation.replaced();
}

std::string Gigabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.4g GiB", bytes / (1024.0 * 1024 * 1024));
  return text;
}

}  // namespace

void CheckTrace(const std::string& file) {
  if (file.empty()) return;
  if (const std::string why = base::WhyNotWritable(file); !why.empty())
    throw Refusal(FailureKind::kInvalidRequest,
                  "\"trace\": " + protocol::Quoted(file) + " cannot be written: " + why);
}

std::shared_ptr<PreparedRun> Prepare(const CaseRegistry& registry, const protocol::RunRequest& request,
                                     const std::string& backend, int world_size,
                                     const std::optional<FaultMeans>& faults,
                                     const std::function<WantedKernels()>& load_kernels,
                                     const std::function<bool(double)>& has_room) {
  auto run = std::make_shared<PreparedRun>();
  run->registered = FindCase(registry, request.case_name);
  run->options = request;
  RequireFeature(*run, CPPOOL_CASE_DUMPS, "dump", request.dump);
  RequireFeature(*run, CPPOOL_CASE_TAKES_INPUTS, "inputs", request.inputs);
  RequireFeature(*run, CPPOOL_CASE_CHOOSES_KERNELS, "kernels", request.kernels);
  if (load_kernels && (run->registered.features & CPPOOL_CASE_CHOOSES_KERNELS))
    run->wanted_kernels = load_kernels();
  if (request.fault && request.waits)
    throw Refusal(FailureKind::kInvalidRequest, "a request has either \"waits\" or \"fault\": leave one out");
  if (request.fault) run->fault = ToFault(*request.fault, world_size, faults);
  const Json given = request.from_kwargs ? protocol::ParametersFromKwargs(
                                               request.params, run->registered.schema, &run->warnings)
                                         : request.params;
  run->params = protocol::ValidateParameters(given, run->registered.schema);
  run->params_json = run->params.dump();
  if (run->registered.definition->validate) AskCase(*run, given, backend, world_size, has_room);
  if (const auto seed = run->params.find("seed"); seed != run->params.end() && seed->is_number_unsigned()) {
    run->seed = seed->get<std::uint64_t>();
  }
  return run;
}

bool FitsInPieces(const PreparedRun& run, World& world) {
  if (run.bytes_per_rank <= 0) return true;
  for (int rank = 0; rank < world.size(); ++rank) {
    const double bytes = run.bytes_per_rank * world.RanksSharingMemoryOf(rank);
    const kernels::MemoryInfo memory = world.rank(world.place().first + rank).Memory();
    const auto held = static_cast<double>(memory.held_bytes);
    if (bytes > held / 2 && bytes > static_cast<double>(memory.free_bytes) - held) return false;
  }
  return true;
}

bool HasRoom(double bytes_per_rank, World& world) {
  for (int rank = 0; rank < world.size(); ++rank) {
    if (!world.rank(world.place().first + rank).HasRoom(bytes_per_rank * world.RanksSharingMemoryOf(rank)))
      return false;
  }
  return true;
}

void CheckMemory(const PreparedRun& run, World& world) {
  if (run.bytes_per_rank <= 0) return;
  for (int rank = 0; rank < world.size(); ++rank) {
    const int sharing = world.RanksSharingMemoryOf(rank);
    if (world.rank(world.place().first + rank).HasRoom(run.bytes_per_rank * sharing)) continue;
    const double free = static_cast<double>(world.rank(world.place().first + rank).Memory().free_bytes);
    const std::string ranks = sharing > 1 ? " (" + std::to_string(sharing) + " ranks share them)" : "";
    throw Refusal(FailureKind::kOutOfMemory, "each rank needs " + Gigabytes(run.bytes_per_rank) +
                                                 ", and rank " + std::to_string(world.place().first + rank) +
                                                 " has " + Gigabytes(free) + " free" + ranks +
                                                 "; nothing was allocated");
  }
}

}  // namespace cppool::daemon
