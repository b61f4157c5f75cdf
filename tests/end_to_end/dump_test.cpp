// Dumps and inputs: NumPy confirms dumps, a run on a dump's inputs gives the same bits, and invalid folders
// are refused before anything runs.
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

namespace fs = std::filesystem;

// A Python that has NumPy.
const std::string& Python() {
  static const std::string python = [] {
    for (const char* candidate : {"python3", "/usr/bin/python3"}) {
      if (RunChild(std::string(candidate) + " -c 'import numpy'").exit_code == 0)
        return std::string(candidate);
    }
    return std::string();
  }();
  if (python.empty()) FAIL("there is no Python with NumPy: scripts/setup --tests installs it");
  return python;
}

Child CheckDump(const fs::path& folder) {
  return RunChild(Python() + " '" CPPOOL_CHECK_DUMP "' '" + folder.string() + "'");
}

// Runs Python code that changes `a`, the array of one file of the folder, and saves it.
void Edit(const fs::path& folder, const std::string& file, const std::string& code) {
  const Child output =
      RunChild(Python() + " -c 'import sys, numpy as np\nname = \"" + (folder / file).string() +
               "\"\na = np.load(name)\n" + code + "\nnp.save(name, a)'");
  INFO(output.output);
  REQUIRE(output.exit_code == 0);
}

bool Same(const fs::path& a, const fs::path& b) { return ReadFile(a) == ReadFile(b); }

// Small, with every tensor that has a file.
const Json kRich = {{"max_seqlen_q", 16},
                    {"batch_size", 5},
                    {"num_heads", 4},
                    {"num_gqa_groups", 2},
                    {"qkv_format", "thd"},
                    {"pad_between_seqs", true},
                    {"attn_bias_type", "post_scale_bias"},
                    {"bias_shape", "bhss"},
                    {"softmax_type", "learnable"},
                    {"return_max_logit", true}};

const Json kFp8Large = {{"dtype", "fp8"}, {"batch_size", 2}, {"max_seqlen_q", 128}};

Json Merged(Json params, const Json& more) {
  params.update(more);
  return params;
}

// How many payloads the dump of such a case has.
std::size_t PayloadsOf(const Json& params) {
  if (params.value("dtype", "") != "fp8") return 0;
  const std::string mode = params.value("scaling_mode", "delayed");
  const bool backward = params.value("fp8_bwd", true), mha = params.value("fp8_mha", false);
  if (mode == "mxfp8") return backward ? 8 : 3;
  const bool results = mode == "delayed" || mha;
  const bool out = results || (backward && !params.value("f16_O", false));
  return 3 + (backward ? 1 : 0) + (out ? 1 : 0) + (results && backward ? 3 : 0);
}

void Dump(DaemonProcess& daemon, const Json& params, const fs::path& to, const Json& keys = Json::object()) {
  const Json answer = daemon.Ask(Merged({{"op", "run"}, {"params", params}, {"dump", to.string()}}, keys));
  INFO(answer);
  REQUIRE(answer.at("status") == "passed");
}

}  // namespace

