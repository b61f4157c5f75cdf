#include <cppool/compile.h>

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include <cppool/pool.h>
#include "base/digest.h"
#include "base/file_cache.h"
#include "base/new_file.h"
#include "base/words.h"
#include "client/src/compile_inputs.h"
#include "client/src/run_tool.h"
#include "client/src/shell.h"

namespace cppool {

namespace {

namespace fs = std::filesystem;
using client::Words;

constexpr base::FileCache::Limits kLibraries{256, std::uint64_t{1} << 30};
constexpr std::chrono::seconds kVersionLimit{30};
constexpr int kMostTries = 3;  // compilations during each of which a file changes
// These variables decide over the library, too.
constexpr const char* kVariables[] = {
    "CPATH",       "C_INCLUDE_PATH",   "CPLUS_INCLUDE_PATH", "LIBRARY_PATH",      "COMPILER_PATH",
    "NVCC_CCBIN",  "GCC_EXEC_PREFIX",  "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CCC_OVERRIDE_OPTIONS",
    "LD_RUN_PATH", "SOURCE_DATE_EPOCH"};

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

void Append(Words* words, const Words& more) { words->insert(words->end(), more.begin(), more.end()); }

std::optional<std::string> Find(const Words& names) {
  for (const std::string& name : names) {
    const bool is_path = name.find('/') != std::string::npos;
    const std::string found = !is_path ? client::InPath(name) : client::IsProgram(name) ? name : "";
    if (!found.empty()) return found;
  }
  return std::nullopt;
}

// Returns the words before the flags: the compiler with its path, and arguments that its variable holds.
Words CompilerFor(Language language) {
  const char* variable = language == Language::kCuda ? "CUDACXX" : language == Language::kCpp ? "CXX" : "CC";
  Words words = client::Split(Variable(variable));
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
  throw CompileError("there is no compiler (" + base::Join(names) + "): install one, or set " + variable +
                     " to its path");
}

// Returns where cppool/case.h is: in the prefix of the daemon, of this program, or that the library was
// configured for.
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

// By default GCC makes static variables of inline functions and of templates common to all libraries of a
// process: a version of a library would find those of the version before it. Other compilers do not, and may
// not know the flag.
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

Words FlagsFor(Language language, const Words& capabilities) {
  if (language == Language::kC) return {"-shared", "-fPIC", "-O2", "-g1"};
  if (language == Language::kCpp) return {"-shared", "-fPIC", "-O2", "-g1", "-std=c++20", "-pthread"};
  Words flags = {"-shared", "-O3", "-std=c++20", "-lineinfo", "-Xcompiler=-fPIC,-g1"};
  for (const std::string& capability : capabilities) {
    std::string number = capability;
    number.erase(std::remove(number.begin(), number.end(), '.'), number.end());
    // From 9.0 on, a part of the instructions (wgmma) is for this one architecture.
    if (number.size() > 2 || number >= "90") number += "a";
    flags.push_back("-gencode=arch=compute_" + number + ",code=sm_" + number);
  }
  return flags;
}

std::string VersionOf(const Words& compiler, const CompileOptions& options) {
  Words words = compiler;
  words.push_back("--version");
  const client::ToolEnd end = client::RunTool(
      words, "", std::min<std::chrono::milliseconds>(options.limit, kVersionLimit), options.interrupted);
  if (!end.well)
    throw CompileError(client::ShellCommand(words) + " " + end.how + ": is this a compiler?\n" + end.output);
  return end.output;
}

// A plain path has no character that means something to a shell, to nvcc, which passes names to one, or to
// make.
bool IsPlain(const std::string& path) {
  return client::ShellQuote(path) == path && path.find(',') == std::string::npos;
}

// Returns a string literal of C.
std::string Literal(const std::string& text) {
  std::string literal = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') literal += '\\';
    literal += c == '\n' ? "\\n" : c == '\r' ? "\\r" : std::string(1, c);
  }
  return literal + "\"";
}

std::string WithoutBlanks(std::string text) {
  std::erase_if(text, [](char c) { return c == '\\' || c == ' ' || c == '\t'; });
  return text;
}

// Makes a folder for one run of a compiler, which works on a copy of the source there, and gets plain names
// for folders. Removed with what is in it.
class CompileFolder {
 public:
  explicit CompileFolder(std::string source) : source_(std::move(source)) {
    std::error_code ignored;
    const std::string folder = fs::temp_directory_path(ignored).string();
    path_ = (IsPlain(folder) && !folder.empty() ? folder : "/tmp") + "/cppool-compile-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr)
      throw CompileError(path_ + ": no such folder can be made: " + std::strerror(errno) +
                         ": set TMPDIR to a folder that can be written");
    const std::string plain = base::FileCache::Name(source_, "copy", fs::path(source_).extension().string());
    copy_ = path_ + "/" + plain;
    names_.emplace_back(copy_, source_);
  }
  ~CompileFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  CompileFolder(const CompileFolder&) = delete;
  CompileFolder& operator=(const CompileFolder&) = delete;

