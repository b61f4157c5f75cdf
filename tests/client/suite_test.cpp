// The cells of the suites, and values as people write them.
#include <algorithm>
#include <map>
#include <set>

#include "client/src/shell.h"
#include "client/suite/cell.h"
#include "client/suite/repeat.h"
#include "client/suite/suite.h"
#include "client/suite/value_text.h"
#include "tests/catch.h"
#include "tests/child.h"

using namespace cppool::suite;
using cppool::Json;

namespace {

Json Shrunk(Json params, std::int64_t length, int world_size = 2) {
  Shrink(&params, length, world_size);
  return params;
}

std::vector<Cell> MatrixCells() { return Select(LoadSuite("matrix"), {{"suite", "matrix"}}); }
std::vector<Cell> Fp8Cells() { return Select(LoadSuite("matrix"), {{"suite", "fp8"}}); }
std::vector<Cell> OwnCells() { return Select(LoadSuite("matrix"), {{"suite", "own"}}); }

// What a cell is, but for its name.
std::string LineOf(const Cell& cell) {
  std::string rows;
  for (const std::string& row : cell.rows) rows += (rows.empty() ? "" : ",") + row;
  return rows + "|" + std::to_string(cell.world_size) + "|" + (cell.essential ? "1" : "0") + "|" +
         cell.params.dump() + "\n";
}

// FNV-1a over the texts, in their order.
std::uint64_t DigestOf(const std::vector<std::string>& texts) {
  std::uint64_t digest = 0xcbf29ce484222325;
  for (const std::string& text : texts)
    for (const unsigned char byte : text) digest = (digest ^ byte) * 0x100000001b3;
  return digest;
}

std::size_t Count(const std::vector<Cell>& cells, const std::vector<Filter>& filters) {
  return Select(cells, filters).size();
}

}  // namespace

TEST_CASE("the matrix has 864 distinct cells, of which 120 are essential") {
  std::vector<Cell> matrix = MatrixCells();
  REQUIRE(matrix.size() == 864);
  CHECK(LoadSuite("essential").size() == 120);
  std::set<std::string> names, params, rows;
  std::map<std::string, int> schedules, formats, types;
  for (const Cell& cell : matrix) {
    names.insert(cell.name);
    params.insert(cell.params.dump());
    rows.insert(cell.rows.begin(), cell.rows.end());
    CHECK(cell.case_name == "attention");
    for (const char* key :
         {"batch_size", "max_seqlen_q", "max_seqlen_kv", "num_heads", "num_gqa_groups", "head_dim_qk",
          "head_dim_v", "dtype", "qkv_format", "cp_comm_type", "attn_mask_type", "window_size",
          "attn_bias_type", "bias_shape", "softmax_type", "return_max_logit", "is_training"})
      CHECK(cell.params.contains(key));
    bool packed = cell.params["qkv_format"] == "thd";
    CHECK(cell.params.contains("pad_between_seqs") == packed);
    CHECK((cell.params["attn_mask_type"].get<std::string>().rfind("padding", 0) == 0) == packed);
    CHECK(cell.world_size == (cell.params["cp_comm_type"] == "a2a+p2p" ? 4 : 2));
    ++schedules[cell.params["cp_comm_type"]];
    ++formats[cell.params["qkv_format"]];
    ++types[cell.params["dtype"]];
  }
  CHECK(names.size() == 864);
  CHECK(params.size() == 864);
  CHECK(rows.size() == 36);
  CHECK(schedules ==
        std::map<std::string, int>{{"p2p", 216}, {"all_gather", 216}, {"a2a", 216}, {"a2a+p2p", 216}});
  CHECK(types == std::map<std::string, int>{{"bf16", 432}, {"fp16", 432}});
  CHECK(formats["thd"] == 864 - formats["bshd"] - formats["sbhd"]);
  CHECK_THROWS_AS(LoadSuite("everything"), UsageError);
}

TEST_CASE(
    "the cells of the matrix are the same, in the same order, as in the list that its rows and axes "
    "replaced") {
  std::vector<std::string> lines;
  for (const Cell& cell : MatrixCells()) lines.push_back(cell.name + "|" + LineOf(cell));
  CHECK(DigestOf(lines) == 0x3fde2ceff7dd89c5ull);
}

