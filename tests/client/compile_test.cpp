// Sources as libraries: how the compiler is found and called, what is kept, and the error when it does not
// work.
#include <cppool/compile.h>
#include <cppool/pool.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/client/compile_support.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;

PoolOptions HostPool() {
  PoolOptions options;
  options.world_size = 2;
  options.backend = "host";
  return options;
}

std::string DocOfMine(Pool& pool, const std::string& library) {
  const Json list = pool.List({library});
  for (const Json& entry : list.at("cases"))
    if (entry.at("name") == "mine") return entry.at("doc");
  return "";
}

// The objects that `cppool ... --json` prints, without the summary.
std::vector<Json> JsonLines(const std::string& output) {
  std::istringstream text(output);
  std::vector<Json> objects;
  for (std::string line; std::getline(text, line);)
    if (line.starts_with("{")) objects.push_back(Json::parse(line));
  if (!objects.empty()) objects.pop_back();
  return objects;
}

// An nvcc that is not: keeps its arguments in a file and makes an empty library.
constexpr const char* kFakeNvcc = R"(if [ "$1" = --version ]; then echo fake; exit 0; fi
echo "$@" > "$(dirname "$0")/arguments"
while [ $# -gt 0 ]; do
  case "$1" in -o) : > "$2";; -MF) echo "x: y" | sed 's/ y//' > "$2";; esac
  shift
done
)";

}  // namespace

TEST_CASE("a source in C++ and one in C become libraries that a daemon runs") {
  for (const char* name : {"mine.cpp", "mine.c"}) {
    const Sources sources(name);
    const Compiled compiled = Compile(sources.folder.File(name));
    INFO(compiled.command << "\n" << compiled.output);
    CHECK_FALSE(compiled.cached);
    CHECK(Has(compiled.library, sources.folder.File("cache/compiled/mine-")));
    CHECK(Has(compiled.command, sources.folder.File(name)));
    Pool pool(HostPool());
    RunOptions run;
    run.case_name = "mine";
    run.load = {compiled.library};
    CHECK(pool.Run({}, run).status == Status::kPassed);
    CHECK(DocOfMine(pool, compiled.library) == "version 1");
  }
}

TEST_CASE(
    "a library is compiled again when the source, an included file or the command has changed, and only "
    "then") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.cpp");
  std::string command;
  CompileOptions options;
  options.on_command = [&](std::string_view text) { command = text; };
  const Compiled first = Compile(source, options);
  CHECK(Has(command, " -o "));
  CHECK(std::find(first.included.begin(), first.included.end(), sources.folder.File("version.h")) !=
        first.included.end());
  command.clear();
  const Compiled again = Compile(source, options);
  CHECK(again.cached);
  CHECK(again.library == first.library);
  CHECK(again.included == first.included);
  CHECK(command.empty());
  sources.SetVersion("version 2");
  const Compiled changed = Compile(source, options);
  CHECK_FALSE(changed.cached);
  CHECK(changed.library != first.library);
  sources.SetVersion("version 1");
  CHECK(Compile(source, options).cached);
  CHECK(Compile(source, options).library == first.library);
  {
    const Environment flags("CXXFLAGS", "-DOTHER -Wall");
    const Compiled other = Compile(source, options);
    CHECK_FALSE(other.cached);
    CHECK(Has(command, " -DOTHER -Wall "));
  }
  Write(source, std::string(kCase) + "\n#warning look here\n");
  CHECK(Has(Compile(source, options).output, "look here"));
  fs::remove(sources.folder / "version.h");
  CHECK(Has(Refusal([&] { Compile(source, options); }), "version.h"));
}

TEST_CASE("two versions of a library have static variables of their own") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.cpp");
  std::string text = kCase;
  text.replace(text.find("VERSION, NULL"), 7, "Version()");
  Write(source,
        "#include \"version.h\"\ninline const char* Version() {\n  static const char* version = VERSION;\n"
        "  return version;\n}\n" +
            text);
  Pool pool(HostPool());
  CHECK(DocOfMine(pool, Compile(source).library) == "version 1");
  sources.SetVersion("version 2");
  CHECK(DocOfMine(pool, Compile(source).library) == "version 2");
}