TEST_CASE("NumPy confirms the dumps of runs with every feature") {
  const Json small = {{"max_seqlen_q", 24}, {"num_heads", 4}, {"num_gqa_groups", 2}, {"batch_size", 5}};
  const std::vector<std::pair<int, Json>> cases = {
      {1, {{"dtype", "fp16"}}},
      {2, {{"attn_mask_type", "no_mask"}, {"window_size", {5, 3}}, {"max_seqlen_kv", 48}}},
      {2, {{"attn_mask_type", "causal_bottom_right"}, {"max_seqlen_kv", 16}, {"cp_comm_type", "all_gather"}}},
      {2, {{"window_size", {4, 0}}, {"qkv_format", "sbhd"}, {"cp_comm_type", "a2a"}}},
      {2, {{"head_dim_qk", 192}, {"head_dim_v", 128}, {"num_gqa_groups", 1}, {"return_max_logit", true}}},
      {2, kRich},
      {2, {{"qkv_format", "thd"}, {"attn_mask_type", "no_mask"}, {"softmax_type", "off-by-one"}}},
      {2, {{"qkv_format", "thd"}, {"max_seqlen_kv", 48}, {"attn_mask_type", "padding_causal_bottom_right"}}},
      {2, {{"attn_mask_type", "padding"}, {"attn_bias_type", "alibi"}, {"num_heads", 6}}},
      {2,
       {{"attn_mask_type", "padding_causal"},
        {"qkv_format", "sbhd"},
        {"max_seqlen_kv", 48},
        {"dtype", "fp16"}}},
      {2, {{"attn_bias_type", "alibi"}, {"max_seqlen_kv", 48}, {"attn_mask_type", "causal_bottom_right"}}},
      {2, {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "1hss"}, {"cp_comm_type", "all_gather"}}},
      {2, {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "11ss"}, {"softmax_type", "learnable"}}},
      {2, {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "b1ss"}, {"qkv_format", "thd"}}},
      {2, {{"attn_bias_type", "post_scale_bias"}, {"bias_shape", "111s"}, {"cp_comm_type", "a2a"}}},
      {2, {{"is_training", false}, {"softmax_type", "learnable"}, {"return_max_logit", true}}},
      {4, Merged(kRich, {{"cp_comm_type", "a2a+p2p"}, {"bias_shape", "1hss"}, {"max_seqlen_q", 24}})},
      {2, {{"dtype", "fp8"}, {"fp8_mha", true}, {"attn_bias_type", "alibi"}, {"return_max_logit", true}}},
      {2,
       {{"dtype", "fp8"},
        {"fp8_dpa", true},
        {"scaling_mode", "current"},
        {"fp8_bwd", false},
        {"cp_comm_type", "a2a"}}},
      {2, Merged(kRich, {{"dtype", "fp8"}, {"fp8_dpa", true}, {"scaling_mode", "mxfp8"}})},
      {2, {{"dtype", "fp8"}, {"fp8_dpa", true}, {"scaling_mode", "current"}, {"qkv_format", "sbhd"}}},
      {2, {{"dtype", "fp8"}, {"fp8_mha", true}, {"fp8_bwd", false}, {"qkv_format", "thd"}}},
      {2, {{"dtype", "fp8"}, {"fp8_mha", true}, {"scaling_mode", "current"}, {"fp8_bwd", false}}},
      {2,
       Merged(kRich, {{"dtype", "fp8"}, {"fp8_dpa", true}, {"scaling_mode", "mxfp8"}, {"fp8_bwd", false}})},
      {2,
       {{"dtype", "fp8"},
        {"fp8_dpa", true},
        {"scaling_mode", "mxfp8"},
        {"qkv_format", "sbhd"},
        {"max_seqlen_q", 128},
        {"batch_size", 2}}},
      // From 65536 elements on, statistics are checked, too.
      {2, Merged(kFp8Large, {{"scaling_mode", "current"}, {"fp8_mha", true}, {"f16_O", true}})},
      {2, Merged(kFp8Large, {{"scaling_mode", "mxfp8"}, {"fp8_dpa", true}, {"cp_comm_type", "all_gather"}})},
  };
  const TemporaryFolder folder;
  std::vector<std::pair<fs::path, std::size_t>> dumps;
  for (const int world_size : {1, 2, 4}) {
    DaemonProcess daemon(Host(world_size));
    for (const auto& [world, params] : cases) {
      if (world != world_size) continue;
      dumps.emplace_back(folder / std::to_string(dumps.size()), 0);
      const Json answer = daemon.Ask(
          {{"op", "run"}, {"params", Merged(small, params)}, {"dump", dumps.back().first.string()}});
      INFO(answer);
      REQUIRE(answer.at("status") == "passed");
      // The dump has every tensor that rank 0 checked against no_cp, of both runs.
      for (const Json& check : answer.at("checks"))
        dumps.back().second += check.at("rank") == 0 && check.at("against") == "no_cp" ? 2 : 0;
      dumps.back().second += PayloadsOf(params);
    }
  }
  REQUIRE(dumps.size() == cases.size());
  for (const auto& [dump, tensors] : dumps) {
    const Child output = CheckDump(dump);
    INFO(ReadFile(dump / "index.json") << output.output);
    CHECK(output.exit_code == 0);
    CHECK(Has(output.output, "\n" + std::to_string(tensors) + " passed, 0 failed\n"));
  }
}