TEST_CASE("the fp8 cells are the 3456 distinct ones of Transformer Engine's matrix") {
  const std::vector<Cell> cells = Fp8Cells();
  REQUIRE(cells.size() == 3456);
  std::set<std::string> names;
  std::map<std::string, int> rows, recipes;
  std::vector<std::string> lines;
  for (const Cell& cell : cells) {
    names.insert(cell.name);
    ++rows[cell.rows.at(0)];
    ++recipes[RecipeOf(cell)];
    lines.push_back(LineOf(cell));
    CHECK(cell.rows.size() == 1);
    CHECK(cell.case_name == "attention");
  }
  CHECK(names.size() == cells.size());
  CHECK(rows.size() == 24);
  for (const auto& [row, count] : rows) {
    INFO(row);
    CHECK(count == 3 * 4 * 12);  // formats, schedules, recipes
  }
  CHECK(recipes.size() == 12);
  for (const auto& [recipe, count] : recipes) {
    INFO(recipe);
    CHECK(count == 24 * 3 * 4);
  }
  for (const char* schedule : {"p2p", "all_gather", "a2a", "a2a+p2p"})
    CHECK(Count(cells, {{"cp_comm_type", schedule}}) == 864);
  CHECK(Count(cells, {{"qkv_format", "thd"}, {"pad_between_seqs", "true"}}) == 1152);
  CHECK(Count(cells, {{"world_size", "4"}}) == 864);
  CHECK(Count(cells, {{"is_training", "false"}}) == 144);
  CHECK(Count(cells, {{"essential", "true"}}) == 1152);
  // This is the digest of the sorted lines that LineOf makes of a list of these cells. The list was derived,
  // apart from this project, from that suite's table, parameters and rules at its commit d0067d0.
  std::sort(lines.begin(), lines.end());
  CHECK(DigestOf(lines) == 0x1af51c739e7240a9ull);
  CHECK(cells.front().name == "fused:cp_1_0 fp8 bshd p2p delayed dpa bwd W=2");
  CHECK(cells.back().name == "fused:cp_5_1 fp8 thd a2a+p2p padded mxfp8 dpa f16_O W=4");
}

TEST_CASE("a suite's cells are the combinations of its rows with the values of its axes") {
  const Json axes = {
      {"dtype", {{{"set", {{"dtype", "bf16"}}}}, {{"set", {{"dtype", "fp16"}}}, {"world_size", 4}}}},
      {"format", {{{"set", {{"qkv_format", "bshd"}}}}}},
      {"schedule", {{{"set", {{"cp_comm_type", "p2p"}}}}, {{"set", {{"cp_comm_type", "a2a"}}}}}},
      {"chosen",
       {{{"when", {{"dtype", {"fp16"}}, {"row", {"one", "three"}}}}, {"essential", true}},
        {{"when", {{"dtype", {"fp16"}}, {"row", {"three"}}}}, {"set", {{"seed", 7}}}}}}};
  const Json file = {
      {"rows", {{"one", {{"num_heads", 8}}}, {"two", {{"num_heads", 8}}}, {"three", {{"num_heads", 4}}}}},
      {"axes", axes},
      {"cells",
       {{{"rows", {"one", "t*"}}, {"over", {"dtype", "format", "schedule", "chosen"}}},
        {{"rows", {"one"}},
         {"world_size", 8},
         {"set", {{"dtype", "bf16"}, {"qkv_format", "thd"}, {"cp_comm_type", "p2p"}}}}}}};
  std::vector<std::string> cells;
  for (const Cell& cell : CellsOfFile("mine", file)) {
    CHECK(cell.suite == "mine");
    cells.push_back(cell.name + (cell.essential ? " essential" : "") +
                    (cell.params.contains("seed") ? " seeded" : "") +
                    (cell.rows.size() > 1 ? " and " + cell.rows[1] : ""));
  }
  // `two` equals `one`, so they share cells. The fp16 cells of `three` have two alternatives on the last
  // axis, which get a number.
  CHECK(cells ==
        std::vector<std::string>{"one bf16 bshd p2p W=2 and two", "one bf16 bshd a2a W=2 and two",
                                 "one fp16 bshd p2p W=4 essential and two",
                                 "one fp16 bshd a2a W=4 essential and two", "three bf16 bshd p2p W=2",
                                 "three bf16 bshd a2a W=2", "three fp16 bshd p2p W=4 essential",
                                 "three fp16 bshd p2p W=4 #2 seeded", "three fp16 bshd a2a W=4 essential",
                                 "three fp16 bshd a2a W=4 #2 seeded", "one bf16 thd p2p W=8"});
  CHECK_THROWS(CellsOfFile("mine", {{"cells", {{{"rows", {"none"}}}}}}));
}

