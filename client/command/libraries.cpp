#include "client/command/libraries.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "base/words.h"
#include "client/suite/value_text.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

class Maker {
 public:
  Maker(const std::function<Json()>& hello, std::ostream& messages, bool verbose,
        std::vector<std::string>* watched)
      : hello_(hello), messages_(messages), verbose_(verbose), watched_(watched) {}

  // Returns the library that a file is, or that a source becomes.
  std::string Make(const std::string& file) {
    Watch({file});
    if (!IsSource(file)) return file;
    CompileOptions options;
    options.on_command = [&](std::string_view command) {
      messages_ << "cppool: " << (verbose_ ? std::string(command) : "compiling " + file) << std::endl;
    };
    if (file.ends_with(".cu")) {
      if (!capabilities_) capabilities_ = CapabilitiesOf(hello_());
      options.capabilities = *capabilities_;
    }
    const Compiled compiled = [&] {
      try {
        return Compile(file, options);
      } catch (const CompileError& error) {
        Watch(error.files());
        throw;
      }
    }();
    messages_ << compiled.output << std::flush;
    Watch(compiled.included);
    sources[std::filesystem::absolute(compiled.library).string()] = file;  // as the daemon gets it
    return compiled.library;
  }

  Sources sources;

 private:
  void Watch(const std::vector<std::string>& files) {
    if (watched_ != nullptr) watched_->insert(watched_->end(), files.begin(), files.end());
  }

  const std::function<Json()>& hello_;
  std::ostream& messages_;
  const bool verbose_;
  std::vector<std::string>* const watched_;
  std::optional<std::vector<std::string>> capabilities_;
};

}  // namespace

protocol::KernelChoice ToKernels(const std::string& words) try {
  return words.empty() ? protocol::KernelChoice() : protocol::ParseKernels(words);
} catch (const protocol::InvalidRequest& error) {
  throw suite::UsageError(std::string("--kernels: ") + error.what());
}

std::string NameSources(std::string text, const Sources& sources) {
  for (const auto& [library, source] : sources) {
    std::string name = source + " (compiled to " + library + ")";
    for (std::size_t at = 0; (at = text.find(library, at)) != std::string::npos;) {
      text.replace(at, library.size(), name);
      at += name.size();
      name = source;
    }
  }
  return text;
}

std::optional<Libraries> MakeLibraries(const std::vector<std::string>& load, protocol::KernelChoice kernels,
                                       const std::function<Json()>& hello, std::ostream& messages,
                                       bool verbose, std::vector<std::string>* watched) try {
  Maker maker(hello, messages, verbose, watched);
  Libraries libraries;
  for (const std::string& file : load) libraries.load.push_back(maker.Make(file));
  if (kernels.from == protocol::KernelChoice::From::kLibrary) kernels.path = maker.Make(kernels.path);
  libraries.kernels = kernels.Words();
  libraries.sources = std::move(maker.sources);
  return libraries;
} catch (const CompileError& error) {
  messages << "cppool: " << error.what() << "\n";
  return std::nullopt;
} catch (const PoolError& error) {
  messages << "cppool: no daemon says for which GPUs to compile: " << error.what() << "\n";
  return std::nullopt;
}

LoadedCases::LoadedCases(const std::vector<std::string>& files, const std::vector<std::string>& load,
                         const std::function<Json(const std::vector<std::string>&)>& list)
    : files_(files) {
  if (load.empty()) return;
  const auto names = [&](const std::vector<std::string>& libraries) -> std::optional<std::set<std::string>> {
    const Json answer = list(libraries);
    if (!answer.contains("cases")) return std::nullopt;
    std::set<std::string> result;
    for (const Json& one : answer["cases"]) result.insert(one.value("name", ""));
    return result;
  };
  try {
    const auto built_in = names({});
    for (std::size_t i = 0; i < load.size() && built_in; ++i) {
      const auto with = names({load[i]});
      if (!with) {
        libraries_.clear();
        return;
      }
      libraries_.push_back({files[i], {}});
      std::set_difference(with->begin(), with->end(), built_in->begin(), built_in->end(),
                          std::back_inserter(libraries_.back().cases));
    }
  } catch (const PoolError&) {
    libraries_.clear();
  }
}

std::string LoadedCases::only() const {
  std::string only;
  for (const Library& library : libraries_)
    for (const std::string& name : library.cases) {
      if (!only.empty()) return "";
      only = name;
    }
  return only;
}

void LoadedCases::CheckUsed(const std::vector<suite::Cell>& cells) const {
  for (const Library& library : libraries_) {
    const auto is_of_library = [&](const suite::Cell& cell) {
      return std::ranges::find(library.cases, cell.case_name) != library.cases.end();
    };
    if (cells.empty() || std::ranges::any_of(cells, is_of_library)) continue;
    throw suite::UsageError("--load " + library.file + ": nothing of it would run. It has the " +
                            (library.cases.size() == 1 ? "case " : "cases ") + base::Join(library.cases) +
                            ": name one, by --case or as \"case\" of a suite, or leave the library out");
  }
}

std::vector<std::string> LoadedCases::FilesWith(const std::string& case_name) const {
  if (libraries_.empty()) return files_;
  std::vector<std::string> files;
  for (const Library& library : libraries_)
    if (std::ranges::find(library.cases, case_name) != library.cases.end()) files.push_back(library.file);
  return files;
}

}  // namespace cppool::command
