// The files of --load and --kernels as libraries: sources among them are compiled (cppool/compile.h).
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <cppool/compile.h>

namespace cppool::command {

using Sources = std::map<std::string, std::string>;  // by the path of the library that each became

struct Libraries {
  std::vector<std::string> load;  // RunOptions::load: in the order in which they were named
  std::string kernels;            // RunOptions::kernels
  // The files that they are made of: those that were named, and those that sources include.
  std::vector<std::string> watched;
  Sources sources;
};

// A text of the daemon's with the source in place of its library: "mine.cu (compiled to LIBRARY)" where it is named first, then
// "mine.cu".
std::string NameSources(std::string text, const Sources& sources);

// `load` and `kernels` are the values of the options. `hello` gets the answer of the daemon that will load them; called only for a
// .cu, which is compiled for the daemon's GPUs. `messages` gets a line before each source is compiled, which with `verbose` is the
// compiler's command, and the compiler's warnings. Nothing when a source does not compile, or no daemon says for which GPUs to
// compile it; `messages` has said why.
std::optional<Libraries> MakeLibraries(const std::vector<std::string>& load, const std::string& kernels,
                                       const std::function<Json()>& hello, std::ostream& messages,
                                       bool verbose);

}  // namespace cppool::command