TEST_CASE("filters select cells by the model tables of their rows") {
  const std::vector<Cell> cells = LoadSuite("matrix");
  CHECK(Count(cells, {{"model", "cp_2_0"}, {"suite", "own"}}) == 0);
  // A row that is in both tables with the same values.
  CHECK(Count(cells, {{"model", "cp_2_0"}, {"suite", "matrix"}}) == 32);
  CHECK(Count(cells, {{"model", "cp_2_0"}, {"suite", "fp8"}}) == 144);
  CHECK(Count(cells, {{"kernel_backend", "FlashAttention"}}) == 384);
  CHECK(Count(cells, {{"kernel_backend", "FusedAttention"}, {"suite", "matrix"}}) == 576);
  CHECK(Count(cells, {{"kernel_backend", "FusedAttention"}, {"suite", "fp8"}}) == 3456);
  CHECK(Count(cells, {{"model", "cp_9_9"}}) == 0);
}

TEST_CASE("a cell has the parameters of its row, and over them those of its axes") {
  std::vector<Cell> cells =
      Select(LoadSuite("matrix"),
             {{"row", "fused:cp_2_4"}, {"qkv_format", "thd"}, {"dtype", "bf16"}, {"cp_comm_type", "a2a"}});
  REQUIRE(cells.size() == 1);
  CHECK(cells[0].name == "fused:cp_2_4 bf16 thd a2a padded W=2");
  CHECK(cells[0].essential);
  CHECK(cells[0].params == Json({{"batch_size", 2},
                                 {"max_seqlen_q", 4096},
                                 {"max_seqlen_kv", 4096},
                                 {"num_heads", 12},
                                 {"num_gqa_groups", 2},
                                 {"head_dim_qk", 128},
                                 {"head_dim_v", 128},
                                 {"attn_mask_type", "padding_causal"},
                                 {"window_size", {-1, 0}},
                                 {"attn_bias_type", "post_scale_bias"},
                                 {"bias_shape", "111s"},
                                 {"softmax_type", "vanilla"},
                                 {"return_max_logit", true},
                                 {"is_training", false},
                                 {"dtype", "bf16"},
                                 {"qkv_format", "thd"},
                                 {"cp_comm_type", "a2a"},
                                 {"pad_between_seqs", true}}));
}