TEST_CASE("check_dump confirms fp8 dumps that NumPy made, and sees each planted error in them") {
  const TemporaryFolder folder;
  const Child output = RunChild(Python() + " '" CPPOOL_FP8_DUMP_TEST "' '" CPPOOL_CHECK_DUMP "' '" +
                                folder.path().string() + "'");
  INFO(output.output);
  CHECK(output.exit_code == 0);
  CHECK(output.output == "0 of 22 wrong\n");
}

TEST_CASE("diff finds the element of a dump that is off, and draws the errors") {
  const TemporaryFolder folder;
  const fs::path dump = folder / "dump";
  DaemonProcess daemon(Host(2));
  Dump(daemon, {{"max_seqlen_q", 64}, {"num_heads", 4}, {"batch_size", 2}, {"attn_mask_type", "causal"}},
       dump);
  const auto diff = [&] { return RunChild("'" CPPOOL_COMMAND "' diff '" + dump.string() + "'"); };
  const Child same = diff();
  INFO(same.output);
  CHECK(same.exit_code == 0);
  CHECK_FALSE(Has(same.output, "are out"));
  const std::string drawn = ReadFile(dump / "diff.svg");
  CHECK((Has(drawn, "out against oracle") && Has(drawn, "dk against no_cp") && !Has(drawn, "rgb(255")));
  // Nothing of so small a case is left out by the oracle.
  Edit(dump, "out_oracle.npy", "assert not np.isnan(a).any()");

  Edit(dump, "out.npy", "a[1, 17, 3, 5] += 4");
  const Child off = diff();
  INFO(off.output);
  CHECK(off.exit_code == 1);
  CHECK(Has(off.output, "worst at sequence 1, head 3, token 17, dim 5: got "));
  CHECK(Has(off.output, "; 1 element is out\n"));
  CHECK(Has(ReadFile(dump / "diff.svg"), "rgb(255"));

  Edit(dump, "out_oracle.npy", "a[1] = np.nan");  // not computed
  CHECK_FALSE(Has(diff().output, "out against oracle: max_abs_err 4"));
  Edit(dump, "dq.npy", "a = a[:, :8]");
  const Child shape = diff();
  CHECK(shape.exit_code == 2);
  CHECK(Has(shape.output, "dq.npy has the shape (2, 8, 4, 64), and dq_oracle.npy (2, 64, 4, 64)"));
  CHECK(Has(RunChild("'" CPPOOL_COMMAND "' diff /nowhere").output, "there is no folder /nowhere"));
  fs::remove(dump / "index.json");
  CHECK(Has(diff().output, "is not that of a dump: give a folder that `cppool run --dump` has written"));
}

TEST_CASE("a suite keeps dump, trace and log of each failed cell") {
  const TemporaryFolder folder;
  const fs::path kept = folder / "kept", kernel = folder / "kernel.c";
  std::string source = ReadFile(CPPOOL_NAIVE_KERNEL);
  const std::string first = "diagonal - c->window_left : 0";
  REQUIRE(source.find(first) != std::string::npos);
  source.replace(source.find(first), first.size(), "diagonal - c->window_left + 1 : 0");
  std::ofstream(kernel) << source;
  const Child ran = RunChild("'" CPPOOL_COMMAND
                             "' run --backend host --suite smoke --filter world_size=2 "
                             "--filter 'name=mha_128*' --max-seqlen 96 --kernels '" +
                             kernel.string() + "' --failures '" + kept.string() + "'");
  INFO(ran.output);
  CHECK(ran.exit_code == 1);
  CHECK(Has(ran.output, "\n0 passed, 1 failed, 1 skipped\n"));
  const fs::path cell = kept / "mha_128_64-bf16-sbhd-p2p-W2";
  CHECK(Has(ran.output, "  again: failed; in " + cell.string() + "\n"));
  CHECK(std::distance(fs::directory_iterator(kept), fs::directory_iterator()) == 1);
  CHECK(Has(ReadFile(cell / "log.txt"), "out against oracle"));
  CHECK_FALSE(Json::parse(ReadFile(cell / "trace.json")).at("traceEvents").empty());
  const Child diff = RunChild("'" CPPOOL_COMMAND "' diff '" + cell.string() + "'");
  CHECK(diff.exit_code == 1);
  CHECK(Has(diff.output, "out against oracle"));
}

