#include "client/suite/cell.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/words.h"
#include "client/suite/value_text.h"
#include "protocol/models.h"
#include "protocol/parameters.h"

namespace cppool::suite {
namespace {

// Returns the values of a cell that a filter with this key is compared with.
std::vector<Json> ValuesOf(const Cell& cell, const std::string& key) {
  if (key == "world_size") return {cell.world_size};
  if (key == "suite") return {cell.suite};
  if (key == "essential") return {cell.essential};
  if (key == "name") return {cell.name};
  if (key == "row") return {cell.rows.begin(), cell.rows.end()};
  if (key == "model" || key == "kernel_backend") {
    std::vector<Json> values;
    for (const std::string& row : cell.rows)
      for (const protocol::ModelTable& table : protocol::ModelTables())
        if (row.starts_with(table.name + ":"))
          values.push_back(key == "model" ? row.substr(table.name.size() + 1) : table.kernel_backend);
    return values;
  }
  if (auto found = cell.params.find(key); found != cell.params.end()) return {*found};
  for (const auto& [axis, value] : AxesOf(cell))
    if (axis == key) return {value};
  return {};
}

std::string WindowOf(const Json& window, const std::string& mask) {
  if (!window.is_array() || window.size() != 2) return TextFromValue(window);
  const bool causal = mask.find("causal") != std::string::npos;
  const bool left = window[0] != -1;
  const bool right =
      !causal && window[1] != -1 && window != Json{-1, 0};  // (-1, 0) without a causal mask means open
  return left && right ? "left and right" : left ? "left" : right ? "right" : "open";
}

// Escapes a text for fnmatch(3), so that `*` and `?` alone are special.
std::string GlobOf(const std::string& text) {
  std::string glob;
  for (const char c : text) glob += (c == '[' || c == '\\' ? "\\" : "") + std::string(1, c);
  return glob;
}

bool Is(const Json& value, const std::string& text) {
  if (value == ValueFromText(text) || value == Json(text)) return true;
  return text.find_first_of("*?") != std::string::npos &&
         fnmatch(GlobOf(text).c_str(), TextFromValue(value).c_str(), 0) == 0;
}

bool HasValue(const Cell& cell, const Filter& filter) {
  const std::vector<Json> values = ValuesOf(cell, filter.key);
  return std::ranges::any_of(values, [&](const Json& value) { return Is(value, filter.value); });
}

using FiltersByKey = std::map<std::string, std::vector<Filter>>;

FiltersByKey ByKey(const std::vector<Filter>& filters) {
  FiltersByKey by_key;
  for (const Filter& filter : filters) by_key[filter.key].push_back(filter);
  return by_key;
}

bool Matches(const Cell& cell, const std::vector<Filter>& of_one_key) {
  bool wanted = false, has = false;
  for (const Filter& filter : of_one_key) {
    const bool here = HasValue(cell, filter);
    if (filter.negated && here) return false;
    wanted = wanted || !filter.negated;
    has = has || (!filter.negated && here);
  }
  return has || !wanted;
}

bool Matches(const Cell& cell, const FiltersByKey& by_key, const std::string& but_for = "") {
  return std::ranges::all_of(
      by_key, [&](const auto& entry) { return entry.first == but_for || Matches(cell, entry.second); });
}

}  // namespace

std::string RecipeOf(const Cell& cell) {
  if (cell.params.value("dtype", Json()) != "fp8") return "";
  const auto is = [&](const char* flag) { return cell.params.value(flag, Json()) == true; };
  const Json mode = cell.params.value("scaling_mode", Json());
  std::string text = mode.is_null() ? "delayed" : TextFromValue(mode);
  if (is("fp8_mha")) text += " mha";
  if (is("fp8_dpa") && !is("fp8_mha")) text += " dpa";
  if (is("fp8_bwd")) text += " bwd";
  if (is("f16_O")) text += " f16_O";
  return text;
}

std::vector<std::pair<std::string, std::string>> AxesOf(const Cell& cell) {
  std::vector<std::pair<std::string, std::string>> axes;
  auto text = [&](const char* key) {
    auto found = cell.params.find(key);
    return found == cell.params.end() ? std::string() : TextFromValue(*found);
  };
  auto add = [&](const char* axis, const std::string& value) {
    if (!value.empty()) axes.emplace_back(axis, value);
  };
  add("schedule", text("cp_comm_type"));
  const std::string between = text("pad_between_seqs");
  add("format", text("qkv_format") + (between == "true" ? " padded" : between == "false" ? " packed" : ""));
  const std::string mask = text("attn_mask_type");
  add("mask", mask);
  const std::string bias = text("attn_bias_type");
  add("bias", bias == "post_scale_bias" ? bias + " " + text("bias_shape") : bias);
  add("softmax", text("softmax_type"));
  if (cell.params.contains("window_size")) add("window", WindowOf(cell.params["window_size"], mask));
  const std::string heads = text("num_heads"), groups = text("num_gqa_groups");
  if (!heads.empty() && !groups.empty())
    add("heads", heads == groups ? "MHA" : groups == "1" ? "MQA" : "GQA");
  const std::string qk = text("head_dim_qk"), v = text("head_dim_v");
  add("head dim", qk == v || v.empty() ? qk : qk + "/" + v);
  add("dtype", text("dtype"));
  add("recipe", RecipeOf(cell));
  static const std::set<std::string> kShown = {
      "cp_comm_type", "qkv_format",   "pad_between_seqs", "attn_mask_type", "attn_bias_type", "bias_shape",
      "softmax_type", "window_size",  "num_heads",        "num_gqa_groups", "head_dim_qk",    "head_dim_v",
      "dtype",        "scaling_mode", "fp8_dpa",          "fp8_mha",        "fp8_bwd",        "f16_O"};
  for (const std::string& key : cell.varied)
    if (kShown.count(key) == 0) add(key.c_str(), text(key.c_str()));
  add("world size", std::to_string(cell.world_size));
  return axes;
}

std::string NameOf(const Cell& cell) {
  std::string name = cell.rows.empty() ? cell.case_name : cell.rows.front();
  const auto has = [&](const char* key) { return cell.params.contains(key); };
  std::set<std::string> shown = {"pad_between_seqs"};
  for (const char* key : {"dtype", "qkv_format", "cp_comm_type"}) {
    if (has(key)) name += " " + TextFromValue(cell.params[key]);
    shown.insert(key);
  }
  if (has("pad_between_seqs")) name += cell.params["pad_between_seqs"] == true ? " padded" : " packed";
  if (const std::string recipe = RecipeOf(cell); !recipe.empty()) {
    name += " " + recipe;
    shown.insert({"scaling_mode", "fp8_dpa", "fp8_mha", "fp8_bwd", "f16_O"});
  }
  for (const std::string& key : cell.varied)
    if (shown.insert(key).second) name += " " + key + "=" + TextFromValue(cell.params.value(key, Json()));
  return name + " W=" + std::to_string(cell.world_size);
}

void MakeNamesUnique(std::vector<Cell>* cells) {
  std::map<std::string, int> times;
  for (Cell& cell : *cells)
    if (const int time = ++times[cell.name]; time > 1) cell.name += " #" + std::to_string(time);
}

void MakeIds(std::vector<Cell>* cells) {
  std::set<std::string> taken;
  for (Cell& cell : *cells) {
    std::string id;
    for (const char c : cell.name) {
      if (('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9'))
        id += c;
      else if (c != '=' && !id.empty() && id.back() != '_')
        id += '_';
    }
    cell.id = id;
    for (int time = 2; !taken.insert(cell.id).second; ++time) cell.id = id + "_" + std::to_string(time);
  }
}

Filter FilterFromText(const std::string& text, const std::string& option) {
  auto [key, value] = SplitAssignment(text, option);
  const bool negated = key.ends_with('!');
  if (negated) key.pop_back();
  if (key.empty()) throw UsageError(option + " takes key=value or key!=value, not '" + text + "'");
  return {key, value, negated};
}

std::vector<Cell> Select(const std::vector<Cell>& cells, const std::vector<Filter>& filters) {
  const FiltersByKey by_key = ByKey(filters);
  for (const auto& [key, of_key] : by_key) {
    if (std::ranges::any_of(cells,
                            [&, &key = key](const Cell& cell) { return !ValuesOf(cell, key).empty(); }))
      continue;
    std::set<std::string> known = {"world_size", "suite",          "essential", "row",
                                   "model",      "kernel_backend", "name"};
    for (const Cell& cell : cells) {
      for (const auto& item : cell.params.items()) known.insert(item.key());
      for (const auto& axis : AxesOf(cell)) known.insert(axis.first);
    }
    throw UsageError(protocol::Unknown("key", key, {known.begin(), known.end()}, " of --filter"));
  }
  std::vector<Cell> selected;
  std::copy_if(cells.begin(), cells.end(), std::back_inserter(selected),
               [&](const Cell& cell) { return Matches(cell, by_key); });
  return selected;
}

std::string DescribeNoMatch(const std::vector<Cell>& cells, const std::vector<Filter>& filters) {
  constexpr std::size_t kShown = 12;
  std::string text;
  for (const Filter& filter : filters) {
    if (filter.negated ||
        std::ranges::any_of(cells, [&](const Cell& cell) { return HasValue(cell, filter); }))
      continue;
    std::set<std::string> values;
    for (const Cell& cell : cells)
      for (const Json& value : ValuesOf(cell, filter.key)) values.insert(TextFromValue(value));
    std::vector<std::string> known(values.begin(), values.end());
    const std::string nearest = protocol::DidYouMean(filter.value, known);
    if (known.size() > kShown) {
      known.resize(kShown);
      known.push_back("... (" + std::to_string(values.size()) + " in all)");
    }
    text += (text.empty() ? "" : "; ") + std::string("no cell has ") + filter.key + "=" + filter.value +
            nearest + " (known: " + base::Join(known) + ")";
  }
  if (!text.empty()) return text;
  const FiltersByKey by_key = ByKey(filters);
  text = "no cell matches all of them";
  for (const auto& [key, of_key] : by_key) {
    const auto without = std::ranges::count_if(
        cells, [&, &key = key](const Cell& cell) { return Matches(cell, by_key, key); });
    if (without > 0) text += "; without " + key + " " + std::to_string(without) + " would";
  }
  return text;
}

void Shrink(Json* params, std::int64_t max_seqlen, int world_size) {
  auto length = [&](const char* key) -> std::int64_t {
    auto found = params->find(key);
    return found != params->end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
  };
  const std::int64_t queries = length("max_seqlen_q"), keys = length("max_seqlen_kv");
  // Chunks of mxfp8 have whole blocks of 32 tokens.
  const std::int64_t block = params->value("scaling_mode", Json()) == "mxfp8" ? 32 : 1;
  const std::int64_t longest = std::max(queries, keys), step = 2 * block * std::int64_t{world_size};
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
  std::ranges::stable_sort(
      order, [&](std::size_t a, std::size_t b) { return cells[a].world_size < cells[b].world_size; });
  return order;
}

}  // namespace cppool::suite
