#include <cppool/compile.h>

#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <sstream>
#include <system_error>

#include <cppool/pool.h>
#include "client/src/process.h"
#include "client/src/search_path.h"
#include "client/src/shell.h"
#include "protocol/digest.h"
#include "protocol/file_cache.h"

namespace cppool {

namespace {

namespace fs = std::filesystem;
using client::Clock;
using client::Process;
using Words = std::vector<std::string>;

constexpr protocol::FileCache::Limits kLibraries{256, std::uint64_t{1} << 30};
constexpr std::size_t kMostOutput = 1 << 20;
constexpr std::chrono::seconds kVersionLimit{30};
constexpr std::chrono::milliseconds kAskAgain{100};  // whether the call is interrupted

enum class Language { kCuda, kCpp, kC };

std::optional<Language> LanguageOf(std::string_view path) {
  const auto ends = [&](std::string_view end) { return path.size() > end.size() && path.ends_with(end); };
  if (ends(".cu")) return Language::kCuda;
  if (ends(".cpp") || ends(".cc") || ends(".cxx")) return Language::kCpp;
  if (ends(".c")) return Language::kC;
  return std::nullopt;
}

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value != nullptr ? value : "";
}

Words Split(const std::string& text) {
  std::istringstream stream(text);
  Words words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

void Append(Words* words, const Words& more) { words->insert(words->end(), more.begin(), more.end()); }

std::optional<std::string> Find(const Words& names) {
  for (const std::string& name : names) {
    if (name.find('/') != std::string::npos && client::IsProgram(name)) return name;
    if (name.find('/') != std::string::npos) continue;
    for (const std::string& folder : client::SearchPath())
      if (client::IsProgram(folder + "/" + name)) return folder + "/" + name;
  }
  return std::nullopt;
}

// The words before the flags: the compiler with its path, and arguments that its variable holds.
Words CompilerFor(Language language) {
  const char* variable = language == Language::kCuda ? "CUDACXX" : language == Language::kCpp ? "CXX" : "CC";
  Words words = Split(Variable(variable));
  if (!words.empty()) {
    const auto found = Find({words[0]});
    if (!found) throw CompileError(std::string(variable) + ": there is no program " + words[0]);
    words[0] = *found;
    return words;
  }
  Words names = language == Language::kCpp ? Words{"c++", "g++", "clang++"} : Words{"cc", "gcc", "clang"};
  if (language == Language::kCuda) {
    names.clear();
    for (const char* home : {"CUDA_HOME", "CUDA_PATH"})
      if (const std::string folder = Variable(home); !folder.empty()) names.push_back(folder + "/bin/nvcc");
    names.insert(names.end(), {"nvcc", "/usr/local/cuda/bin/nvcc"});
  }
  if (const auto found = Find(names)) return {*found};
  std::string searched;
  for (const std::string& name : names) searched += (searched.empty() ? "" : ", ") + name;
  throw CompileError("there is no compiler (" + searched + "): install one, or set " + variable +
                     " to its path");
}

// Where cppool/case.h is: in the prefix of the daemon, of this program, or that the library was configured for.
std::string HeaderFolder() {
  Words folders;
  if (const std::string daemon = FindDaemon({}); !daemon.empty())
    folders.push_back((fs::path(daemon).parent_path() / "../include").lexically_normal().string());
  std::error_code ignored;
  if (const fs::path program = fs::read_symlink("/proc/self/exe", ignored); !program.empty())
    folders.push_back((program.parent_path() / "../include").lexically_normal().string());
  folders.emplace_back(CPPOOL_INSTALL_INCLUDEDIR);
  for (const std::string& folder : folders)
    if (fs::exists(folder + "/cppool/case.h", ignored)) return folder;
  return "";
}

// By default GCC makes static variables of inline functions and of templates common to all libraries of a process: a version of a
// library would find those of the version before it. Other compilers do not, and may not know the flag.
Words OwnStatics(Language language, const Words& compiler, const std::string& version) {
  if (language == Language::kCuda) {
    const bool other_host =
        (client::ShellCommand(compiler) + Variable("CUDAFLAGS")).find("ccbin") != std::string::npos ||
        !Variable("NVCC_CCBIN").empty();
    return other_host ? Words{} : Words{"-Xcompiler=-fno-gnu-unique"};
  }
  const bool gcc = version.find("Free Software Foundation") != std::string::npos;
  return gcc ? Words{"-fno-gnu-unique"} : Words{};
}

Words Flags(Language language, const CompileOptions& options) {
  Words flags;
  if (language == Language::kCuda) {
    flags = {"-shared", "-O3", "-std=c++20", "-lineinfo", "-Xcompiler=-fPIC,-g1"};
    for (const std::string& capability : options.capabilities) {
      std::string number = capability;
      number.erase(std::remove(number.begin(), number.end(), '.'), number.end());
      // From 9.0 on, a part of the instructions (wgmma) is for this one architecture.
      if (number.size() > 2 || number >= "90") number += "a";
      flags.push_back("-gencode=arch=compute_" + number + ",code=sm_" + number);
    }
  } else {
    flags = {"-shared", "-fPIC", "-O2", "-g1"};
    if (language == Language::kCpp) flags.insert(flags.end(), {"-std=c++20", "-pthread"});
  }
  for (const std::string& folder : options.include_folders)
    flags.push_back("-I" + fs::absolute(folder).string());
  if (const std::string folder = HeaderFolder(); !folder.empty()) flags.push_back("-I" + folder);
  Append(&flags, Split(Variable(language == Language::kCuda  ? "CUDAFLAGS"
                                : language == Language::kCpp ? "CXXFLAGS"
                                                             : "CFLAGS")));
  Append(&flags, Split(Variable("LDFLAGS")));
  return flags;
}

struct Ended {
  bool well = false;
  std::string output;  // of both streams
  std::string how;     // "exited with code 1"
};

// Runs a program and waits for it. Throws CompileError.
Ended RunProgram(const Words& words, const CompileOptions& options, std::chrono::milliseconds limit) {
  std::unique_ptr<Process> process;
  try {
    process = Process::Spawn({words[0], Words(words.begin() + 1, words.end()), {}});
  } catch (const std::system_error& error) {
    throw CompileError(words[0] + ": cannot be started: " + error.what());
  }
  process->CloseInput();
  const protocol::UniqueFd errors = process->TakeErrors();
  const auto until = Clock::now() + limit;
  Ended ended;
  pollfd fds[2] = {{process->output(), POLLIN, 0}, {errors.get(), POLLIN, 0}};
  while (fds[0].fd >= 0 || fds[1].fd >= 0) {
    if (Clock::now() >= until)
      throw CompileError(words[0] + " did not end within " + std::to_string(limit.count() / 1000) +
                         " s and was killed");
    if (options.interrupted && options.interrupted())
      throw CompileError(words[0] + " was killed, since the call was interrupted");
    const auto next = options.interrupted ? std::min(until, Clock::now() + kAskAgain) : until;
    if (poll(fds, 2, client::PollTimeout(next)) <= 0) continue;
    for (pollfd& fd : fds) {
      if (fd.fd < 0 || fd.revents == 0) continue;
      char buffer[4096];
      const ssize_t count = read(fd.fd, buffer, sizeof buffer);
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) fd.fd = -1;
      if (count > 0 && ended.output.size() < kMostOutput)
        ended.output.append(buffer, static_cast<std::size_t>(count));
    }
  }
  process->WaitEnd(until);
  ended.well = process->EndedInOrder();
  ended.how = process->DescribeEnd();
  return ended;
}

std::string VersionOf(const Words& compiler, const CompileOptions& options) {
  Words words = compiler;
  words.push_back("--version");
  const Ended ended =
      RunProgram(words, options, std::min<std::chrono::milliseconds>(options.limit, kVersionLimit));
  if (!ended.well)
    throw CompileError(client::ShellCommand(words) + " " + ended.how + ": is this a compiler?\n" +
                       ended.output);
  return ended.output;
}

// The files of a rule of make, "target: a b\ c \<newline> d", without the source itself and the
// compiler's own headers.
Words ReadDependencies(const std::string& text, const std::string& source) {
  Words files;
  std::string file;
  const auto end = [&] {
    // nvcc names its own headers, too.
    const bool of_toolkit = file.find("/bin/../targets/") != std::string::npos;
    if (!file.empty() && file != source && !of_toolkit) files.push_back(file);
    file.clear();
  };
  for (std::size_t i = std::min(text.find(": "), text.size()) + 1; i < text.size(); ++i) {
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (text[i] == '\\' && (next == ' ' || next == '\\' || next == '#')) {
      file += text[++i];
    } else if (text[i] == '$' && next == '$') {
      file += text[++i];
    } else if (text[i] == ' ' || text[i] == '\n' || (text[i] == '\\' && next == '\n')) {
      end();
    } else {
      file += text[i];
    }
  }
  end();
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

// The library's name in the cache, from what the command and the source are and from the files that are included. Nothing when one of
// them cannot be read.
std::optional<std::string> LibraryName(const std::string& stem, const std::string& key,
                                       const Words& included) {
  std::string all = key;
  for (const std::string& file : included) {
    try {
      all += "\n" + file + " " + protocol::Digest(protocol::ReadWhole(file).bytes);
    } catch (const protocol::FileError&) {
      return std::nullopt;
    }
  }
  return stem + "-" + protocol::Digest(all) + ".so";
}

// Removes the compiler's files, unless they have been kept.
struct Unfinished {
  std::string library, dependencies;
  ~Unfinished() {
    unlink(library.c_str());
    unlink(dependencies.c_str());
  }
};

Compiled CompileInto(const protocol::FileCache& cache, const std::string& source, Language language,
                     const CompileOptions& options) {
  const Words compiler = CompilerFor(language);
  const std::string version = VersionOf(compiler, options);
  Words command = compiler;
  Append(&command, OwnStatics(language, compiler, version));
  Append(&command, Flags(language, options));
  command.push_back(source);
  const std::string key = protocol::Digest(client::ShellCommand(command) + "\n" + version + "\n" +
                                           protocol::Digest(protocol::ReadWhole(source).bytes));
  const std::string stem = fs::path(source).stem().string().substr(0, 100);
  const std::string list = stem + "-" + key + ".files";  // which files it included when it was compiled last
  Compiled compiled;
  compiled.command = client::ShellCommand(command);
  if (const auto files = cache.Read(list)) {
    std::istringstream text(*files);
    for (std::string file; std::getline(text, file);) compiled.included.push_back(file);
    const auto name = LibraryName(stem, key, compiled.included);
    if (name && cache.Use(*name)) {
      compiled.library = cache.Path(*name);
      compiled.cached = true;
      return compiled;
    }
  }
  const Unfinished made{cache.Temporary(), cache.Temporary()};
  Append(&command, {"-o", made.library, "-MMD", "-MF", made.dependencies});
  if (options.on_command) options.on_command(client::ShellCommand(command));
  const auto before = protocol::IdentityOf(source);
  const Ended ended = RunProgram(command, options, options.limit);
  compiled.output = ended.output;
  if (!ended.well) {
    const bool full = ended.output.find(std::strerror(ENOSPC)) != std::string::npos;
    throw CompileError(source + ": does not compile: " + compiler[0] + " " + ended.how + "\n" + ended.output +
                       (full ? "A disk is full: free space on that of " + cache.Path("") +
                                   ", or set CPPOOL_CACHE to another folder (TMPDIR for temporary files)"
                             : ""));
  }
  compiled.included = ReadDependencies(protocol::ReadWhole(made.dependencies).bytes, source);
  const auto name = LibraryName(stem, key, compiled.included);
  if (!name || !(before == protocol::IdentityOf(source)))
    throw CompileError(source + ": it, or a file that it includes, changed while it was compiled: try again");
  std::string lines;
  for (const std::string& file : compiled.included) lines += file + "\n";
  cache.Keep(made.library, *name);
  cache.Write(list, lines);
  cache.Prune();
  compiled.library = cache.Path(*name);
  return compiled;
}

}  // namespace

bool IsSource(std::string_view path) { return LanguageOf(path).has_value(); }

Compiled Compile(const std::string& source, const CompileOptions& options) {
  const auto language = LanguageOf(source);
  if (!language) throw CompileError(source + ": is no source: its name ends with .cu, .cpp, .cc, .cxx or .c");
  try {
    protocol::IdentityOf(source);  // before a cache is made
    return CompileInto(protocol::FileCache("compiled", kLibraries), fs::absolute(source).string(), *language,
                       options);
  } catch (const protocol::FileError& error) {
    throw CompileError(error.what());
  }
}

std::vector<std::string> CapabilitiesOf(const Json& hello) {
  std::vector<std::string> capabilities;
  const Json devices = hello.is_object() ? hello.value("devices", Json::array()) : Json::array();
  for (const Json& device : devices) {
    const Json capability = device.is_object() ? device.value("capability", Json()) : Json();
    if (!capability.is_string() || capability.get_ref<const std::string&>().empty()) continue;
    if (std::find(capabilities.begin(), capabilities.end(), capability) == capabilities.end())
      capabilities.push_back(capability.get<std::string>());
  }
  return capabilities;
}

}  // namespace cppool
