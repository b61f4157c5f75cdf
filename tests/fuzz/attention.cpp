#include "tests/fuzz/attention.h"

#include <cmath>

#include "daemon/attention_case/attention_case.h"
#include "tests/fuzz/property.h"

namespace cppool::fuzz {

const daemon::CaseRegistry& Registry() {
  static const daemon::CaseRegistry registry = [] {
    daemon::CaseRegistry made;
    made.Add(AttentionCase(), "built in");
    return made;
  }();
  return registry;
}

Prepared Prepare(const protocol::RunRequest& request, int world_size) {
  Prepared prepared;
  try {
    prepared.run = daemon::Prepare(Registry(), request, "host", world_size, daemon::FaultMeans{});
  } catch (const daemon::Refusal& refusal) {
    Require(refusal.kind() == protocol::FailureKind::kInvalidRequest || IsSkip(refusal.kind()),
            "a refusal is for an invalid, inapplicable or unsupported request", refusal.what());
    prepared.refusal = refusal.what();
  } catch (const protocol::InvalidRequest& error) {
    prepared.refusal = error.what();
  }
  if (!prepared.run) {
    RequireErrorText(prepared.refusal);
    return prepared;
  }
  const daemon::PreparedRun& run = *prepared.run;
  for (const protocol::ParameterSpec& spec : run.registered.schema)
    Require(run.params.contains(spec.name), "an accepted run has every parameter", spec.name);
  Require(protocol::ParseJson(run.params_json) == run.params, "params_json is the text of the parameters");
  Require(std::isfinite(run.bytes_per_rank) && run.bytes_per_rank > 0,
          "an accepted run needs a positive, finite amount of memory", std::to_string(run.bytes_per_rank));
  Require(run.seed.has_value(), "an accepted run has a seed");
  return prepared;
}

}  // namespace cppool::fuzz
