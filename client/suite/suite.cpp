#include "client/suite/suite.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <ostream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "client/suite/suite_data.h"
#include "client/suite/value_text.h"
#include "protocol/json_text.h"
#include "protocol/models.h"
#include "protocol/parameters.h"
#include "protocol/start.h"

namespace cppool::suite {
namespace {

using Names = std::vector<std::string>;
using Rows = std::map<std::string, Json>;

Names KeysOf(const Json& object) {
  Names keys;
  for (const auto& item : object.items()) keys.push_back(item.key());
  return keys;
}

// A part of the file and its place, "cells[3].world_size", for errors.
class Part {
 public:
  Part(const std::string& suite, const Json& json, std::string place = "")
      : suite_(suite), json_(json), place_(std::move(place)) {}

  [[noreturn]] void Refuse(const std::string& why) const {
    throw UsageError("suite " + suite_ + ": " + (place_.empty() ? "" : place_ + ": ") + why);
  }
  const Json& json() const { return json_; }
  const Part& Object() const {
    if (!json_.is_object()) Refuse("must be an object, not " + protocol::EchoValue(json_));
    return *this;
  }
  // Throws when there is no member.
  const Part& Members() const {
    if (Object().json_.empty()) Refuse("must have at least one member");
    return *this;
  }
  const Part& Object(const Names& known) const {
    Object();
    for (const auto& item : json_.items())
      if (std::ranges::find(known, item.key()) == known.end())
        Refuse(protocol::Unknown("key", item.key(), known));
    return *this;
  }
  bool Has(const std::string& key) const { return json_.contains(key); }
  Part At(const std::string& key) const {
    return {suite_, json_.at(key), place_.empty() ? key : place_ + "." + key};
  }
  // Returns the elements of a list that is not empty.
  std::vector<Part> Elements() const {
    if (!json_.is_array() || json_.empty()) Refuse("must be a list with at least one element");
    std::vector<Part> elements;
    for (std::size_t i = 0; i < json_.size(); ++i)
      elements.emplace_back(suite_, json_[i], place_ + "[" + std::to_string(i) + "]");
    return elements;
  }
  std::string Text() const {
    if (!json_.is_string() || json_.get_ref<const std::string&>().empty())
      Refuse("must be a text, not " + protocol::EchoValue(json_));
    return json_.get<std::string>();
  }
  bool Flag() const {
    if (!json_.is_boolean()) Refuse("must be true or false, not " + protocol::EchoValue(json_));
    return json_.get<bool>();
  }
  int WorldSize() const {
    if (!json_.is_number_integer() || json_ < 1 || json_ > protocol::kMaxWorldSize) {
      Refuse("must be an integer from 1 to " + std::to_string(protocol::kMaxWorldSize) + ", not " +
             protocol::EchoValue(json_));
    }
    return json_.get<int>();
  }

 private:
  const std::string& suite_;
  const Json& json_;
  std::string place_;
};

void Vary(Cell* cell, const std::string& key) {
  if (std::ranges::find(cell->varied, key) == cell->varied.end()) cell->varied.push_back(key);
}

class Suite {
 public:
  Suite(const std::string& name, const Json& json) : name_(name), file_(name_, json) {
    file_.Object({"about", "case", "rows", "axes", "cells"});
    for (const protocol::ModelTable& table : protocol::ModelTables())
      for (const auto& [row, params] : table.rows.items()) rows_[table.name + ":" + row] = params;
    if (!file_.Has("rows")) return;
    for (const std::string& row : KeysOf(file_.At("rows").Object().json()))
      rows_[row] = file_.At("rows").At(row).Object().json();
  }

  std::vector<Cell> Cells() {
    if (!file_.Has("cells")) file_.Refuse("has no \"cells\"");
    for (const Part& entry : file_.At("cells").Elements()) AddEntry(entry);
    MakeNamesUnique(&all_);
    return std::move(all_);
  }

 private:
  // Returns the rows that a name, or the beginning of a name before '*', stands for.
  Names Matching(const Part& pattern) const {
    const std::string text = pattern.Text();
    const bool any_rest = text.ends_with('*');
    Names matching, known;
    for (const auto& [name, params] : rows_) {
      known.push_back(name);
      if (any_rest ? name.starts_with(text.substr(0, text.size() - 1)) : name == text)
        matching.push_back(name);
    }
    if (matching.empty())
      pattern.Refuse("there is no row " + protocol::Quoted(text) + protocol::DidYouMean(text, known));
    return matching;
  }