TEST_CASE("a falsified dump fails its check") {
  const TemporaryFolder folder;
  DaemonProcess daemon(Host(2));
  Dump(daemon, kRich, folder / "good");
  const Json index = Json::parse(ReadFile(folder / "good" / "index.json"));
  CHECK(index.at("world_size") == 2);
  CHECK(index.at("backend") == "host");
  CHECK(index.at("kernels").at("family") == "host");
  CHECK(index.at("parameters").at("num_heads") == 4);
  CHECK(index.at("files").at("dq.npy").at("axes") == Json{"token", "head", "dim"});
  CHECK(index.at("files").at("dq_no_cp.npy").at("run") == "no_cp");
  CHECK(index.at("files").at("bias.npy").at("shape") == Json{5, 4, 16, 16});
  const auto places = index.at("cu_seqlens_q_padded").get<std::vector<int>>();
  const auto tokens = index.at("cu_seqlens_q").get<std::vector<int>>();
  REQUIRE(places.back() > tokens.back());
  // A place without a token: some edits below write to it.
  std::size_t padded = 0;
  while (tokens[padded + 1] - tokens[padded] == places[padded + 1] - places[padded]) ++padded;
  const std::string padding = "a[" + std::to_string(places[padded + 1] - 1) + "].flat[0]";
  const std::vector<std::array<std::string, 3>> lies = {
      {"out.npy", "a.flat[np.abs(a).argmax()] *= 1.1", "too far"},
      {"out_no_cp.npy", "a.flat[np.abs(a).argmax()] *= 1.1", "too far"},
      {"dq.npy", "a[:] = 0", "too far"},
      {"dk.npy", "a.flat[np.abs(a).argmax()] = np.nan", "too far"},
      {"dv.npy", "a *= -1", "too far"},
      {"lse.npy", "a.flat[np.abs(a).argmax()] += 1e-2", "too far"},
      {"dbias.npy", "a[0] = a[1]", "too far"},
      {"d_softmax_offset.npy", "a[:] = 0", "too far"},
      {"max_logit.npy", "a[0] += 1e-2", "too far"},
      {"out.npy", padding + " = 1e-30", "padding"},
      {"dk_no_cp.npy", padding + " = 1e-30", "padding"},
      {"lse.npy", padding + " = -np.inf", "padding"},
  };
  for (const auto& [file, lie, reason] : lies) {
    fs::remove_all(folder / "bad");
    fs::copy(folder / "good", folder / "bad");
    Edit(folder / "bad", file, lie);
    const Child output = CheckDump(folder / "bad");
    INFO(file << ": " << lie << "\n" << output.output);
    CHECK(output.exit_code == 1);
    CHECK(Has(output.output, "15 passed, 1 failed"));
    CHECK(Has(output.output, "FAILED " + file.substr(0, file.size() - 4)));
    CHECK(Has(output.output, reason));
  }
  fs::remove_all(folder / "bad");
  fs::copy(folder / "good", folder / "bad");
  fs::remove(folder / "bad" / "dv.npy");
  CHECK(CheckDump(folder / "bad").exit_code == 2);
  CHECK(CheckDump(folder / "nothing").exit_code == 2);
}

TEST_CASE("a dump can be a run's inputs, and the run gives the same bits") {
  const TemporaryFolder folder;
  for (const Json& params : {kRich, Json{{"max_seqlen_q", 16},
                                         {"qkv_format", "sbhd"},
                                         {"attn_mask_type", "padding"},
                                         {"dtype", "fp16"}}}) {
    DaemonProcess daemon(Host(2));
    Dump(daemon, params, folder / "first");
    // With another seed, tensors that are not read from the files would differ. The lengths depend on the
    // seed too, so they are given.
    const Json index = Json::parse(ReadFile(folder / "first" / "index.json"));
    Json again = Merged(params, {{"seed", 99}, {"cu_seqlens_q", index.at("cu_seqlens_q")}});
    if (params.contains("pad_between_seqs")) again["cu_seqlens_q_padded"] = index.at("cu_seqlens_q_padded");
    Dump(daemon, again, folder / "second", {{"inputs", (folder / "first").string()}});
    // A wider type has the same values.
    Edit(folder / "second", "q.npy", "a = a.astype(np.float64)");
    Dump(daemon, again, folder / "third", {{"inputs", (folder / "second").string()}, {"checks", false}});
    for (const auto& [file, about] : index.at("files").items()) {
      INFO(file);
      CHECK(fs::file_size(folder / "first" / file) > 128);
      if (file != "q.npy") CHECK(Same(folder / "first" / file, folder / "second" / file));
      if (about.at("run") == "cp") {
        CHECK(Same(folder / "first" / file, folder / "third" / file));
      } else {  // without checks there is no reference
        CHECK_FALSE(fs::exists(folder / "third" / file));
      }
    }
    for (const char* name : {"first", "second", "third"}) fs::remove_all(folder / name);
  }
}