  const std::string& path() const { return path_; }
  const std::string& copy() const { return copy_; }
  std::string library() const { return path_ + "/library.so"; }
  std::string dependencies() const { return path_ + "/dependencies"; }

  // Messages and __FILE__ name the source, and its lines are numbered as there.
  void WriteCopy(std::string_view text) const {
    constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
    if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
    base::NewFile file(copy_);
    file.Write("#line 1 " + Literal(source_) + "\n");
    file.Write(text);
    file.Commit();
  }

  // Returns the folder, or a link to it that is named in its place.
  std::string PlainFolder(const std::string& folder) {
    if (IsPlain(folder)) return folder;
    const std::string link = path_ + "/folder" + std::to_string(names_.size());
    std::error_code error;
    fs::create_directory_symlink(folder, link, error);
    if (error) throw CompileError(link + ": cannot be made: " + error.message());
    names_.emplace_back(link + "/", folder + "/");
    return link;
  }

  // Returns whether a dependency is the source itself. nvcc lists it by the name that #line has, as the
  // literal up to a quotation mark.
  bool IsSource(const std::string& dependency) const {
    const std::string literal = Literal(source_).substr(1);
    return dependency == copy_ ||
           WithoutBlanks(dependency) == WithoutBlanks(literal.substr(0, literal.find('"')));
  }

  // Puts the user's names in place of those here.
  std::string Named(std::string text) const {
    for (const auto& [own, users] : names_)
      for (std::size_t at = 0; (at = text.find(own, at)) != std::string::npos; at += users.size())
        text.replace(at, own.size(), users);
    return text;
  }

 private:
  const std::string source_;
  std::string path_, copy_;
  std::vector<std::pair<std::string, std::string>> names_;  // those here, and the user's
};

// These do not change from one compilation of a source to the next.
struct Job {
  std::string source;  // absolute
  Language language;
  Words compiler, flags, folders, own_flags,
      libraries;  // in the order of the command, with the source before `libraries`
  std::string version;

  Job(std::string path, Language of, const CompileOptions& options)
      : source(std::move(path)),
        language(of),
        compiler(CompilerFor(of)),
        version(VersionOf(compiler, options)) {
    flags = OwnStatics(language, compiler, version);
    Append(&flags, FlagsFor(language, options.capabilities));
    for (const std::string& folder : options.include_folders)
      folders.push_back(fs::absolute(folder).string());
    if (const std::string folder = HeaderFolder(); !folder.empty()) folders.push_back(folder);
    own_flags = client::Split(Variable(language == Language::kCuda  ? "CUDAFLAGS"
                                       : language == Language::kCpp ? "CXXFLAGS"
                                                                    : "CFLAGS"));
    libraries = client::Split(Variable("LDFLAGS"));
  }

  // Returns how a user would call the compiler, or the words for the copy in a folder of its own.
  Words Command(CompileFolder* place) const {
    Words words = compiler;
    Append(&words, flags);
    if (place != nullptr) {
      const std::string folder = place->PlainFolder(fs::path(source).parent_path().string());
      if (language == Language::kCuda)
        words.push_back("-Xcompiler=-iquote," + folder);
      else
        Append(&words, {"-iquote", folder});
    }
    for (const std::string& folder : folders)
      words.push_back("-I" + (place != nullptr ? place->PlainFolder(folder) : folder));
    Append(&words, own_flags);
    words.push_back(place != nullptr ? place->copy() : source);
    Append(&words, libraries);
    Append(&words, {"-o", place != nullptr ? place->library() : fs::path(source).stem().string() + ".so"});
    if (place != nullptr) Append(&words, {"-MD", "-MF", place->dependencies()});
    return words;
  }

  // Names all that decides over the library but the files that the compiler reads.
  std::string Key() const {
    std::string key = client::ShellCommand(Command(nullptr)) + "\n" + version;
    for (const char* name : kVariables) key += "\n" + Variable(name);
    return key;
  }