  static bool Holds(const Part& when, const Cell& cell) {
    for (const std::string& key : KeysOf(when.Object().json())) {
      const Json value = key == "row" ? (cell.rows.empty() ? Json() : Json(cell.rows.front()))
                                      : cell.params.value(key, Json());
      const std::vector<Part> values = when.At(key).Elements();
      if (std::ranges::none_of(values, [&](const Part& one) { return one.json() == value; })) return false;
    }
    return true;
  }

  // What an entry of `cells`, or an alternative of an axis, puts over a cell.
  static void Put(const Part& entry, Cell* cell) {
    if (entry.Has("set")) cell->params.update(entry.At("set").Object().json());
    if (entry.Has("essential")) cell->essential = entry.At("essential").Flag();
  }

  std::vector<Cell> OverAxis(const std::vector<Cell>& cells, const Part& axis) const {
    std::vector<Cell> product;
    for (const Cell& cell : cells) {
      const std::size_t before = product.size();
      for (const Part& alternative : axis.Elements()) {
        alternative.Object({"set", "world_size", "essential", "when"});
        if (alternative.Has("when") && !Holds(alternative.At("when"), cell)) continue;
        Cell with = cell;
        Put(alternative, &with);
        if (alternative.Has("world_size")) with.world_size = alternative.At("world_size").WorldSize();
        product.push_back(std::move(with));
      }
      if (product.size() == before) product.push_back(cell);
    }
    return product;
  }

  static void CheckCount(const Part& place, std::size_t count) {
    if (count > kMaxCells) {
      place.Refuse("makes more than " + std::to_string(kMaxCells) +
                   " cells: give fewer values, or make several suites");
    }
  }

  static std::vector<Cell> OverValues(const std::vector<Cell>& cells, const Part& product) {
    std::vector<Cell> all = cells;
    for (const std::string& key : KeysOf(product.Members().json())) {
      std::vector<Cell> longer;
      const std::vector<Part> values = product.At(key).Elements();
      CheckCount(product, all.size() * values.size());
      for (const Cell& cell : all)
        for (const Part& value : values) {
          longer.push_back(cell);
          longer.back().params[key] = value.json();
          Vary(&longer.back(), key);
        }
      all = std::move(longer);
    }
    return all;
  }

  // Returns the cells of an entry before its products: a row at each world size.
  std::vector<Cell> FirstOf(const Part& entry) const {
    Cell cell;
    cell.suite = name_;
    if (file_.Has("case")) cell.case_name = file_.At("case").Text();
    if (entry.Has("case")) cell.case_name = entry.At("case").Text();
    Names rows;
    if (entry.Has("rows"))
      for (const Part& pattern : entry.At("rows").Elements())
        for (const std::string& row : Matching(pattern)) rows.push_back(row);
    std::vector<int> world_sizes;
    if (entry.Has("world_size") && entry.At("world_size").json().is_array()) {
      for (const Part& size : entry.At("world_size").Elements()) world_sizes.push_back(size.WorldSize());
    } else {
      world_sizes.push_back(entry.Has("world_size") ? entry.At("world_size").WorldSize() : cell.world_size);
    }
    std::vector<Cell> cells;
    const auto add = [&] {
      Put(entry, &cell);
      for (const int size : world_sizes) {
        cell.world_size = size;
        cells.push_back(cell);
      }
    };
    for (const std::string& row : rows) {
      cell.rows = {row};
      cell.params = rows_.at(row);
      add();
    }
    if (rows.empty()) add();
    return cells;
  }