TEST_CASE("changed inputs change the results") {
  const TemporaryFolder folder;
  DaemonProcess daemon(Host(2));
  const Json params = {{"max_seqlen_q", 16}, {"num_heads", 2}};
  Dump(daemon, params, folder / "first");
  for (const char* file : {"q.npy", "k.npy", "v.npy", "dout.npy"}) {
    fs::remove_all(folder / "inputs");
    fs::copy(folder / "first", folder / "inputs");
    Edit(folder / "inputs", file, "a[0, 3, 0, 5] = 1.5");
    Dump(daemon, params, folder / "second", {{"inputs", (folder / "inputs").string()}});
    INFO(file);
    CHECK(Same(folder / "inputs" / file, folder / "second" / file));
    CHECK_FALSE(Same(folder / "first" / "dq.npy", folder / "second" / "dq.npy"));
    CHECK(CheckDump(folder / "second").exit_code == 0);
  }
}

TEST_CASE("invalid inputs are refused before anything runs, and the error names the file") {
  const TemporaryFolder folder;
  DaemonProcess daemon(Host(2));
  Dump(daemon, kRich, folder / "good");
  Json fixed = kRich;
  for (const char* key : {"cu_seqlens_q", "cu_seqlens_q_padded"})
    fixed[key] = Json::parse(ReadFile(folder / "good" / "index.json")).at(key);
  const auto refusal = [&](const Json& params, const std::string& inputs) {
    std::string text;
    for (const char* op : {"validate", "run"}) {
      const Json answer = daemon.Ask(
          {{"op", op}, {"params", params}, {"inputs", inputs}, {"dump", (folder / "dump").string()}});
      INFO(answer);
      CHECK(answer.at("status") == "error");
      CHECK(answer.at("failure").at("kind") == "invalid_request");
      CHECK_FALSE(answer.contains("fatal"));
      CHECK(answer.at("ranks").empty());
      text = answer.at("error").get<std::string>();
      CHECK(text.rfind("inputs: ", 0) == 0);
    }
    CHECK_FALSE(fs::exists(folder / "dump"));
    return text;
  };
  struct Bad {
    std::string file, code, part;
  };
  const std::vector<Bad> edits = {
      {"q.npy", "a = a[:-1]", "has shape (79, 4, 64) and must have (80, 4, 64) (token, head, dim)"},
      {"k.npy", "a = a.reshape(80, 1, 2, 64)", "has shape (80, 1, 2, 64)"},
      {"dout.npy", "a = np.asfortranarray(a)", "Fortran order"},
      {"q.npy", "a[1, 1, 1] = np.nan", "is NaN"},
      {"k.npy", "a[1, 1, 1] = -np.inf", "is an infinity"},
      {"v.npy", "a[0, 0, 3] = 3.4e38", "element 3 is 3.4e+38, too large for bf16"},
      {"bias.npy", "a = a[:1]", "(1, 4, 16, 16) and must have (5, 4, 16, 16) (batch, head, query, key)"},
      {"softmax_offset.npy", "a = a.astype(np.float64); a[0] = 1e300", "too large for fp32"},
  };
  for (const Bad& bad : edits) {
    fs::remove_all(folder / "bad");
    fs::copy(folder / "good", folder / "bad");
    Edit(folder / "bad", bad.file, bad.code);
    const std::string text = refusal(fixed, (folder / "bad").string());
    INFO(bad.file << ": " << bad.code << " -> " << text);
    CHECK(Has(text, bad.file));
    CHECK(Has(text, bad.part));
  }
  fs::remove_all(folder / "bad");
  fs::copy(folder / "good", folder / "bad");
  fs::resize_file(folder / "bad" / "dout.npy", 1000);
  CHECK(Has(refusal(fixed, (folder / "bad").string()), "dout.npy: is truncated"));
  fs::copy(folder / "good", folder / "bad",
           fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  for (const char* file : {"softmax_offset.npy", "bias.npy", "dout.npy", "q.npy"}) {
    fs::remove(folder / "bad" / file);
    CHECK(Has(refusal(fixed, (folder / "bad").string()), std::string(file) + ": cannot be opened"));
  }
  CHECK(Has(refusal(fixed, (folder / "nowhere").string()), "there is no folder"));
  CHECK(Has(refusal(fixed, (folder / "good" / "q.npy").string()), "there is no folder"));
  // fp16 has a smaller range than bf16.
  fs::copy(folder / "good", folder / "large");
  Edit(folder / "large", "q.npy", "a[0, 0, 0] = 70000");
  CHECK(Has(refusal(Merged(fixed, {{"dtype", "fp16"}}), (folder / "large").string()), "too large for fp16"));
  CHECK(daemon.Ask({{"op", "run"}, {"params", fixed}, {"inputs", (folder / "large").string()}}).at("ok") ==
        true);
}

TEST_CASE(
    "inputs from a dump with other sequences are refused, and a dump removes the files of an earlier one") {
  const TemporaryFolder folder;
  DaemonProcess daemon(Host(2));
  Json params = {{"max_seqlen_q", 32},       {"num_heads", 2}, {"qkv_format", "thd"},
                 {"pad_between_seqs", true}, {"seed", 5},      {"softmax_type", "learnable"}};
  Dump(daemon, params, folder / "one");
  Json request = {{"op", "run"}, {"params", params}, {"inputs", (folder / "one").string()}};
  CHECK(daemon.Ask(request).at("ok") == true);
  request["params"]["seed"] = 6;
  for (const char* op : {"run", "validate"}) {
    request["op"] = op;
    const Json answer = daemon.Ask(request);
    INFO(answer);
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK(Has(answer.at("error"), "index.json: the tensors were dumped with cu_seqlens_"));
  }
  // The dump's own sequences are accepted.
  const Json index = Json::parse(std::ifstream(folder / "one" / "index.json"));
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"})
    request["params"][name] = index.at(name);
  request["op"] = "run";
  CHECK(daemon.Ask(request).at("ok") == true);

  std::ofstream(folder / "one" / "mine.npy") << "x";
  params["softmax_type"] = "vanilla";
  Dump(daemon, params, folder / "one");
  CHECK_FALSE(fs::exists(folder / "one" / "softmax_offset.npy"));
  CHECK_FALSE(fs::exists(folder / "one" / "d_softmax_offset.npy"));
  CHECK(fs::exists(folder / "one" / "mine.npy"));
}

TEST_CASE("a dump to an unusable folder is refused before anything runs, and validate leaves no folder") {
  const TemporaryFolder folder;
  DaemonProcess daemon(Host(2));
  const Json params = {{"max_seqlen_q", 16}, {"num_heads", 2}};
  std::ofstream(folder / "file") << "x";
  Dump(daemon, params, folder / "inputs");
  fs::create_directory_symlink(folder / "inputs", folder / "link");
  fs::create_directory(folder / "fifo");
  REQUIRE(mkfifo((folder / "fifo" / "q.npy").c_str(), 0600) == 0);
  fs::create_directories(folder / "taken" / "index.json");
  for (const char* name : {"linked", "linked index", "project", "odd project"})
    fs::create_directory(folder / name);
  fs::create_symlink(folder / "file", folder / "linked" / "dk.npy");
  fs::create_symlink(folder / "nowhere", folder / "linked index" / "index.json");
  std::ofstream(folder / "project" / "index.json") << R"({"files": {"a.npy": {}}, "name": "mine"})";
  std::ofstream(folder / "odd project" / "index.json") << "[1, 2";
  const std::vector<std::pair<std::string, std::string>> bad = {
      {(folder / "file").string(), "cannot be written to"},
      {(folder / "file" / "below").string(), "cannot be written to"},
      {"/proc/cppool/dump", "cannot be written to"},
      {(folder / "fifo").string(), "q.npy exists and is not a file"},
      {(folder / "taken").string(), "index.json exists and is not a file"},
      {(folder / "linked").string(), "dk.npy is a symbolic link, through which nothing is written"},
      {(folder / "linked index").string(), "index.json is a symbolic link"},
      {(folder / "project").string(), "index.json is not that of a dump"},
      {(folder / "odd project").string(), "index.json is not that of a dump"},
      {(folder / "inputs").string(), "is the folder of inputs"},
      {(folder / "link" / ".." / "link").string(), "is the folder of inputs"},
  };
  for (const auto& [dump, part] : bad) {
    const Json answer = daemon.Ask(
        {{"op", "run"}, {"params", params}, {"inputs", (folder / "inputs").string()}, {"dump", dump}});
    INFO(answer);
    CHECK(answer.at("failure").at("kind") == "invalid_request");
    CHECK(answer.at("error").get<std::string>().rfind("dump: ", 0) == 0);
    CHECK(Has(answer.at("error").get<std::string>(), part));
    CHECK(answer.at("ranks").empty());
    // The order of checks: what is not supported comes after what is wrong.
    const Json unsupported = daemon.Ask({{"op", "run"},
                                         {"params", Merged(params, {{"transfers", "peer"}})},
                                         {"inputs", (folder / "inputs").string()},
                                         {"dump", dump}});
    CHECK(unsupported.at("error") == answer.at("error"));
  }
  CHECK_FALSE(fs::exists(folder / "nowhere"));
  CHECK(fs::file_size(folder / "file") == 1);
  const std::string deep = (folder / "a" / "b" / "c").string();
  CHECK(daemon.Ask({{"op", "validate"}, {"params", params}, {"dump", deep}}) ==
        Json{{"ok", true}, {"runs", true}});
  CHECK_FALSE(fs::exists(folder / "a"));
  Dump(daemon, params, deep);
  CHECK(fs::exists(folder / "a" / "b" / "c" / "index.json"));
}

TEST_CASE(
    "of two dumps at once into one folder the second is refused, and a file's other names stay as they are") {
  const TemporaryFolder folder;
  const Json params = {{"max_seqlen_q", 16}, {"num_heads", 2}};
  DaemonProcess daemon(Host(2)), other(Host(2, {"--allow-faults"}));
  const std::string dump = (folder / "dump").string();
  Dump(daemon, params, dump);
  // The other daemon's rank 1 stalls while its rank 0 has begun to dump.
  const Json stalls = {{"op", "run"},
                       {"params", params},
                       {"dump", dump},
                       {"deadline_ms", 60000},
                       {"fault", {{"kind", "stall_host"}, {"rank", 1}}}};
  fs::create_hard_link(folder / "dump" / "q.npy", folder / "kept.npy");
  const std::string before = ReadFile(folder / "kept.npy");
  other.Send(stalls.dump());
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (fs::exists(folder / "dump" / "index.json") && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  REQUIRE_FALSE(fs::exists(folder / "dump" / "index.json"));
  const Json refused = daemon.Ask({{"op", "run"}, {"params", params}, {"dump", dump}});
  INFO(refused);
  CHECK(refused.at("failure").at("kind") == "invalid_request");
  CHECK(Has(refused.at("error"), "another run is writing a dump into it"));
  CHECK_FALSE(refused.contains("fatal"));
  kill(other.pid(), SIGKILL);
  CHECK(other.Wait() == 1000 + SIGKILL);
  Dump(daemon, params, dump);
  CHECK(ReadFile(folder / "kept.npy") == before);
}

TEST_CASE("random delays do not change results, whatever their seed") {
  DaemonProcess daemon(Host(4));
  Json digest;
  for (const Json& keys : std::vector<Json>{
           Json::object(), {{"perturb", 1}}, {{"perturb", 2}}, {{"perturb", 9223372036854775807}}}) {
    const Json params = Merged(kRich, {{"deterministic", true}, {"max_seqlen_q", 32}});
    const Json answer = daemon.Ask(Merged({{"op", "run"}, {"params", params}}, keys));
    INFO(answer);
    CHECK(answer.at("status") == "passed");
    const Json mine = answer.at("ranks").at(0).at("digest");
    CHECK(mine.get<std::string>().size() == 16);
    if (digest.is_null()) digest = mine;
    CHECK(mine == digest);
  }
}

}  // namespace cppool::test
