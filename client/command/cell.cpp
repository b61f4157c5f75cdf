#include "client/command/cell.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "client/command/text.h"
#include "protocol/models.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

// The values of a cell that a filter with this key is compared with.
std::vector<Json> ValuesOf(const Cell& cell, const std::string& key) {
  if (key == "world_size") return {cell.world_size};
  if (key == "suite") return {cell.suite};
  if (key == "essential") return {cell.essential};
  if (key == "row") return {cell.rows.begin(), cell.rows.end()};
  if (key == "model" || key == "kernel_backend") {
    std::vector<Json> values;
    for (const std::string& row : cell.rows)
      for (const protocol::ModelTable& table : protocol::ModelTables())
        if (row.starts_with(table.name + ":"))
          values.push_back(key == "model" ? row.substr(table.name.size() + 1) : table.kernel_backend);
    return values;
  }
  auto found = cell.params.find(key);
  if (found == cell.params.end()) return {};
  return {*found};
}

bool Is(const Json& value, const std::string& text) {
  return value == ValueFromText(text) || value == Json(text);
}

}  // namespace

std::string NameOf(const Cell& cell) {
  std::string name = cell.rows.front();
  for (const char* key : {"dtype", "qkv_format", "cp_comm_type"})
    name += " " + cell.params.at(key).get<std::string>();
  if (cell.params.contains("pad_between_seqs"))
    name += cell.params["pad_between_seqs"] ? " padded" : " packed";
  return name + " W=" + std::to_string(cell.world_size);
}

std::vector<Cell> Select(const std::vector<Cell>& cells, const std::vector<Filter>& filters) {
  std::map<std::string, std::vector<std::string>> by_key;
  for (const Filter& filter : filters) by_key[filter.key].push_back(filter.value);
  for (const auto& [key, values] : by_key) {
    if (std::any_of(cells.begin(), cells.end(),
                    [&, &key = key](const Cell& cell) { return !ValuesOf(cell, key).empty(); }))
      continue;
    std::set<std::string> known = {"world_size", "suite", "essential", "row", "model", "kernel_backend"};
    for (const Cell& cell : cells)
      for (const auto& item : cell.params.items()) known.insert(item.key());
    throw UsageError(protocol::Unknown("key", key, {known.begin(), known.end()}, " of --filter"));
  }
  auto holds = [&](const Cell& cell) {
    return std::all_of(by_key.begin(), by_key.end(), [&](const auto& entry) {
      std::vector<Json> have = ValuesOf(cell, entry.first);
      return std::any_of(entry.second.begin(), entry.second.end(), [&](const std::string& wanted) {
        return std::any_of(have.begin(), have.end(), [&](const Json& value) { return Is(value, wanted); });
      });
    });
  };
  std::vector<Cell> selected;
  std::copy_if(cells.begin(), cells.end(), std::back_inserter(selected), holds);
  return selected;
}

std::string DescribeUnknown(const std::vector<Cell>& cells, const std::vector<Filter>& filters) {
  std::string text;
  for (const auto& [key, wanted] : filters) {
    bool there = false;
    std::set<std::string> values;
    for (const Cell& cell : cells) {
      for (const Json& value : ValuesOf(cell, key)) {
        there = there || Is(value, wanted);
        values.insert(TextFromValue(value));
      }
    }
    if (there) continue;
    const std::vector<std::string> list(values.begin(), values.end());
    text +=
        (text.empty() ? "" : "; ") + std::string("no cell has ") + key + "=" + wanted +
        (list.size() <= 12 ? " (known: " + protocol::Join(list) + ")" : protocol::DidYouMean(wanted, list));
  }
  return text;
}

void Shrink(Json* params, std::int64_t max_seqlen, int world_size) {
  auto length = [&](const char* key) -> std::int64_t {
    auto found = params->find(key);
    return found != params->end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
  };
  const std::int64_t queries = length("max_seqlen_q"), keys = length("max_seqlen_kv");
  const std::int64_t longest = std::max(queries, keys), step = 2 * std::int64_t{world_size};
  if (longest <= max_seqlen) return;
  auto shrunk = [&](std::int64_t before) {
    return std::max(step, before * max_seqlen / longest / step * step);
  };
  if (queries > 0) (*params)["max_seqlen_q"] = shrunk(queries);
  if (keys > 0) (*params)["max_seqlen_kv"] = shrunk(keys);
  const std::int64_t span = keys > 0 ? keys : queries;  // max_seqlen_kv defaults to max_seqlen_q
  const double proportion = static_cast<double>(shrunk(span)) / static_cast<double>(span);
  auto window = params->find("window_size");
  if (window == params->end() || !window->is_array()) return;
  for (Json& side : *window) {
    if (!side.is_number_integer() || side.get<std::int64_t>() <= 0) continue;
    side =
        std::max<std::int64_t>(1, std::llround(static_cast<double>(side.get<std::int64_t>()) * proportion));
  }
}

std::vector<std::size_t> RunOrder(const std::vector<Cell>& cells) {
  std::vector<std::size_t> order(cells.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return cells[a].world_size < cells[b].world_size; });
  return order;
}

std::string RepeatCommand(const std::string& program, const Cell& cell,
                          const std::vector<std::string>& common, const std::string& subcommand) {
  std::string command =
      ShellQuote(program) + " " + subcommand + " --world-size " + std::to_string(cell.world_size);
  if (cell.case_name != "attention") command += " --case " + ShellQuote(cell.case_name);
  for (const std::string& word : common) command += " " + ShellQuote(word);
  for (const auto& [key, value] : cell.params.items())
    command += " --param " + ShellQuote(key + "=" + TextFromValue(value));
  return command;
}

}  // namespace cppool::command