TEST_CASE(
    "what does not compile is reported in the compiler's words, and what cannot be started with what to do") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.cpp");
  CHECK(Has(Refusal([&] { Compile(sources.folder.File("none.cpp")); }), "none.cpp: there is no such file"));
  CHECK(Has(Refusal([&] { Compile(sources.folder.File("mine.py")); }),
            "mine.py: is no source: its name ends with .cu"));
  Write(source, "int main( {\n");
  const std::string refusal = Refusal([&] { Compile(source); });
  CHECK(Has(refusal, source + ": does not compile: "));
  CHECK(Has(refusal, "mine.cpp:1:"));
  CHECK(fs::is_empty(sources.folder / "cache/compiled"));
  {
    const Environment none("CXX", "/nowhere/c++");
    CHECK(Refusal([&] { Compile(source); }) == "CXX: there is no program /nowhere/c++");
  }
  {
    const Environment path("PATH", sources.folder.path().string());
    CHECK(Refusal([&] { Compile(source); }) ==
          "there is no compiler (c++, g++, clang++): install one, or set CXX to its path");
  }
  WriteProgram(sources.folder / "full",
               "[ \"$1\" = --version ] && exit 0\necho 'ld: final link failed: No space left on device' "
               ">&2\nexit 1\n");
  {
    const Environment full("CXX", sources.folder.File("full"));
    CHECK(Has(Refusal([&] { Compile(source); }), "A disk is full: free space on that of " +
                                                     fs::temp_directory_path().string() +
                                                     ", or set TMPDIR to another folder"));
  }
  WriteProgram(sources.folder / "slow", "[ \"$1\" = --version ] && exit 0\nexec sleep 1000\n");
  const Environment slow("CXX", sources.folder.File("slow"));
  CompileOptions options;
  options.limit = 300ms;
  CHECK(Has(Refusal([&] { Compile(source, options); }), "slow did not end within "));
  const Environment full("CPPOOL_CACHE", source);
  CHECK(Has(Refusal([&] { Compile(source); }), "CPPOOL_CACHE: " + source));
}

TEST_CASE("nvcc is found where its variables say, and compiles for the daemon's GPUs") {
  const Sources sources;
  const TemporaryFolder& folder = sources.folder;
  const std::string source = folder.File("mine.cu");
  Write(source, "");
  CompileOptions options;
  options.capabilities = CapabilitiesOf(
      {{"devices",
        {{{"capability", "9.0"}}, {{"capability", "8.0"}}, {{"capability", "9.0"}}, {{"capability", ""}}}}});
  CHECK(options.capabilities == std::vector<std::string>{"9.0", "8.0"});
  const auto install = [&](const std::string& place) {
    fs::create_directories(folder / place);
    WriteProgram(folder / (place + "/nvcc"), kFakeNvcc);
  };
  const auto called = [&](const std::string& place) {
    Write(source, place);  // else it is cached
    Compile(source, options);
    return ReadFile(folder.File(place + "/arguments"));
  };
  for (const char* place : {"variable", "home/bin", "path/bin", "search"}) install(place);
  const Environment search("PATH", folder.File("search") + ":" + std::getenv("PATH"));
  const Environment no_home("CUDA_HOME", ""), no_path("CUDA_PATH", "");
  const std::string arguments = called("search");
  CHECK(Has(arguments, "-gencode=arch=compute_90a,code=sm_90a -gencode=arch=compute_80,code=sm_80"));
  CHECK(Has(arguments, "-shared "));
  CHECK(Has(arguments, "/mine-copy.cu -o "));
  const Environment path("CUDA_PATH", folder.File("path"));
  CHECK_FALSE(called("path/bin").empty());
  const Environment home("CUDA_HOME", folder.File("home"));
  CHECK_FALSE(called("home/bin").empty());
  const Environment variable("CUDACXX", folder.File("variable/nvcc") + " -one --two");
  const Environment flags("CUDAFLAGS", "-three");
  CHECK(Has(called("variable"), "-one --two "));
  CHECK(Has(ReadFile(folder.File("variable/arguments")), " -three "));
}

