// Makes a library for RunOptions::load of a source: with nvcc for .cu, with the host's compiler for .cpp,
// .cc, .cxx and .c.
//
//     cppool::RunOptions options;
//     const auto capabilities = cppool::CapabilitiesOf(pool.Hello());
//     options.load = {cppool::Compile("mine.cu", {.capabilities = capabilities}).library};
//     cppool::Result result = pool.Run({{"my_parameter", 3}}, {.case_name = "mine", ...});
//
// | source          | compiler: the first that there is |
// | --------------- | --- |
// | .cu             | $CUDACXX; nvcc in $CUDA_HOME/bin, $CUDA_PATH/bin, PATH, /usr/local/cuda/bin |
// | .cpp, .cc, .cxx | $CXX; c++, g++, clang++ in PATH |
// | .c              | $CC; cc, gcc, clang in PATH |
//
// A variable may hold arguments too ("ccache g++"). $CUDAFLAGS, $CXXFLAGS and $CFLAGS are added to the flags,
// and $LDFLAGS, after the source, to all (for nvcc: flags that it knows). C++ is C++20, and the headers of
// cppool are found.
//
// The compiler works on a copy of the source with a plain name in a folder of its own in that for temporary
// files ($TMPDIR), where it has its own temporary files, too; messages and __FILE__ name the source. When
// this process dies, so does the compiler, and the folder is removed. A server that a wrapper starts would go
// on with it: start sccache's before.
//
// The library is kept in the folder `compiled` of the cache ($CPPOOL_CACHE, else $XDG_CACHE_HOME/cppool or
// ~/.cache/cppool): at most 256 files and 1 GiB, and what was not used for longest goes first. It is used
// again when these are the same: the source, the files that it includes, those that flags name (libraries of
// -l among them), the command, the compiler's version and its variables (CPATH, NVCC_APPEND_FLAGS and the
// like). A header that is new and found before one that was included is not noticed, nor is another version
// of a program that the compiler runs. When a file changes while the compiler runs, it is run again.
#pragma once

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cppool/result.h>

namespace cppool {

struct CompileOptions {
  // What the GPUs have that it is for, as `capability` of a device: "9.0". Empty: nvcc chooses. Only for .cu.
  std::vector<std::string> capabilities;
  std::vector<std::string> include_folders;  // searched first
  std::chrono::milliseconds limit{600'000};  // for one run of a compiler
  std::function<void(std::string_view)>
      on_command;  // gets the command before it is run, as a shell would take it
  // Asked about ten times a second and when a signal handler has run. True: the compiler is killed, and
  // CompileError.
  std::function<bool()> interrupted;
};

struct Compiled {
  std::string library;                // its path
  std::string command;                // as on_command gets it
  std::string output;                 // the compiler's warnings; empty when it was not run
  std::vector<std::string> included;  // the files that the source includes, those of the system among them
  bool cached = false;                // no compiler was run
};

// what() has the compiler's messages, or says what is wrong and what to do.
class CompileError : public std::runtime_error {
 public:
  explicit CompileError(const std::string& what, std::vector<std::string> files = {})
      : std::runtime_error(what), files_(std::move(files)) {}
  // Files whose change may mend it: what the source seems to include, there or not.
  const std::vector<std::string>& files() const { return files_; }

 private:
  std::vector<std::string> files_;
};

// Returns whether a path ends as a source does; a library's does not.
bool IsSource(std::string_view path);

// Throws CompileError. No thread of its own; calls of several threads and processes do not disturb each
// other.
Compiled Compile(const std::string& source, const CompileOptions& options = {});

// Returns the capabilities of the devices in an answer to `hello`, each once; none on the host.
std::vector<std::string> CapabilitiesOf(const Json& hello);

}  // namespace cppool
