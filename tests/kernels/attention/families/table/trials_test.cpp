// Planted bad kernels, each of which passes every other check: what a trial finds out about them.
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/families/table/family.h"
#include "kernels/error.h"
#include "tests/catch.h"
#include "tests/kernels/attention/families/table/test_kernel.h"
#include "tests/kernels/attention/schedules/host_world.h"

namespace {

using namespace cppool::kernels;
using namespace cppool::test;
using cppool::kernels::table::TableFamily;
using Fault = Behaviour::Fault;

struct Outcome {
  std::set<std::string> failed;  // `against` of the checks that do not hold
  std::string error;
};

Outcome RunPlanted(int ranks, const AttentionSpec& spec, Fault fault, std::uint32_t features = 0) {
  const TableFamily family(TestKernel(features, {.workspace_bytes = 1000, .fault = fault}));
  HostWorld world(ranks);
  world.UseFamily(family);
  Outcome outcome;
  try {
    world.Run(spec);
  } catch (const RuntimeError& error) {
    CHECK(error.status() == CPPOOL_MISMATCH);
    outcome.error = error.what();
  }
  for (const Finding& finding : world.findings()) {
    if (!finding.verdict.ok) outcome.failed.insert(finding.against);
  }
  return outcome;
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

AttentionSpec Simple(int ranks) {
  AttentionSpec spec = Small(ranks, CpCommType::kP2p);
  spec.mask = AttnMaskType::kNoMask;
  return spec;
}

AttentionSpec ForwardOnly() {
  AttentionSpec spec = Simple(1);
  spec.training = false;
  return spec;
}

}  // namespace

TEST_CASE("a right kernel passes all trials, which are reported") {
  const TableFamily family(TestKernel(0, {.workspace_bytes = 1000}));
  HostWorld world(2);
  world.UseFamily(family);
  std::set<std::string> against;
  for (const Finding& finding : world.Run(Simple(2))) {
    CHECK(finding.verdict.ok);
    against.insert(finding.against);
  }
  CHECK(against == std::set<std::string>{"late_inputs", "no_cp", "oracle", "strides", "workspace"});
}

TEST_CASE("a write beyond a tensor is found, and where it was") {
  const auto [fault, text] = GENERATE(
      std::pair<Fault, std::string>{Fault::kWritesBehind, "kernel planted wrote behind the end of out"},
      std::pair<Fault, std::string>{Fault::kWritesBefore, "kernel planted wrote in front of dq"},
      std::pair<Fault, std::string>{
          Fault::kWritesGap, "kernel planted wrote between the rows of out, where its strides leave a gap"},
      std::pair<Fault, std::string>{Fault::kWritesInput, "kernel planted wrote to its input k"},
      std::pair<Fault, std::string>{Fault::kWritesWorkspace,
                                    "kernel planted wrote behind the end of its workspace"});
  CHECK(RunPlanted(1, Simple(1), fault).error == text);
}

TEST_CASE("what a kernel does wrong with a bias, ALiBi, max_logit and packed sequences is found") {
  constexpr std::uint32_t kEverything =
      CPPOOL_ATTENTION_BIAS | CPPOOL_ATTENTION_ALIBI | CPPOOL_ATTENTION_MAX_LOGIT | CPPOOL_ATTENTION_VARLEN;
  AttentionSpec spec = Simple(1);
  SECTION("writes beyond the gradient of the bias") {
    spec.bias = BiasType::kPostScale;
    CHECK(RunPlanted(1, spec, Fault::kWritesBehindBias, kEverything).error ==
          "kernel planted wrote behind the end of dbias");
    CHECK(RunPlanted(1, spec, Fault::kWritesBiasGap, kEverything).error ==
          "kernel planted wrote between the rows of dbias, where its strides leave a gap");
  }
  SECTION("takes a bias for packed") {
    spec.bias = BiasType::kPostScale;
    spec.training = false;
    CHECK(RunPlanted(1, spec, Fault::kPackedBias, kEverything).failed == std::set<std::string>{"strides"});
  }
  SECTION("counts ALiBi from a diagonal of its own") {
    spec = Simple(2);
    spec.bias = BiasType::kAlibi;
    for (const Fault fault : {Fault::kAlibiOfCall, Fault::kAlibiOfMask})
      CHECK(RunPlanted(2, spec, fault, kEverything).failed.count("oracle") == 1);
    CHECK(RunPlanted(2, spec, Fault::kNone, kEverything).failed.empty());
  }
  SECTION("gives a maximum of more than its row") {
    spec.max_logit = true;
    CHECK(RunPlanted(1, spec, Fault::kKeepsMaximum, kEverything).failed.count("oracle") == 1);
  }
  SECTION("writes between packed sequences") {
    spec.format = QkvFormat::kThd;
    spec.mask = AttnMaskType::kPaddingCausal;
    spec.pad_between_seqs = true;
    spec.batch = 5;
    CHECK(RunPlanted(1, spec, Fault::kWritesOtherRows, kEverything).error ==
          "kernel planted wrote between the rows of out, where its strides leave a gap");
  }
}

TEST_CASE("a kernel that expects its workspace as it left it is found") {
  const Outcome outcome = RunPlanted(1, Simple(1), Fault::kKeepsWorkspace);
  CHECK(outcome.failed.count("workspace") == 1);
  CHECK(outcome.failed.count("oracle") + outcome.failed.count("no_cp") == 0);
  CHECK(Has(outcome.error, "when its workspace holds NaN: it must write its workspace before it reads it"));
}

TEST_CASE("a kernel that takes its rows for packed is found") {
  const Outcome outcome = RunPlanted(1, ForwardOnly(), Fault::kPacked);
  CHECK(outcome.failed == std::set<std::string>{"strides"});
  CHECK(Has(outcome.error, "it must use the strides of each tensor"));
}

TEST_CASE("a kernel that keeps inputs of an earlier call is found") {
  const Outcome outcome = RunPlanted(2, Simple(2), Fault::kKeepsInputs);
  CHECK(outcome.failed.count("late_inputs") == 1);
  CHECK(Has(outcome.error, "when its inputs are written right before the call"));
}

TEST_CASE("a kernel that says it is deterministic and is not is found") {
  AttentionSpec spec = Simple(1);
  spec.deterministic = true;
  CHECK(RunPlanted(1, spec, Fault::kDrifts, CPPOOL_ATTENTION_DETERMINISTIC).failed.count("rerun") == 1);
  CHECK(RunPlanted(1, spec, Fault::kNone, CPPOOL_ATTENTION_DETERMINISTIC).failed.empty());
}

TEST_CASE("a kernel that computes gradients from its own keys alone is found") {
  CHECK(RunPlanted(2, Simple(2), Fault::kOwnLse).failed.count("oracle") == 1);
}