  void AddEntry(const Part& entry) {
    entry.Object({"rows", "case", "world_size", "set", "essential", "product", "over"});
    for (const Cell& first : FirstOf(entry)) {
      std::vector<Cell> cells = {first};
      if (entry.Has("product")) cells = OverValues(cells, entry.At("product"));
      if (entry.Has("over")) {
        for (const Part& axis : entry.At("over").Elements()) {
          const Names known = file_.Has("axes") ? KeysOf(file_.At("axes").Object().json()) : Names();
          if (std::ranges::find(known, axis.Text()) == known.end())
            axis.Refuse(protocol::Unknown("axis", axis.Text(), known));
          const Part alternatives = file_.At("axes").At(axis.Text());
          CheckCount(axis, cells.size() * alternatives.Elements().size());
          cells = OverAxis(cells, alternatives);
        }
      }
      CheckCount(entry, all_.size() + cells.size());
      for (Cell& cell : cells) Add(std::move(cell));
    }
  }

  // A cell that is there already gets the row of the new one.
  void Add(Cell cell) {
    const std::string key = std::to_string(cell.world_size) + " " + cell.case_name + " " + cell.params.dump();
    const auto [place, fresh] = places_.emplace(key, all_.size());
    if (fresh) {
      cell.name = NameOf(cell);
      all_.push_back(std::move(cell));
      return;
    }
    Cell& same = all_[place->second];
    same.rows.insert(same.rows.end(), cell.rows.begin(), cell.rows.end());
    same.essential = same.essential || cell.essential;
  }

  const std::string name_;
  const Part file_;
  Rows rows_;
  std::vector<Cell> all_;
  std::map<std::string, std::size_t> places_;  // in all_, by what a cell asks for
};

Json ReadSuite(const std::string& path) {
  const auto refuse = [&](int error) {
    const bool named = path.find_first_of("./") != std::string::npos;  // else it was meant as a built-in one
    throw UsageError((named ? "suite " + path : protocol::Unknown("suite", path, SuiteNames())) +
                     ": cannot be read as a file: " + std::strerror(error));
  };
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) refuse(EISDIR);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(errno);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) refuse(errno);
  try {
    return protocol::ParseJson(text);
  } catch (const protocol::InvalidRequest& error) {
    throw UsageError("suite " + path + ": " + error.what());
  }
}

}  // namespace

std::vector<Cell> CellsOfFile(const std::string& name, const Json& file) { return Suite(name, file).Cells(); }

const std::vector<std::string>& SuiteNames() {
  static const std::vector<std::string> names = {"smoke", "essential", "matrix"};
  return names;
}

std::vector<Cell> LoadSuite(const std::string& name_or_path) {
  std::vector<std::string> files;
  if (name_or_path == "smoke") files = {"smoke"};
  if (name_or_path == "essential") files = {"matrix"};
  if (name_or_path == "matrix") files = {"matrix", "fp8", "own"};
  if (files.empty())
    return CellsOfFile(std::filesystem::path(name_or_path).stem().string(), ReadSuite(name_or_path));
  std::vector<Cell> cells;
  for (const std::string& file : files) {
    for (Cell& cell : CellsOfFile(file, Json::parse(SuiteText(file))))
      if (name_or_path != "essential" || cell.essential) cells.push_back(std::move(cell));
  }
  return cells;
}

}  // namespace cppool::suite

namespace cppool {

std::ostream& operator<<(std::ostream& out, const Cell& cell) { return out << cell.name; }

std::vector<Cell> LoadSuite(const std::string& name_or_path, const SuiteOptions& options) try {
  if (options.max_seqlen < 0) throw std::invalid_argument("max_seqlen is 0 (as they are) or more");
  std::vector<suite::Filter> filters;
  for (const std::string& filter : options.filters)
    filters.push_back(suite::FilterFromText(filter, "a filter"));
  std::vector<Cell> suite = suite::LoadSuite(name_or_path);
  suite::MakeIds(&suite);
  const std::vector<Cell> selected = suite::Select(suite, filters);
  if (selected.empty())
    throw std::invalid_argument("no cell of the suite matches the filters: " +
                                suite::DescribeNoMatch(suite, filters));
  std::vector<Cell> cells;
  for (const std::size_t index : suite::RunOrder(selected)) {
    cells.push_back(selected[index]);
    if (options.max_seqlen > 0)
      suite::Shrink(&cells.back().params, options.max_seqlen, cells.back().world_size);
  }
  return cells;
} catch (const suite::UsageError& error) {
  throw std::invalid_argument(error.what());
}

}  // namespace cppool
