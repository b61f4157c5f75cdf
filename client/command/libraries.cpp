#include "client/command/libraries.h"

#include <filesystem>
#include <optional>
#include <utility>

#include "protocol/kernel_words.h"

namespace cppool::command {
namespace {

class Maker {
 public:
  Maker(const std::function<Json()>& hello, std::ostream& messages, bool verbose)
      : hello_(hello), messages_(messages), verbose_(verbose) {}

  // The library that a file is, or that a source becomes.
  std::string Make(const std::string& file) {
    watched.push_back(file);
    if (!IsSource(file)) return file;
    CompileOptions options;
    options.on_command = [&](std::string_view command) {
      messages_ << "cppool: " << (verbose_ ? std::string(command) : "compiling " + file) << std::endl;
    };
    if (file.ends_with(".cu")) {
      if (!capabilities_) capabilities_ = CapabilitiesOf(hello_());
      options.capabilities = *capabilities_;
    }
    const Compiled compiled = Compile(file, options);
    messages_ << compiled.output << std::flush;
    watched.insert(watched.end(), compiled.included.begin(), compiled.included.end());
    sources[std::filesystem::absolute(compiled.library).string()] = file;  // as the daemon gets it
    return compiled.library;
  }

  std::vector<std::string> watched;
  Sources sources;

 private:
  const std::function<Json()>& hello_;
  std::ostream& messages_;
  const bool verbose_;
  std::optional<std::vector<std::string>> capabilities_;
};

}  // namespace

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

std::optional<Libraries> MakeLibraries(const std::vector<std::string>& load, const std::string& kernels,
                                       const std::function<Json()>& hello, std::ostream& messages,
                                       bool verbose) try {
  Maker maker(hello, messages, verbose);
  Libraries libraries;
  for (const std::string& file : load) libraries.load.push_back(maker.Make(file));
  libraries.kernels = kernels;
  const protocol::KernelWords words = protocol::ParseKernels(kernels);
  if (!words.path.empty())
    libraries.kernels = maker.Make(words.path) + (words.name.empty() ? "" : "," + words.name);
  libraries.watched = std::move(maker.watched);
  libraries.sources = std::move(maker.sources);
  return libraries;
} catch (const CompileError& error) {
  messages << "cppool: " << error.what() << "\n";
  return std::nullopt;
} catch (const PoolError& error) {
  messages << "cppool: no daemon says for which GPUs to compile: " << error.what() << "\n";
  return std::nullopt;
}

}  // namespace cppool::command
