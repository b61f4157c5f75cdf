// Measures the time from a saved source of an attention kernel to its first checked answer in a warm pool, in
// parts. Each round writes the source anew, so that it is compiled and loaded again.
//
//     first_answer kernels/examples/forward.cu --param is_training=false
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <cppool/compile.h>
#include <cppool/pool.h>

#include "tests/measure/samples.h"

namespace {

namespace fs = std::filesystem;
using cppool::measure::Milliseconds;

void Print(const char* what, std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  std::printf("%-52s n %2zu  min %9.2f  median %9.2f  max %9.2f ms\n", what, ms.size(), ms.front(),
              ms[ms.size() / 2], ms.back());
}

// A copy of a source in a folder of its own, which is removed with it.
class Source {
 public:
  explicit Source(const fs::path& original)
      : folder_(fs::temp_directory_path() / ("cppool-first-answer-" + std::to_string(getpid()))),
        path_(folder_ / original.filename()) {
    std::ostringstream text;
    text << std::ifstream(original).rdbuf();
    text_ = text.str();
    if (text_.empty())
      throw std::runtime_error(original.string() + ": there is no such file, or it is empty");
    fs::create_directories(folder_);
  }
  ~Source() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  // A version that no compiler has seen.
  void Save(int version) const {
    std::ofstream(path_) << text_ << "\nint version_" << getpid() << "_" << version
                         << "(void) { return 0; }\n";
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path folder_, path_;
  std::string text_;
};

}  // namespace

int main(int argc, char** argv) {
  cppool::PoolOptions options;
  std::string original, name;
  std::vector<std::string> words;
  int rounds = 5;
  CLI::App app("Measures the time from a saved source to its first checked answer");
  app.add_option("source", original, "A kernel's source: .cu, .cpp or .c")->required();
  app.add_option("--name", name, "Which of its kernels, if there are several");
  app.add_option("--world-size", options.world_size, "Ranks")->capture_default_str();
  app.add_option("--backend", options.backend, "auto, cuda or host")->capture_default_str();
  app.add_option("--daemon", options.daemon, "Path of cppoold");
  app.add_option("--param", words, "A parameter of the case, key=value");
  app.add_option("--rounds", rounds, "Number of versions of the source")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  try {
    cppool::Json params = cppool::Json::object();
    for (const std::string& word : words) {
      const auto equals = word.find('=');
      if (equals == std::string::npos) throw std::runtime_error("--param " + word + ": key=value is meant");
      const std::string text = word.substr(equals + 1);
      const cppool::Json value = cppool::Json::parse(text, nullptr, false);
      params[word.substr(0, equals)] = value.is_discarded() ? cppool::Json(text) : value;
    }
    const Source source(original);
    cppool::Pool pool(options);
    cppool::CompileOptions compile;
    compile.include_folders = {fs::absolute(original).parent_path().string()};
    compile.capabilities = cppool::CapabilitiesOf(pool.Hello());
    if (!pool.Run(params).ok()) throw std::runtime_error("the case does not pass with cppool's kernels");

    std::vector<double> compiling, loading, first, again, whole, beside;
    for (int round = 0; round < rounds; ++round) {
      source.Save(round);
      cppool::RunOptions run;
      const auto answer =
          [&](cppool::Result (cppool::Pool::*ask)(const cppool::Json&, const cppool::RunOptions&)) {
            const cppool::Result result = (pool.*ask)(params, run);
            if (!result.ok()) throw std::runtime_error(result.error);
          };
      const double compile_ms = Milliseconds([&] {
        run.kernels = cppool::Compile(source.path(), compile).library + (name.empty() ? "" : "," + name);
      });
      const double load_ms = Milliseconds([&] { answer(&cppool::Pool::Validate); });
      const double first_ms = Milliseconds([&] { answer(&cppool::Pool::Run); });
      const double again_ms = Milliseconds([&] { answer(&cppool::Pool::Run); });
      compiling.push_back(compile_ms);
      loading.push_back(load_ms);
      first.push_back(std::max(0.0, first_ms - again_ms));
      again.push_back(again_ms);
      beside.push_back(load_ms + first_ms);
      whole.push_back(compile_ms + load_ms + first_ms);
    }
    Print("the compiler", compiling);
    Print("copy of the library, its trial in a process, dlopen", loading);
    Print("what only the first run does: loading the code", first);
    Print("a further run, with checks", again);
    Print("together, without the compiler (aim: 100)", beside);
    Print("from the saved source to the first answer", whole);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "first_answer: %s\n", error.what());
    return 1;
  }
}
