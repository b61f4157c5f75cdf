#include "client/command/cell_files.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/new_file.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"

namespace cppool::command {
namespace {

namespace fs = std::filesystem;

constexpr int kMostAgain = 20;
constexpr std::uintmax_t kMostBytes = std::uintmax_t{2} << 30;
constexpr std::size_t kLongestName = 200;  // file systems take 255 bytes

void MakeFolder(const char* option, const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw suite::UsageError(std::string(option) + ": cannot make the folder " + protocol::Quoted(folder) +
                            ": " + error.message());
  const std::string file = (fs::path(folder) / "index.json").string();
  if (const std::string why = base::WhyNotWritable(file); !why.empty())
    throw suite::UsageError(std::string(option) + ": cannot write " + protocol::Quoted(file) + ": " + why);
}

std::uintmax_t BytesIn(const fs::path& folder) {
  std::uintmax_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code not_a_file;
    const std::uintmax_t size = fs::file_size(at->path(), not_a_file);
    if (!not_a_file) bytes += size;
  }
  return bytes;
}

}  // namespace

std::string FileNameOf(const std::string& cell) {
  std::string name;
  for (const char c : cell) {
    if (c == '=') continue;
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) ||
                       std::string_view("._+,#").find(c) != std::string_view::npos;
    if (plain && !(c == '.' && name.empty()))
      name += c;
    else if (!name.ends_with('-'))
      name += '-';
  }
  name.resize(std::min(name.size(), kLongestName));
  return name.empty() ? "cell" : name;
}

CellFiles::CellFiles(const RunArguments& arguments, const std::vector<suite::Cell>& cells)
    : arguments_(arguments), for_each_(!arguments.suite.empty() || cells.size() > 1) {
  if (arguments.list) return;
  if (!arguments.failures.empty()) MakeFolder("--failures", arguments.failures);
  const std::string& trace = arguments.options.trace;
  if (for_each_) {
    if (!arguments.options.dump.empty()) MakeFolder("--dump", arguments.options.dump);
    if (!trace.empty()) MakeFolder("--trace", trace);
  } else if (const std::string why = trace.empty() ? "" : base::WhyNotWritable(trace); !why.empty()) {
    throw suite::UsageError("--trace: cannot write " + protocol::Quoted(trace) + ": " + why);
  }
}

std::string CellFiles::EntryOf(const suite::Cell& cell) {
  const auto [known, fresh] = entries_.try_emplace(cell.name);
  if (!fresh) return known->second;
  const std::string name = FileNameOf(cell.name);
  std::string entry = name;
  const auto taken = [&] {
    return std::ranges::any_of(entries_, [&](const auto& other) { return other.second == entry; });
  };
  for (int i = 2; taken(); ++i) entry = name + "-" + std::to_string(i);
  return known->second = entry;
}

void CellFiles::Choose(const suite::Cell& cell, RunOptions* options) {
  if (!for_each_) return;
  if (!options->dump.empty()) options->dump = (fs::path(options->dump) / EntryOf(cell)).string();
  if (!options->trace.empty())
    options->trace = (fs::path(options->trace) / (EntryOf(cell) + ".json")).string();
}

bool CellFiles::Wants(const Outcome& outcome) const {
  return !arguments_.failures.empty() && outcome.failed() && outcome.asked && !outcome.refused();
}

Again CellFiles::RunAgain(const suite::Cell& cell, RunOptions options, CellRunner& runner,
                          CaseOutput& output) {
  Again again;
  if (kept_ >= kMostAgain || bytes_ >= kMostBytes) {
    again.note = "--failures keeps at most " + std::to_string(kMostAgain) + " cells and 2 GiB";
    return again;
  }
  ++kept_;
  const fs::path folder = fs::path(arguments_.failures) / EntryOf(cell);
  again.folder = folder.string();
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    again.note = "cannot make " + std::exchange(again.folder, "") + ": " + error.message();
    return again;
  }
  // Not every case can be dumped, nor every pool traced.
  options.dump = (folder / "dump").string();
  if (runner.Validate(cell, options).refused()) options.dump.clear();
  options.trace = (folder / "trace.json").string();
  if (runner.Validate(cell, options).refused()) options.trace.clear();
  output.CopyTo((folder / "log.txt").string());
  const Outcome outcome = runner.Run(cell, options);
  output.Note(Summary(outcome.kind, outcome.error));
  output.CopyTo("");
  again.kind = outcome.kind;
  again.error = outcome.error;
  const std::uintmax_t bytes = BytesIn(folder);
  if (bytes_ + bytes > kMostBytes) {
    fs::remove_all(folder / "dump", error);
    again.note = "its dump is not kept: with it " + arguments_.failures + " would have more than 2 GiB";
  }
  bytes_ += BytesIn(folder);
  return again;
}

}  // namespace cppool::command