TEST_CASE(
    "a run and its diagnosis use the library of its first answer, in every daemon, when another one is built "
    "meanwhile") {
  const Sources sources;
  // The other one fails where this one passes, and passes where this one ends the daemon.
  const std::string other = Replaced(Replaced(CaseWithStage(), "abort();", ";"), "0, 0, 0, 1, 0};",
                                     "0, 0, 0, c->integer(c, \"n\") == 2, 0};");
  const std::string library = Rebuilt(sources, CaseWithStage(), kRun, other);
  Write(sources.folder / "suite.json",
        R"({"case": "mine", "cells": [{"world_size": [1, 2], "product": {"n": [1, 2, 3]}}]})");
  const Child run = RunChild("'" CPPOOL_COMMAND "' run --backend host --json --diagnose --suite '" +
                             sources.folder.File("suite.json") + "' --load '" + library + "'");
  INFO(run.output);
  CHECK(run.exit_code == 1);
  CHECK_FALSE(fs::exists(library + ".next"));
  const std::vector<Json> cells = JsonLines(run.output);
  REQUIRE(cells.size() == 6);
  for (const Json& cell : cells) {
    INFO(cell.dump());
    if (cell["params"]["n"] == 2) {
      CHECK(cell["verdict"]["kind"] == "bug");
      continue;
    }
    CHECK(cell["status"] == "passed");
    CHECK(cell["answer"]["libraries"] == cells[0]["answer"]["libraries"]);
    CHECK(cell["answer"]["libraries"][0]["file"] == library);
  }
}

TEST_CASE("a bench uses the libraries of its first answers, of cases and of kernels") {
  const Sources sources;
  const std::string bench = "'" CPPOOL_COMMAND "' bench --json --backend host --warmup 0 --repeat 1 ";
  std::string library = Rebuilt(sources, CaseWithStage(), kRun, Failing(CaseWithStage()));
  const Child cases = RunChild(bench + "--world-size 1,2 --case mine --param n=1,3 --load '" + library + "'");
  INFO(cases.output);
  CHECK(cases.exit_code == 0);
  CHECK_FALSE(fs::exists(library + ".next"));
  CHECK(JsonLines(cases.output).size() == 4);

  const std::string naive = ReadFile(CPPOOL_NAIVE_KERNEL);
  library = Rebuilt(
      sources, naive,
      "const cppool_attention_call* c = plan;\n  float* p = workspace; /* [keys] */\n  int64_t first, end;",
      naive);
  const Child kernels =
      RunChild(bench + "--world-size 1 --param max_seqlen_q=16,32 --param num_heads=2 --kernels '" + library +
               ",cppool'");
  INFO(kernels.output);
  CHECK(kernels.exit_code == 0);
  CHECK_FALSE(fs::exists(library + ".next"));
  const std::vector<Json> rows = JsonLines(kernels.output);
  REQUIRE(rows.size() == 4);
  CHECK(rows[0]["ran"]["file"] == library);
  CHECK(rows[0]["ran"]["digest"] == rows[2]["ran"]["digest"]);
}

TEST_CASE("a first answer that skips its cell decides which content of a library a run uses, too") {
  const Sources sources;
  const std::string naive = ReadFile(CPPOOL_NAIVE_KERNEL);
  const std::string library =
      Rebuilt(sources, naive, "Supports(const cppool_attention_call* c, char* why, size_t size) {", naive);
  Write(
      sources.folder / "suite.json",
      R"({"cells": [{"world_size": 1, "product": {"dtype": ["fp16", "bf16"], "max_seqlen_q": [16], "num_heads": [2]}}]})");
  const Child run = RunChild("'" CPPOOL_COMMAND "' run --backend host --json --suite '" +
                             sources.folder.File("suite.json") + "' --kernels '" + library + "'");
  INFO(run.output);
  CHECK_FALSE(fs::exists(library + ".next"));
  const std::vector<Json> cells = JsonLines(run.output);
  REQUIRE(cells.size() == 2);
  CHECK(cells[0]["status"] == "skipped");
  CHECK(cells[1]["status"] == "passed");
  CHECK(cells[1]["answer"]["kernels"]["digest"] == cells[0]["answer"]["kernels"]["digest"]);
}

