// The daemon with the host runtime under ThreadSanitizer: a sample of the suite has no data race, and a
// missing wait is reported as a data race.
#include <dirent.h>

#include "tests/planted/planted_bug.h"
#include "tests/planted/planted_cells.h"

using namespace cppool::test;
using cppool::kernels::PlantableBug;
using cppool::kernels::PlantableBugs;

namespace {

const std::vector<std::string> kOnHost = {"--backend", "host", "--max-seqlen", "32", "--perturb", "1"};
// Every feature with every schedule: each row has cells of all four schedules, on 2 and 4 ranks, or on 8.
const CellFilters kSample = {
    {"row=padding_causal", "row=learnable_window", "row=six_sequences_bottom_right",
     "row=deterministic_learnable", "row=gqa_two_kv_heads", "row=bias_111s_gqa_192_128", "row=mqa_causal",
     "row=unequal_window", "row=alibi_window_unequal", "row=off_by_one_gqa", "row=max_logit_bias_thd",
     "row=inference_bias", "row=eight_ranks_steps_apart"},
    kInferenceCells};

// Sets TSAN_OPTIONS for the daemons that are started during its lifetime, and collects their reports.
class Reports {
 public:
  explicit Reports(const std::string& options) {
    setenv("TSAN_OPTIONS",
           (options + ":halt_on_error=0:exitcode=0:log_path=" + folder_.File("report")).c_str(), 1);
  }
  ~Reports() { unsetenv("TSAN_OPTIONS"); }

  std::string Text() const {
    std::string text;
    DIR* folder = opendir(folder_.File("").c_str());
    while (dirent* entry = readdir(folder))
      if (entry->d_name[0] != '.') text += ReadFile(folder_.File(entry->d_name));
    closedir(folder);
    return text;
  }

 private:
  TemporaryFolder folder_;
};

bool Exists(const char* daemon) {
  if (std::ifstream(daemon)) return true;
  WARN("skipped: there is no daemon with ThreadSanitizer (see the test \"tsan: build\")");
  return false;
}

}  // namespace

TEST_CASE("ThreadSanitizer reports nothing for every feature with every schedule") {
  if (!Exists(CPPOOL_TSAN_DAEMON)) return;
  const Reports reports("symbolize=1");
  const Caught none = RunCells(nullptr, kSample, kOnHost, CPPOOL_TSAN_DAEMON);
  CHECK(none.cells >= 60);
  CHECK(none.failed == std::vector<std::string>{});
  CHECK(none.other == std::vector<std::string>{});
  const Caught one = RunCells(nullptr, kOneLaunchCells, kOnHost + kOneLaunch, CPPOOL_TSAN_DAEMON);
  CHECK(one.cells > 8);
  CHECK(one.failed == std::vector<std::string>{});
  CHECK(one.other == std::vector<std::string>{});
  CHECK(reports.Text() == "");
}

TEST_CASE("ThreadSanitizer reports each missing wait as a data race") {
  if (!Exists(CPPOOL_TSAN_PLANTED_DAEMON)) return;
  int waits = 0;
  for (const PlantableBug& bug : PlantableBugs()) {
    if (!IsRace(bug)) continue;
    ++waits;
    CAPTURE(bug.name);
    const Reports reports("symbolize=0");  // resolving names takes longer than the cells
    const bool one = IsOfOneLaunch(bug);
    for (const std::vector<std::string>& cells :
         one ? kOneLaunchCells
             : CellFilters{{"row=unequal_window"}, kInferenceCells, {"row=padding_causal"}}) {
      if (reports.Text().empty())
        RunCells(bug.name, {cells}, one ? kOnHost + kOneLaunch : kOnHost, CPPOOL_TSAN_PLANTED_DAEMON);
    }
    CHECK_THAT(reports.Text(), Catch::Matchers::ContainsSubstring("WARNING: ThreadSanitizer: data race"));
  }
  CHECK(waits >= 8);
}
