// The command with the real daemon on the host runtime: the whole matrix, and lists.
#include <algorithm>

#include "tests/client/command_support.h"

using namespace cppool::test;
using cppool::Json;

namespace {

std::vector<std::string> WithHost(std::vector<std::string> words) {
  words.insert(words.end(), {"--backend", "host"});
  return words;
}

void PassesMatrix(const char* max_seqlen) {
  Ran ran =
      Cppool(WithHost({"run", "--suite", "matrix", "--max-seqlen", max_seqlen, "--filter", "suite!=fp8"}));
  INFO(ran.out);
  CHECK(ran.code == 0);
  CHECK(ran.Prints("\nmatrix: 864 of 864 passed, 0 failed, 0 skipped\n"));
  CHECK(ran.Prints("\nown: 288 of 288 passed, 0 failed, 0 skipped\n"));
  CHECK(ran.Last() == "1152 passed, 0 failed, 0 skipped");
}

}  // namespace

TEST_CASE("no cell of the matrix would be skipped") {
  Ran ran = Cppool(WithHost({"run", "--suite", "matrix", "--max-seqlen", "96", "--list", "--json"}));
  REQUIRE(ran.lines.size() > 864 + 3456);
  CHECK(Json::parse(ran.lines.back())["summary"]["run"] == ran.lines.size() - 1);
  ran.lines.pop_back();
  for (const std::string& line : ran.lines) {
    const Json cell = Json::parse(line);
    INFO(cell["name"] << ": " << cell["error"]);
    CHECK(cell["would"] == "run");
  }
}

TEST_CASE("every 16-bit cell of the matrix passes on the host, none is skipped", "[long]") {
  // Planted bugs are seen at 32 tokens (tests/planted). A sanitizer takes ten times as long per token.
#if defined(CPPOOL_TEST_TSAN) || defined(CPPOOL_TEST_ASAN)
  PassesMatrix("16");
#else
  PassesMatrix("32");
#endif
}

TEST_CASE("every 16-bit cell of the matrix passes on the host with 64 tokens", "[.]") { PassesMatrix("64"); }

TEST_CASE("every recipe of fp8 passes on the host with every schedule") {
  Ran ran =
      Cppool(WithHost({"run", "--suite", "matrix", "--max-seqlen", "32", "--filter", "dtype=fp8", "--filter",
                       "row=fused:cp_2_6", "--filter", "qkv_format=sbhd", "--param", "num_heads=4", "--param",
                       "num_gqa_groups=2", "--param", "head_dim_qk=64", "--param", "head_dim_v=64"}));
  INFO(ran.out);
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "48 passed, 0 failed, 0 skipped");
}

TEST_CASE("the cases and their parameters are listed for people") {
  Ran ran = Cppool({"list"});
  CHECK(ran.code == 0);
  CHECK(ran.lines.at(0).rfind("attention: context-parallel attention", 0) == 0);
  ran = Cppool({"list", "attention"});
  CHECK(ran.code == 0);
  CHECK(ran.Prints("\n  batch_size  = 2\n    an integer from 1 to 65536\n    sequences\n"));
  CHECK(ran.Prints("\n  dtype  = bf16\n    bf16, fp16 or fp8\n"));
  CHECK(ran.Prints("\n  scaling_mode  = null\n    delayed, current or mxfp8\n"));
  CHECK(ran.Prints("\n  fp8_dpa  = false\n    true or false\n"));
  CHECK(ran.Prints("\n  window_size  = [-1,-1]\n    a list of 2 integers from -1 to 16777216\n"));
  CHECK(ran.Prints("\n  is_training  = true\n    true or false\n"));
  CHECK(Json::parse(Cppool({"list", "attention", "--json"}).out)["parameters"].size() > 20);
  ran = Cppool({"list", "atention"});
  CHECK(ran.code == 2);
  CHECK(ran.err.find("did you mean \"attention\"?") != std::string::npos);
}

TEST_CASE("own cells pass on the host with random delays") {
  Ran ran = Cppool(WithHost({"run", "--suite", "matrix", "--max-seqlen", "32", "--perturb", "11", "--filter",
                             "row=bias_111s_gqa_192_128", "--filter", "row=alibi_window_unequal", "--filter",
                             "row=padding_causal_unequal", "--filter", "row=learnable_masked_rows",
                             "--filter", "row=six_ranks_gqa_window"}));
  INFO(ran.out);
  CHECK(ran.code == 0);
  CHECK(ran.Last() == "24 passed, 0 failed, 0 skipped");
}
