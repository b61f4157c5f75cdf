// Every fault in a run on one place and on two, whose reports cross as text: the answers are the same.
#include <regex>
#include <string>

#include "daemon/thread_ranks.h"
#include "kernels/backend.h"
#include "kernels/error.h"
#include "kernels/fault_injector.h"
#include "protocol/json_text.h"
#include "tests/catch.h"
#include "tests/child.h"
#include "tests/sanitized.h"

namespace cppool::test {
namespace {

using protocol::Json;

std::string WithoutTimes(const std::string& text) {
  return std::regex_replace(text, std::regex(R"([0-9]+\.[0-9]+ s|[0-9]+ bytes does not fit: [0-9]+)"), "#");
}

// What place_run says of the fault, without what differs between two runs of the same.
struct Outcome {
  int exit_code = 0;
  std::vector<Json> answers;
  std::string crash;
};

Outcome OutcomeOf(const Child& child) {
  Outcome outcome;
  outcome.exit_code = child.exit_code;
  const auto lines = [&](const std::string& mark, const auto& take) {
    for (auto at = child.output.find(mark); at != std::string::npos; at = child.output.find(mark, at + 1)) {
      const auto begin = at + mark.size();
      take(child.output.substr(begin, child.output.find('\n', begin) - begin));
    }
  };
  lines("\nanswer: ", [&](const std::string& line) {
    Json answer = protocol::ParseJson(WithoutTimes(line));
    answer.erase("tflops");
    for (Json& rank : answer.at("ranks")) {
      rank.erase("gpu_ms");
      if (rank.contains("samples")) rank.at("samples") = rank.at("samples").at("forward").size();
    }
    outcome.answers.push_back(std::move(answer));
  });
  lines("cppoold: crash ", [&](const std::string& line) { outcome.crash = line; });
  return outcome;
}

FILE* Start(const std::string& kind, int places) {
  return StartChild(std::string(CPPOOL_PLACE_RUN) + " " + kind + " " + std::to_string(places) +
                    " 2>/dev/null");
}

}  // namespace

TEST_CASE("a run on two places has the answers of a run on one, whatever fails") {
  struct Row {
    std::string kind;
    int exit_code;  // of place_run: 3 after a fatal answer
    std::string first_status;
  };
  static const std::vector<Row> rows = {{"none", 0, "passed"},
                                        {"sampling", 0, "passed"},
                                        {"throw", 0, "error"},
                                        {"segfault", 139, ""},
                                        {"abort", 134, ""},
                                        {"exit", 42, ""},
                                        {"stall_host", 3, "error"},
                                        {"out_of_memory", 0, "error"},
                                        {"flood", 0, "passed"},
                                        {"half_line", 0, "passed"},
                                        {"half_answer", 0, "passed"},
                                        {"stall", 3, "error"},
                                        {"trap", 133, ""},
                                        {"out_of_bounds", 0, "error"},
                                        {"skip_collective", 3, "error"},
                                        {"wrong_size", 0, "error"},
                                        {"flip_bit", 0, "failed"}};
  CHECK(rows.size() == kernels::FaultKindNames().size() + 2);
  const Row& row = rows[GENERATE(range(std::size_t{0}, rows.size()))];
  INFO(row.kind);
  // A sanitizer ends crashes itself, and a bit that flips while the main stream reads it is a data race.
  if (kSanitized && (row.first_status.empty() || row.kind == "flip_bit")) return;
  FILE* const on_one = Start(row.kind, 1);
  FILE* const on_two = Start(row.kind, 2);
  Outcome one = OutcomeOf(FinishChild(on_one)), two = OutcomeOf(FinishChild(on_two));
  CHECK(one.exit_code == row.exit_code);
  CHECK(two.exit_code == row.exit_code);
  CHECK(one.crash == two.crash);
  CHECK((one.crash.find(R"("rank":2)") != std::string::npos) == row.first_status.empty());
  const std::size_t wanted = row.first_status.empty() ? 0 : row.exit_code == 0 ? 2 : 1;
  REQUIRE(one.answers.size() == wanted);
  REQUIRE(two.answers.size() == wanted);
  for (std::size_t i = 0; i < wanted; ++i) {
    CHECK(one.answers[i].at("status") == (i == 0 ? row.first_status : "passed"));
    // Both ends of a message of a wrong size find it, and one of them is the first.
    if ((row.kind == "wrong_size" && i == 0) || (kSanitized && row.exit_code == 3)) {
      for (Outcome* outcome : {&one, &two}) {
        CHECK(outcome->answers[i].at("failure").at("kind") == (row.exit_code == 3 ? "timeout" : "internal"));
        for (const char* member : {"error", "failure", "ranks"}) outcome->answers[i].erase(member);
      }
    }
    CHECK(one.answers[i] == two.answers[i]);
  }
}

TEST_CASE("a place that is not the whole world needs the transport of the others") {
  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_WITH(kernels::CreateHostBackend(kernels::Place(4, 2, 2)),
                    ContainsSubstring("2 of 4 ranks needs the transport of the others"));
  CHECK_THROWS_WITH(kernels::CreateCudaBackend(kernels::Place(4, 2, 2)),
                    ContainsSubstring("2 of 4 ranks needs a link to the others"));
  CHECK_THROWS_WITH(kernels::CreateCudaBackend(kernels::Place(4, 2, 2), kernels::Transport::kPeer),
                    ContainsSubstring("peer copies within one process, and this one has 2 of 4 ranks"));
  const auto transport = kernels::CreateHostTransport(4);
  const auto backend = kernels::CreateHostBackend(kernels::Place(4, 2, 2), transport);
  CHECK(backend->Devices().size() == 2);
  for (const int other : {1, 4}) CHECK_THROWS_AS(backend->OpenRank(other), kernels::RuntimeError);
}

}  // namespace cppool::test