TEST_CASE("list and bench take the source of a case, as run does") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.c");
  Write(source, CaseWithStage());
  const auto call = [&](const std::string& subcommand) {
    return RunChild("'" CPPOOL_COMMAND "' " + subcommand + " --backend host --load '" + source + "' 2>&1");
  };
  const Child listed = call("list"), parameters = call("list mine");
  CHECK((listed.exit_code == 0 && Has(listed.output, "\nmine: version 1\n")));
  CHECK((parameters.exit_code == 0 && Has(parameters.output, "\n  n  = 1\n")));
  const Child bench = call("bench --case mine --world-size 1 --repeat 2");
  INFO(bench.output);
  CHECK(bench.exit_code == 0);
  CHECK(Has(bench.output, "work ms"));

  Write(source, "int main( {\n");
  for (const char* subcommand : {"list", "bench --case mine"}) {
    const Child refused = call(subcommand);
    CHECK((refused.exit_code == 1 && Has(refused.output, source + ": does not compile")));
  }
  Write(source, "int nothing;\n");
  const Child none = call("list");
  INFO(none.output);
  CHECK(none.exit_code == 1);
  CHECK(Has(none.output, "cppool: " + source + " (compiled to "));
  CHECK(Has(none.output, "exports no function cppool_cases"));
}

TEST_CASE("bench compiles the sources among its kernels, and times nothing when one does not compile") {
  const Sources sources;
  const std::string source = sources.folder.File("naive.c");
  std::filesystem::copy_file(CPPOOL_NAIVE_KERNEL, source);
  const std::string bench = std::string("'") + CPPOOL_COMMAND +
                            "' bench --json --backend host --world-size 1 --warmup 0 --repeat 1 --param "
                            "max_seqlen_q=16 --param num_heads=2 --param num_gqa_groups=2 --kernels ";
  const Child timed = RunChild(bench + "cppool,'" + source + "',naive 2>&1");
  INFO(timed.output);
  CHECK(timed.exit_code == 0);
  CHECK(Has(timed.output, "cppool: compiling " + source));
  CHECK(Has(timed.output, "\"kernels\":\"" + source + ",naive\""));        // as --kernels has it
  CHECK(Has(timed.output, sources.folder.File("cache/compiled/naive-")));  // what ran
  Write(source, "int main( {\n");
  const Child refused = RunChild(bench + "'" + source + "' 2>&1");
  CHECK(refused.exit_code == 1);
  CHECK(Has(refused.output, source + ": does not compile"));
}

TEST_CASE("an error about a compiled source names the source first: in run, in its JSON and in bench") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.c");
  fs::copy_file(CPPOOL_CRASHING_KERNEL, source);
  const auto call = [&](const std::string& subcommand) {
    return RunChild("'" CPPOOL_COMMAND "' " + subcommand +
                    " --backend host --world-size 1 --param max_seqlen_q=16 --param is_training=false "
                    "--kernels '" +
                    source + "' 2>&1");
  };
  const std::string named =
      source + " (compiled to " + sources.folder.File("cache/compiled/mine-");  // and its digest
  for (const char* subcommand : {"run", "run --json", "bench"}) {               // there is no answer
    const Child crashed = call(subcommand);
    INFO(subcommand << ": " << crashed.output);
    CHECK(crashed.exit_code != 0);
    CHECK(Has(crashed.output, "library " + named));
    CHECK(Has(crashed.output, ".so), stack: CrashForward"));
    CHECK(Has(crashed.output, " in stage 'forward/"));
  }
  const Environment renamed("CFLAGS", "-Dcppool_attention=renamed");
  for (const char* subcommand : {"run", "run --json", "run --list", "bench"}) {  // the answer is an error
    const Child refused = call(subcommand);
    INFO(subcommand << ": " << refused.output);
    CHECK(Has(refused.output, "kernels of " + named));
    CHECK(Has(refused.output, ".so): it exports no function cppool_attention"));
  }
}

TEST_CASE("run says that it compiles a source, with --verbose how, and nothing when it need not") {
  const Sources sources;
  const std::string source = sources.folder.File("mine.cpp");
  const auto run = [&](const std::string& option) {
    const Child child = RunChild("'" CPPOOL_COMMAND "' run --backend host --case mine --load '" + source +
                                 "' " + option + " 2>&1 >/dev/null");
    CHECK(child.exit_code == 0);
    return child.output;
  };
  CHECK(run("") == "cppool: compiling " + source + "\n");
  CHECK(run("--verbose").empty());  // it is in the cache
  sources.SetVersion("version 2");
  const std::string verbose = run("--verbose");
  CHECK(Has(verbose, " -shared "));
  CHECK_FALSE(Has(verbose, "compiling"));
}

}  // namespace cppool::test
