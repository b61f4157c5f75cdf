#include "client/src/compile_inputs.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "base/digest.h"

namespace cppool::client {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> TextIfThere(const std::string& file) {
  try {
    return base::ReadWhole(file).bytes;
  } catch (const base::FileError&) {
    return std::nullopt;
  }
}

bool IsFile(const std::string& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

// "-Wl,--version-script=a" to "-Wl", "--version-script", "a". Response files are followed by what they hold.
void AppendPieces(const Words& flags, int depth, Words* pieces) {
  for (const std::string& flag : flags) {
    for (std::size_t at = 0; at <= flag.size();) {
      const std::size_t end = std::min(flag.find_first_of(",=", at), flag.size());
      const std::string piece = flag.substr(at, end - at);
      at = end + 1;
      const bool follows =
          !pieces->empty() && (pieces->back() == "-optf" || pieces->back() == "--options-file");
      const std::string file = piece.starts_with('@') ? piece.substr(1) : piece;
      pieces->push_back(file == piece || IsFile(file) ? file : piece);
      if ((file == piece && !follows) || depth == 0) continue;
      if (const auto text = TextIfThere(file)) AppendPieces(Split(*text), depth - 1, pieces);
    }
  }
}

// What an #include of this line names, with its first quotation mark or bracket; empty: it is none.
std::string_view IncludedBy(std::string_view line) {
  const auto skip = [&](std::string_view word) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    const bool there = line.starts_with(word);
    if (there) line.remove_prefix(word.size());
    return there;
  };
  if (!skip("#") || !skip("include")) return {};
  skip("_next");
  skip("");
  if (line.empty() || (line[0] != '"' && line[0] != '<')) return {};
  return line.substr(0, std::min(line.find(line[0] == '"' ? '"' : '>', 1), line.size()));
}

}  // namespace

Words Split(const std::string& text) {
  std::istringstream stream(text);
  Words words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

bool Snapshot::Take(const std::string& file) {
  if (files_.count(file) != 0) return false;
  files_[file] = base::IdentityIfThere(file);
  return true;
}

std::string Snapshot::Changed(const Words& files, std::int64_t since) const {
  for (const auto& [file, before] : files_)
    if (base::IdentityIfThere(file) != before) return file;
  for (const std::string& file : files) {
    if (files_.count(file) != 0) continue;
    const auto identity = base::IdentityIfThere(file);
    if (!identity || identity->changed_ns >= since) return file;
  }
  return "";
}

Words Snapshot::Files() const {
  Words files;
  for (const auto& [file, identity] : files_) files.push_back(file);
  return files;
}

FlagInputs InputsOf(const Words& flags, const Words& library_folders) {
  constexpr int kDeepest = 8;  // response files that name each other
  Words pieces;
  AppendPieces(flags, kDeepest, &pieces);
  FlagInputs inputs;
  Words libraries, searched;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    // "-Ifolder" or "-I folder".
    const auto value = [&](std::string_view option) -> std::optional<std::string> {
      if (!pieces[i].starts_with(option)) return std::nullopt;
      if (pieces[i].size() > option.size()) return pieces[i].substr(option.size());
      return i + 1 < pieces.size() ? std::optional(pieces[++i]) : std::nullopt;
    };
    const auto first = [&](std::initializer_list<std::string_view> options) -> std::optional<std::string> {
      for (const std::string_view option : options)
        if (auto found = value(option)) return found;
      return std::nullopt;
    };
    if (const auto folder = first({"-L", "--library-path"})) {
      searched.push_back(*folder);
    } else if (const auto include =
                   first({"-isystem", "-iquote", "-I", "--include-path", "--system-include"})) {
      inputs.include_folders.push_back(*include);
    } else if (const auto library = first({"-l", "--library"})) {
      libraries.push_back(*library);
    } else if (IsFile(pieces[i])) {
      inputs.files.push_back(pieces[i]);
    }
  }
  searched.insert(searched.end(), library_folders.begin(), library_folders.end());
  for (const std::string& library : libraries) {
    for (const std::string& folder : searched) {
      for (const std::string& name : library.starts_with(':')
                                         ? Words{library.substr(1)}
                                         : Words{"lib" + library + ".a", "lib" + library + ".so"})
        if (const std::string file = folder + "/" + name; IsFile(file)) inputs.files.push_back(file);
    }
  }
  return inputs;
}

void TakeIncludes(const std::string& source, std::string_view text, const Words& folders,
                  Snapshot* snapshot) {
  const fs::path own = fs::path(source).parent_path();
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view name = IncludedBy(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (name.size() < 2) continue;
    std::vector<fs::path> searched(folders.begin(), folders.end());
    if (name[0] == '"') searched.insert(searched.begin(), own);
    for (const fs::path& folder : searched) {
      const std::string file = (folder / name.substr(1)).string();
      const bool taken = snapshot->Take(file);
      if (!IsFile(file)) continue;
      if (taken)
        if (const auto included = TextIfThere(file)) TakeIncludes(file, *included, folders, snapshot);
      break;
    }
  }
}

Words ReadDependencies(const std::string& text) {
  Words files;
  std::string file;
  const auto end = [&] {
    if (!file.empty()) files.push_back(file);
    file.clear();
  };
  for (std::size_t i = std::min(text.find(": "), text.size()) + 1; i < text.size(); ++i) {
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (text[i] == '\\' && (next == ' ' || next == '\t' || next == '\\' || next == '#')) {
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
  std::ranges::sort(files);
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

std::optional<std::string> DigestWith(std::string key, const Words& files) {
  for (const std::string& file : files) {
    const auto text = TextIfThere(file);
    if (!text) return std::nullopt;
    key += "\n" + file + " " + base::Digest(*text);
  }
  return base::Digest(key);
}

}  // namespace cppool::client
