#include "client/suite/repeat.h"

#include <algorithm>
#include <iomanip>
#include <locale>
#include <sstream>
#include <type_traits>
#include <variant>

#include "base/words.h"
#include "client/src/daemon.h"
#include "client/src/request.h"
#include "client/src/shell.h"
#include "client/suite/value_text.h"
#include "protocol/run_record.h"

namespace cppool::suite {
namespace {

// The text of an option's value, for the types that options of `cppool run` have: none else, also where it
// could be converted.
std::string OptionText(const std::string& text) { return text; }
std::string OptionText(const std::int64_t& number) { return std::to_string(number); }
std::string OptionText(const std::optional<std::uint64_t>& number) { return std::to_string(*number); }
std::string OptionText(const std::chrono::milliseconds& time) {  // in seconds
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << std::setprecision(12) << static_cast<double>(time.count()) / 1000;
  return text.str();
}
std::string OptionText(const std::optional<Fault>& fault) {
  if (fault->rank == 0 && fault->stage.empty()) return fault->kind;
  return fault->kind + ":" + std::to_string(fault->rank) + (fault->stage.empty() ? "" : ":" + fault->stage);
}
std::string OptionText(bool) = delete;

template <typename Value>
concept HasOptionText = requires(const Value& value) {
  OptionText(value);
};

constexpr bool EachOptionHasText() {
  bool each = true;
  protocol::ForEach(protocol::kRunMembers, [&](const auto& member) {
    using Value = std::remove_cvref_t<decltype(RunOptions().*member.value)>;
    each = each && (!member.option || HasOptionText<Value>);
  });
  return each;
}
static_assert(EachOptionHasText(), "OptionText lacks the type of an option, which no command would have");

}  // namespace

bool HasOptions(const PoolOptions& pool, const RunOptions& run) {
  bool has = std::ranges::all_of(pool.arguments,
                                 [](const std::string& argument) { return argument == "--allow-faults"; });
  has = has && (!run.fault || run.fault->count == Fault().count);
  protocol::ForEach(protocol::kRunMembers, [&](const auto& member) {
    const std::string_view name = member.name;
    if (!member.option && name != "case" && name != "load")  // --case and --load are of cells and of pools
      has = has && protocol::IsDefault(run.*member.value, RunOptions().*member.value);
  });
  return has;
}

std::vector<std::string> OptionWords(const PoolOptions& pool, const std::vector<std::string>& libraries,
                                     const RunOptions& run, const RunOptions& defaults) {
  std::vector<std::string> words;
  const auto add = [&](const char* option, const std::string& value) {
    words.insert(words.end(), {option, value});
  };
  if (pool.backend != "auto") add("--backend", pool.backend);
  if (pool.transport != "auto") add("--transport", pool.transport);
  if (!pool.devices.empty()) add("--devices", base::Join(pool.devices, ","));  // '' for no device
  if (!pool.daemon.empty()) add("--daemon", pool.daemon);
  if (!pool.attach.empty()) add("--attach", pool.attach);
  if (pool.launch) add("--launch", *pool.launch);
  for (const std::string& library : libraries) add("--load", library);
  protocol::ForEach(protocol::kRunMembers, [&](const auto& member) {
    const auto& value = run.*member.value;
    if constexpr (HasOptionText<std::remove_cvref_t<decltype(value)>>)
      if (member.option && !protocol::IsDefault(value, defaults.*member.value))
        add(member.option, OptionText(value));
  });
  return words;
}

std::string RepeatCommand(const std::string& program, const Cell& cell,
                          const std::vector<std::string>& common, const std::string& subcommand) {
  std::string command =
      client::ShellQuote(program) + " " + subcommand + " --world-size " + std::to_string(cell.world_size);
  if (cell.case_name != "attention") command += " --case " + client::ShellQuote(cell.case_name);
  for (const std::string& word : common) command += " " + client::ShellQuote(word);
  for (const auto& [key, value] : cell.params.items())
    command += " --param " + client::ShellQuote(key + "=" + TextFromValue(value));
  return command;
}

// Values of environment variables are in no command.
static std::string WithoutSecrets(const std::string& request) {
  protocol::Json json = protocol::Json::parse(request);
  if (!json.contains("python") || !json.at("python").contains("env")) return request;
  json.at("python").erase("env");
  return json.dump();
}

std::string PipeCommand(PoolOptions options, const std::vector<protocol::Request>& requests) {
  std::string command = "printf '%s\\n'";
  for (const protocol::Request& request : requests)
    command += " " + client::ShellQuote(WithoutSecrets(protocol::SerializeRequest(request)));
  command += " | " + Assignments(options);
  if (!options.devices.empty())
    command += "CUDA_VISIBLE_DEVICES=" + client::ShellQuote(base::Join(options.devices, ",")) + " ";
  options.sentinel.clear();
  std::vector<std::string> words = client::DaemonArguments(options);
  for (const char* option : {"--backend", "--transport"})
    if (const auto at = std::ranges::find(words, option); at[1] == "auto") words.erase(at, at + 2);
  words.insert(words.begin(), options.daemon.empty() ? "cppoold" : options.daemon);
  return command + client::ShellCommand(words);
}

std::string Assignments(const PoolOptions& options) {
  constexpr std::string_view kWord = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_0123456789";
  if (options.environment.empty()) return "";
  std::string text = "env ";
  if (!options.python && options.environment.front().first.starts_with("-"))
    text += "-- ";  // else it would be an option
  for (const auto& [name, value] : options.environment) {
    if (!options.python)
      text += client::ShellQuote(name + "=" + value) + " ";
    else if (name.find_first_not_of(kWord) == std::string::npos &&
             !(name[0] >= '0' && name[0] <= '9'))  // as of cases: the shell has the value, or asks for it
      text += name + "=\"${" + name + "?}\" ";
  }
  return text;
}

std::string RepeatCommand(const PoolOptions& options, const protocol::RunRequest& request) {
  std::vector<std::string> libraries;  // that may hold the case; attention is built in
  if (request.case_name != Cell().case_name) {
    libraries = options.case_files;
    libraries.insert(libraries.end(), request.load.begin(), request.load.end());
  }
  // `cppool run` takes no string form, and refuses a library that the case is not in; which one that is only
  // a daemon can tell.
  if (request.from_kwargs || libraries.size() > 1 || !HasOptions(options, request))
    return PipeCommand(options, {{std::nullopt, request}});
  Cell cell;
  cell.world_size = options.world_size;
  cell.case_name = request.case_name;
  cell.params = request.params;
  return Assignments(options) + RepeatCommand("cppool", cell, OptionWords(options, libraries, request));
}

}  // namespace cppool::suite

namespace cppool {

static std::string CommandOf(const client::Asked* asked) {
  return asked ? suite::RepeatCommand(*asked->options, std::get<protocol::RunRequest>(asked->operation)) : "";
}
std::string Result::Command() const { return CommandOf(asked.get()); }
std::string PoolError::Command() const { return CommandOf(asked_.get()); }

}  // namespace cppool