TEST_CASE("the smoke suite has a cell for every pair of values of two axes") {
  std::vector<Cell> cells = LoadSuite("smoke");
  auto values = [](const Cell& cell) {
    const Json& p = cell.params;
    int heads = p["num_heads"], groups = p["num_gqa_groups"], q = p["max_seqlen_q"], kv = p["max_seqlen_kv"];
    return std::vector<std::string>{p["cp_comm_type"],
                                    p["qkv_format"],
                                    p["attn_mask_type"],
                                    groups == heads ? "mha"
                                    : groups == 1   ? "mqa"
                                                    : "gqa",
                                    p["head_dim_qk"].dump() + "/" + p["head_dim_v"].dump(),
                                    p["dtype"],
                                    "W" + std::to_string(cell.world_size),
                                    q == kv  ? "="
                                    : q < kv ? "<"
                                             : ">"};
  };
  std::set<std::pair<std::string, std::string>> met;
  std::set<std::string> threes, names;
  std::map<std::string, int> few;
  for (const Cell& cell : cells) {
    auto v = values(cell);
    const std::string layout = v[1], mask = v[2];
    const bool window = cell.params.value("window_size", Json{-1, 0}) != Json{-1, 0};
    few["window"] += window && mask == "causal";
    few["padding"] += layout != "thd" && mask.starts_with("padding");
    few["thd"] += layout == "thd";
    few["thd with a window and padding"] +=
        layout == "thd" && window && cell.params.value("pad_between_seqs", false);
    for (const auto& a : v)
      for (const auto& b : v) met.insert({a, b});
    if (layout != "thd" && (mask == "causal" || mask == "no_mask")) threes.insert(v[0] + layout + mask);
    names.insert(cell.name);
    CHECK(cell.params["max_seqlen_q"] <= 256);
    CHECK(cell.params["max_seqlen_kv"] <= 256);
    CHECK(cell.params["max_seqlen_q"].get<int>() % (2 * cell.world_size) == 0);
    CHECK(cell.params["max_seqlen_kv"].get<int>() % (2 * cell.world_size) == 0);
    CHECK((cell.world_size == 4 || cell.params["cp_comm_type"] != "a2a+p2p"));
    CHECK(cell.params["num_heads"] == 8);  // so that every cell is possible with --world-size 8
    for (const char* length : {"max_seqlen_q", "max_seqlen_kv"})
      CHECK(cell.params[length].get<int>() % 16 == 0);
  }
  CHECK(names.size() == cells.size());
  CHECK(threes.size() == 16);
  CHECK(few == std::map<std::string, int>{
                   {"window", 2}, {"padding", 1}, {"thd", 2}, {"thd with a window and padding", 1}});
  std::vector<std::vector<std::string>> axes = {{"p2p", "all_gather", "a2a", "a2a+p2p"},
                                                {"bshd", "sbhd"},
                                                {"causal", "no_mask"},
                                                {"mha", "gqa", "mqa"},
                                                {"64/64", "128/128", "192/128", "128/64", "256/256"},
                                                {"bf16", "fp16"},
                                                {"W2", "W4"},
                                                {"=", "<", ">"}};
  for (std::size_t i = 0; i < axes.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      for (const auto& a : axes[i])
        for (const auto& b : axes[j]) {
          INFO(a << " with " << b);
          CHECK((met.count({a, b}) == 1 || (a == "W2" && b == "a2a+p2p")));
        }
}

TEST_CASE("filters of one key select any of their values, and filters of different keys must all match") {
  std::vector<Cell> cells = MatrixCells();
  CHECK(Count(cells, {}) == 864);
  CHECK(Count(LoadSuite("matrix"), {{"suite", "matrix"}, {"suite", "own"}, {"suite", "fp8"}}) ==
        LoadSuite("matrix").size());
  CHECK(Count(LoadSuite("matrix"), {{"dtype", "fp8"}}) == 3456);
  CHECK(Count(LoadSuite("matrix"), {{"suite", "own"}, {"row", "flash:cp_2_0"}}) == 0);
  CHECK(Count(cells, {{"cp_comm_type", "p2p"}}) == 216);
  CHECK(Count(cells, {{"cp_comm_type", "p2p"}, {"cp_comm_type", "a2a"}}) == 432);
  CHECK(Count(cells, {{"cp_comm_type", "p2p"}, {"dtype", "bf16"}}) == 108);
  CHECK(Count(cells, {{"world_size", "4"}}) == 216);
  CHECK(Count(cells, {{"essential", "true"}}) == 120);
  CHECK(Count(cells, {{"window_size", "[-1, -1]"}}) == Count(cells, {{"window_size", "[-1,-1]"}}));
  CHECK(Count(cells, {{"window_size", "[-1,-1]"}}) > 0);
  CHECK(Count(cells, {{"head_dim_qk", "256"}}) == 48);
  CHECK(Count(cells, {{"row", "fused:cp_2_0"}}) == 24);
  CHECK(Count(cells, {{"row", "flash:cp_2_0"}}) == 32);
  CHECK(Count(cells, {{"pad_between_seqs", "false"}}) + Count(cells, {{"pad_between_seqs", "true"}}) ==
        Count(cells, {{"qkv_format", "thd"}}));
  CHECK(Count(cells, {{"dtype", "fp8"}}) == 0);
  try {
    Select(cells, {{"dtypo", "bf16"}});
    FAIL("a key that no cell has was accepted");
  } catch (const UsageError& error) {
    CHECK(std::string(error.what()).find("did you mean \"dtype\"?") != std::string::npos);
  }
}

TEST_CASE("shrinking reduces lengths and windows in the same proportion") {
  Json params = {
      {"max_seqlen_q", 4096}, {"max_seqlen_kv", 2048}, {"window_size", {512, 0}}, {"num_heads", 8}};
  CHECK(Shrunk(params, 256) ==
        Json({{"max_seqlen_q", 256}, {"max_seqlen_kv", 128}, {"window_size", {32, 0}}, {"num_heads", 8}}));
  CHECK(Shrunk(params, 3001) ==
        Json({{"max_seqlen_q", 3000}, {"max_seqlen_kv", 1500}, {"window_size", {375, 0}}, {"num_heads", 8}}));
  CHECK(Shrunk(params, 4096) == params);
  CHECK(Shrunk(params, 100, 6)["max_seqlen_q"] == 96);
  CHECK(Shrunk(params, 100, 6)["max_seqlen_kv"] == 48);
  CHECK(Shrunk(params, 1, 8)["max_seqlen_kv"] == 16);  // each rank holds two chunks
  params["window_size"] = {-1, 3};
  CHECK(Shrunk(params, 64)["window_size"] == Json({-1, 1}));
  CHECK(Shrunk({{"max_seqlen_q", 4096}, {"window_size", {512, 256}}}, 64) ==
        Json({{"max_seqlen_q", 64}, {"window_size", {8, 4}}}));  // as many keys as queries
  CHECK(Shrunk(Json::object(), 64) == Json::object());
  // Chunks of mxfp8 have whole blocks of 32 tokens.
  const Json blocks{{"scaling_mode", "mxfp8"}, {"max_seqlen_q", 4096}, {"max_seqlen_kv", 4096}};
  CHECK(Shrunk(blocks, 200)["max_seqlen_q"] == 128);
  CHECK(Shrunk(blocks, 96)["max_seqlen_kv"] == 128);
  CHECK(Shrunk(blocks, 600, 4)["max_seqlen_q"] == 512);
}

TEST_CASE("the own cells have every row with every schedule, and are distinct and valid") {
  std::vector<Cell> cells = OwnCells();
  std::set<std::string> names, params;
  std::map<std::string, std::set<std::string>> schedules;  // by row and format
  std::map<int, std::set<std::string>> worlds;
  std::map<std::string, std::set<std::string>> types;  // by schedule
  for (const Cell& cell : cells) {
    INFO(cell.name);
    const Json& p = cell.params;
    const std::string schedule = p["cp_comm_type"];
    const int heads = p["num_heads"], groups = p["num_gqa_groups"], width = cell.world_size;
    names.insert(cell.name);
    params.insert(p.dump() + std::to_string(width));
    schedules[cell.rows.at(0) + " " + p["qkv_format"].get<std::string>()].insert(schedule);
    worlds[width].insert(schedule);
    types[schedule].insert(p["dtype"]);
    CHECK(heads % groups == 0);
    CHECK((schedule != "a2a" || heads % width == 0));
    CHECK((schedule != "a2a+p2p" || width >= 4));
    CHECK(p["max_seqlen_q"].get<int>() % (2 * width) == 0);
    CHECK(p["max_seqlen_kv"].get<int>() % (2 * width) == 0);
    const bool packed = p["qkv_format"] == "thd";
    CHECK(p.contains("pad_between_seqs") == packed);
    CHECK((!packed || p["attn_mask_type"].get<std::string>().rfind("padding", 0) == 0));
    CHECK((p["attn_bias_type"] == "post_scale_bias" || p["bias_shape"] == "1hss"));
  }
  CHECK(cells.size() >= 250);
  CHECK(names.size() == cells.size());
  CHECK(params.size() == cells.size());
  for (const auto& [row, with] : schedules) {
    INFO(row);
    CHECK(with.size() == 4);
  }
  for (int width : {4, 6, 8}) CHECK(worlds[width].size() == 4);
  for (const auto& [schedule, with] : types) CHECK(with.size() == 2);
  std::vector<Cell> all = LoadSuite("matrix");
  for (const Cell& cell : all) names.insert(cell.name);
  CHECK(names.size() == all.size());
}

TEST_CASE("the own cells have features that the matrix does not have") {
  std::vector<Cell> cells = OwnCells();
  auto count = [&](auto holds) {
    return std::count_if(cells.begin(), cells.end(), [&](const Cell& cell) { return holds(cell.params); });
  };
  auto is = [](const Json& params, const char* key, const Json& value) {
    return params.value(key, Json()) == value;
  };
  CHECK(count([&](const Json& p) { return is(p, "bias_shape", "111s") && is(p, "is_training", true); }) >=
        16);
  CHECK(count([&](const Json& p) { return is(p, "attn_bias_type", "alibi"); }) >= 20);
  CHECK(count([&](const Json& p) { return is(p, "deterministic", true); }) >= 12);
  CHECK(count([&](const Json& p) { return is(p, "num_gqa_groups", 1); }) >= 12);
  CHECK(count([&](const Json& p) { return is(p, "is_training", false); }) >= 12);
  CHECK(count([&](const Json& p) { return p.contains("softmax_scale"); }) >= 4);
  CHECK(count([&](const Json& p) { return is(p, "qkv_format", "thd") && is(p, "batch_size", 6); }) >= 20);
  for (const char* mask : {"padding", "padding_causal", "padding_causal_bottom_right"})
    for (const char* format : {"bshd", "sbhd"})
      for (bool equal : {true, false}) {
        INFO(mask << " " << format << (equal ? " equal" : " unequal"));
        CHECK(count([&](const Json& p) {
                return is(p, "attn_mask_type", mask) && is(p, "qkv_format", format) &&
                       (p["max_seqlen_q"] == p["max_seqlen_kv"]) == equal;
              }) >= 4);
      }
  for (const char* shape : {"1hss", "11ss", "b1ss", "bhss", "111s"}) {
    INFO(shape);
    CHECK(count([&](const Json& p) {
            return is(p, "bias_shape", shape) && is(p, "attn_bias_type", "post_scale_bias") &&
                   is(p, "qkv_format", "thd") && p["num_heads"] != p["num_gqa_groups"];
          }) >= 4);
  }
}

TEST_CASE("every shrunk cell of the matrix is valid, and its lengths and windows keep their relations") {
  for (int longest : {96, 256}) {
    for (const Cell& cell : LoadSuite("matrix")) {
      INFO(cell.name << " to " << longest);
      const Json small = Shrunk(cell.params, longest, cell.world_size);
      const int q = small["max_seqlen_q"], kv = small["max_seqlen_kv"];
      const int was_q = cell.params["max_seqlen_q"], was_kv = cell.params["max_seqlen_kv"];
      const int step = 2 * cell.world_size * (small.value("scaling_mode", "") == "mxfp8" ? 32 : 1);
      CHECK(std::max(q, kv) == std::max(longest / step * step, step));
      CHECK(std::min(q, kv) > 0);
      CHECK(q % step == 0);
      CHECK(kv % step == 0);
      CHECK((q < kv) == (was_q < was_kv));
      CHECK((q > kv) == (was_q > was_kv));
      for (std::size_t side : {0, 1}) {
        const int before = cell.params["window_size"][side], after = small["window_size"][side];
        CHECK((before <= 0 ? after == before : after >= 1 && after < kv));
      }
    }
  }
}

TEST_CASE("cells run by ascending world size, and within one in the suite's order") {
  std::vector<Cell> cells = LoadSuite("matrix");
  std::vector<std::size_t> order = RunOrder(cells);
  REQUIRE(order.size() == cells.size());
  CHECK(std::set<std::size_t>(order.begin(), order.end()).size() == cells.size());
  for (std::size_t i = 1; i < order.size(); ++i) {
    CHECK(cells[order[i - 1]].world_size <= cells[order[i]].world_size);
    if (cells[order[i - 1]].world_size == cells[order[i]].world_size) CHECK(order[i - 1] < order[i]);
  }
}

TEST_CASE("values are read from text and written as text") {
  CHECK(ValueFromText("4096") == 4096);
  CHECK(ValueFromText("[-1, 0]") == Json({-1, 0}));
  CHECK(ValueFromText("true") == true);
  CHECK(ValueFromText("bf16") == "bf16");
  CHECK(ValueFromText("a2a+p2p") == "a2a+p2p");
  CHECK(ValueFromText("") == "");
  CHECK(ValueFromText("\"4\"") == "4");
  CHECK(ValueFromText("8k") == 8192);
  CHECK(ValueFromText("-1k") == -1024);
  CHECK(ValueFromText("\"8k\"") == "8k");
  for (const char* text : {"k", "8K", "8kk", "1.5k", "8 k", "9223372036854775807k"})
    CHECK(ValueFromText(text) == text);
  CHECK(ValuesFromText("8k,[1,2],a", "--param") == std::vector<Json>{8192, {1, 2}, "a"});
  CHECK(ValuesFromText("", "--param") == std::vector<Json>{""});
  CHECK(ValuesFromText("\"\",a", "--param") == std::vector<Json>{"", "a"});
  for (const char* text : {",", "a,", ",a", "a,,b"})
    CHECK_THROWS_AS(ValuesFromText(text, "--param"), UsageError);
  for (const Json& value :
       {Json(4096), Json("bf16"), Json("4096"), Json("true"), Json({-1, 0}), Json(), Json(0.5), Json(""),
        Json("it's \"x\""), Json("two\nlines"), Json("8k"), Json("a,b"), Json("say \"a\", then b")}) {
    CHECK(ValuesFromText(TextFromValue(value), "--param") == std::vector<Json>{value});
    CHECK(TextFromValue(value).find('\n') == std::string::npos);
  }
  CHECK(SplitList("1,[2,3],{\"a\":4,\"b\":5},\"x,y\",") ==
        std::vector<std::string>{"1", "[2,3]", "{\"a\":4,\"b\":5}", "\"x,y\"", ""});
  CHECK(SplitAssignment("a=b=c", "--param") == std::pair<std::string, std::string>("a", "b=c"));
  CHECK_THROWS_AS(SplitAssignment("a", "--param"), UsageError);
  CHECK_THROWS_AS(SplitAssignment("=a", "--param"), UsageError);
}

TEST_CASE("a quoted word is one word for a shell") {
  for (const std::string& word : {std::string("plain"), std::string("with space"), std::string("it's"),
                                  std::string("$HOME `id` \\ \"x\" *"), std::string("window_size=[-1,0]"),
                                  std::string("a;b&c|d"), std::string("new\nline"), std::string("")})
    CHECK(cppool::test::RunChild("printf '%s.' " + cppool::client::ShellQuote(word)).output == word + ".");
  CHECK(cppool::client::ShellQuote("cp_comm_type=a2a+p2p") == "cp_comm_type=a2a+p2p");
}

TEST_CASE("AxesOf returns a cell's value on each axis") {
  using Axes = std::vector<std::pair<std::string, std::string>>;
  Cell cell;
  cell.world_size = 4;
  cell.params = {{"cp_comm_type", "a2a+p2p"},
                 {"qkv_format", "thd"},
                 {"pad_between_seqs", true},
                 {"attn_mask_type", "padding_causal"},
                 {"window_size", {512, 0}},
                 {"attn_bias_type", "post_scale_bias"},
                 {"bias_shape", "b1ss"},
                 {"softmax_type", "learnable"},
                 {"num_heads", 8},
                 {"num_gqa_groups", 2},
                 {"head_dim_qk", 192},
                 {"head_dim_v", 128},
                 {"dtype", "fp16"}};
  CHECK(AxesOf(cell) == Axes{{"schedule", "a2a+p2p"},
                             {"format", "thd padded"},
                             {"mask", "padding_causal"},
                             {"bias", "post_scale_bias b1ss"},
                             {"softmax", "learnable"},
                             {"window", "left"},
                             {"heads", "GQA"},
                             {"head dim", "192/128"},
                             {"dtype", "fp16"},
                             {"world size", "4"}});
  cell.params = {{"dtype", "fp8"}, {"scaling_mode", "current"}, {"fp8_mha", true}, {"fp8_bwd", true}};
  CHECK(AxesOf(cell) == Axes{{"dtype", "fp8"}, {"recipe", "current mha bwd"}, {"world size", "4"}});
  cell.params = {{"dtype", "fp8"}, {"fp8_dpa", true}, {"f16_O", true}};
  CHECK(RecipeOf(cell) == "delayed dpa f16_O");
  cell.params = {{"attn_mask_type", "no_mask"}, {"window_size", {-1, 0}}, {"num_heads", 8}};
  CHECK(AxesOf(cell) == Axes{{"mask", "no_mask"}, {"window", "open"}, {"world size", "4"}});
  cell.params["window_size"] = {3, 0};
  CHECK(AxesOf(cell)[1].second == "left and right");
  cell.params["window_size"] = {-1, 5};
  CHECK(AxesOf(cell)[1].second == "right");
  cell.params = {{"window_size", "wide"}, {"dtype", 16}};  // --param can set any value
  CHECK(AxesOf(cell) == Axes{{"window", "wide"}, {"dtype", "16"}, {"world size", "4"}});
}

TEST_CASE("a command that repeats a run has the options that are not the defaults, each as it is read") {
  using Words = std::vector<std::string>;
  cppool::PoolOptions pool;
  cppool::RunOptions run;
  CHECK(OptionWords(pool, {}, run).empty());
  run.deadline = std::chrono::milliseconds(1500);
  run.perturb = 0;
  run.dump = "d";
  run.inputs = "i";
  run.trace = "t";
  run.kernels = "k.so,n";
  run.fault = cppool::Fault{"stall", 1, "forward/a: b"};
  CHECK(HasOptions(pool, run));
  CHECK(OptionWords(pool, {}, run) == Words{"--deadline", "1.5", "--perturb", "0", "--dump", "d", "--inputs",
                                            "i", "--trace", "t", "--kernels", "k.so,n", "--fault",
                                            "stall:1:forward/a: b"});
  pool.backend = "host";
  pool.devices = {""};
  run = {};
  run.fault = cppool::Fault{"throw"};
  CHECK(OptionWords(pool, {"a.so"}, run) ==
        Words{"--backend", "host", "--devices", "", "--load", "a.so", "--fault", "throw"});
}

TEST_CASE("a command begins with the pool's variables, also with names that a shell does not take") {
  cppool::PoolOptions pool;
  CHECK(Assignments(pool).empty());
  pool.environment = {{"CPPOOL-A", "b c"}, {"CPPOOL_B", "d"}};
  CHECK(cppool::test::RunChild(Assignments(pool) + "printenv CPPOOL-A CPPOOL_B").output == "b c\nd\n");
  pool.environment = {{"-u", "CPPOOL_A"}, {"-i", "e"}};
  CHECK(cppool::test::RunChild(Assignments(pool) + "printenv -- -u -i").output == "CPPOOL_A\ne\n");
  // Those of a pool that runs cases in Python are the user's: a command has no values of them.
  pool.python = "python3";
  pool.environment = {{"-u", "e"}, {"9A", "f"}, {"CPPOOL_A", "g"}};
  CHECK(Assignments(pool) == "env CPPOOL_A=\"${CPPOOL_A?}\" ");
  CHECK(cppool::test::RunChild("CPPOOL_A='h i'; " + Assignments(pool) + "printenv CPPOOL_A").output ==
        "h i\n");
}

TEST_CASE("options of `cppool run` do not say all of a run: the rest is sent to a daemon as it is") {
  const auto has = [](auto set) {
    cppool::PoolOptions pool;
    cppool::RunOptions run;
    set(pool, run);
    return HasOptions(pool, run);
  };
  CHECK(has([](auto& pool, auto& run) {
    pool.arguments = {"--allow-faults"};
    run.fault = cppool::Fault{"stall", 1, "forward"};
    run.case_name = "mine";
    run.load = {"mine.so"};
  }));
  CHECK_FALSE(has([](auto& pool, auto&) { pool.arguments = {"--kernels", "bad.so"}; }));
  CHECK_FALSE(has([](auto&, auto& run) {
    run.fault = cppool::Fault{"throw"};
    run.fault->count = 3;
  }));
  CHECK_FALSE(has([](auto&, auto& run) { run.warmup = 2; }));
  CHECK_FALSE(has([](auto&, auto& run) { run.repeat = 5; }));
  CHECK_FALSE(has([](auto&, auto& run) { run.checks = false; }));
  CHECK_FALSE(has([](auto&, auto& run) { run.sampling.emplace(); }));
  CHECK_FALSE(has([](auto&, auto& run) { run.waits = true; }));
  CHECK_FALSE(has([](auto&, auto& run) { run.profile = true; }));
  CHECK_FALSE(has([](auto&, auto& run) { run.digests = {{"mine.so", "0123456789abcdef"}}; }));
}
