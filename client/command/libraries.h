// The files of --load and --kernels as libraries: sources among them are compiled (cppool/compile.h).
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <cppool/compile.h>

#include "client/suite/cell.h"
#include "protocol/kernel_choice.h"

namespace cppool::command {

// Whose kernels --kernels names; the empty text names none. Throws UsageError.
protocol::KernelChoice ToKernels(const std::string& words);

using Sources = std::map<std::string, std::string>;  // by the path of the library that each became

struct Libraries {
  std::vector<std::string> load;  // RunOptions::load: in the order in which they were named
  std::string kernels;            // RunOptions::kernels
  Sources sources;
};

// Returns a text of the daemon's with the source in place of its library: "mine.cu (compiled to LIBRARY)"
// where it is named first, then "mine.cu".
std::string NameSources(std::string text, const Sources& sources);

// `load` and `kernels` are the values of the options. `hello` gets the answer of the daemon that will load
// them; called only for a .cu, which is compiled for the daemon's GPUs. `messages` gets a line before each
// source is compiled, which with `verbose` is the compiler's command, and the compiler's warnings. Nothing
// when a source does not compile, or no daemon says for which GPUs to compile it; `messages` has the reason.
// `watched`, unless it is null, gets the files that were named and those that sources include, also of a
// source that does not compile.
std::optional<Libraries> MakeLibraries(const std::vector<std::string>& load, protocol::KernelChoice kernels,
                                       const std::function<Json()>& hello, std::ostream& messages,
                                       bool verbose, std::vector<std::string>* watched = nullptr);

// Which cases the libraries of --load have, as a daemon lists them. Nothing is known of libraries that it
// cannot use: requests with them are answered with the reason.
class LoadedCases {
 public:
  // `files`: the values of --load; `load`: the libraries that they became. `list` gets the answer to `list`
  // with these libraries.
  LoadedCases(const std::vector<std::string>& files, const std::vector<std::string>& load,
              const std::function<Json(const std::vector<std::string>&)>& list);

  // Returns the only case of all libraries together; empty: there are several, or nothing is known.
  std::string only() const;
  // Throws UsageError that names a library of which none of the cells is a case, and its cases.
  void CheckUsed(const std::vector<suite::Cell>& cells) const;
  // Returns the files of which this is a case; where nothing is known, all of them.
  std::vector<std::string> FilesWith(const std::string& case_name) const;

 private:
  struct Library {
    std::string file;
    std::vector<std::string> cases;
  };
  std::vector<std::string> files_;
  std::vector<Library> libraries_;  // none: nothing is known
};

}  // namespace cppool::command