  client::FlagInputs Inputs() const {
    Words words = compiler;
    Append(&words, own_flags);
    Append(&words, libraries);
    if (language == Language::kCuda)
      for (const char* name : {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"})
        Append(&words, client::Split(Variable(name)));
    client::FlagInputs inputs = client::InputsOf(words, client::SplitFolders(Variable("LIBRARY_PATH")));
    inputs.include_folders.insert(inputs.include_folders.begin(), folders.begin(), folders.end());
    for (const char* name : {"CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"})
      Append(&inputs.include_folders, client::SplitFolders(Variable(name)));
    return inputs;
  }
};

// Returns whether it has no content, as /dev/null. What came through a FIFO or a socket is gone, so that
// nothing can be kept by it.
bool IsDevice(const std::string& file) {
  std::error_code missing;
  const fs::file_status status = fs::status(file, missing);
  if (fs::exists(status) && !fs::is_regular_file(status) && !fs::is_character_file(status))
    throw CompileError(file + ": is included and no regular file: write what it gives to one");
  return fs::is_character_file(status);
}

// A compilation that is tried again knows this from the one before.
struct Tries {
  Words included;       // the files that the source included
  std::string changed;  // one that changed meanwhile
};

// Compiles once, unless the library is in the cache. Nothing when a file changed meanwhile: what was made may
// be of neither content.
std::optional<Compiled> TryCompile(const base::FileCache& cache, const Job& job,
                                   const CompileOptions& options, Tries* tries) {
  Compiled compiled;
  compiled.command = client::ShellCommand(job.Command(nullptr));
  client::Snapshot before;
  const client::FlagInputs inputs = job.Inputs();
  for (const Words& files : {inputs.files, tries->included})
    for (const std::string& file : files) before.Take(file);
  const std::string text = base::ReadWhole(job.source).bytes;
  const std::string key = base::Digest(job.Key() + "\n" + base::Digest(text));
  const auto name_with = [&](const Words& included) -> std::optional<std::string> {
    Words files = inputs.files;
    Append(&files, included);
    const auto digest = client::DigestWith(key, files);
    if (!digest) return std::nullopt;
    return base::FileCache::Name(job.source, *digest, ".so");
  };
  const std::string list =  // has the files that it included when it was compiled last
      base::FileCache::Name(job.source, key, ".files");
  if (const auto files = cache.Read(list)) {
    compiled.included = base::Split(*files, '\0');
    for (const std::string& file : compiled.included) before.Take(file);
    const auto name = name_with(compiled.included);
    if (name && cache.Use(*name)) {
      compiled.library = cache.Path(*name);
      compiled.cached = true;
      return compiled;
    }
  }
  client::TakeIncludes(job.source, text, inputs.include_folders, &before);
  CompileFolder place(job.source);
  place.WriteCopy(text);
  if (options.on_command) options.on_command(compiled.command);
  const std::int64_t start = base::FileClock();
  const client::ToolEnd end =
      client::RunTool(job.Command(&place), place.path(), options.limit, options.interrupted);
  compiled.output = place.Named(end.output);
  if (!end.well) {
    tries->changed = before.Changed({}, start);
    if (!tries->changed.empty()) return std::nullopt;
    const bool full = end.output.find(std::strerror(ENOSPC)) != std::string::npos;
    throw CompileError(
        job.source + ": does not compile: " + job.compiler[0] + " " + end.how + "\n" + compiled.output +
            (full ? "A disk is full: free space on that of " + fs::path(place.path()).parent_path().string() +
                        ", or set TMPDIR to another folder"
                  : ""),
        before.Files());
  }
  compiled.included.clear();
  for (const std::string& file : client::ReadDependencies(base::ReadWhole(place.dependencies()).bytes))
    if (!place.IsSource(file) && !IsDevice(file)) compiled.included.push_back(place.Named(file));
  const auto name = name_with(compiled.included);
  tries->included = compiled.included;
  tries->changed = before.Changed(compiled.included, start);
  if (!tries->changed.empty()) return std::nullopt;
  if (!name) {
    for (const Words& files : {inputs.files, compiled.included})
      for (const std::string& file : files) base::ReadWhole(file);  // throws why one cannot be read
    return std::nullopt;
  }
  std::string lines;
  for (const std::string& file : compiled.included) lines += file + '\0';
  cache.Write(*name, base::ReadWhole(place.library()).bytes);
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
    base::IdentityOf(source);  // before a cache is made
    const base::FileCache cache("compiled", kLibraries);
    const Job job(fs::absolute(source).string(), *language, options);
    Tries tries;
    for (int i = 0; i < kMostTries; ++i)
      if (auto compiled = TryCompile(cache, job, options, &tries)) return *std::move(compiled);
    throw CompileError(source + ": " + tries.changed + " changed each of the " + std::to_string(kMostTries) +
                       " times that it was compiled: try again when nothing writes there");
  } catch (const base::FileError& error) {
    throw CompileError(error.what());
  }
}

std::vector<std::string> CapabilitiesOf(const Json& hello) {
  std::vector<std::string> capabilities;
  const Json devices = hello.is_object() ? hello.value("devices", Json::array()) : Json::array();
  for (const Json& device : devices) {
    const Json capability = device.is_object() ? device.value("capability", Json()) : Json();
    if (!capability.is_string() || capability.get_ref<const std::string&>().empty()) continue;
    if (std::ranges::find(capabilities, capability.get_ref<const std::string&>()) == capabilities.end())
      capabilities.push_back(capability.get<std::string>());
  }
  return capabilities;
}

}  // namespace cppool
