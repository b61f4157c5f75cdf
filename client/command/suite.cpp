#include "client/command/suite.h"

#include <algorithm>
#include <map>
#include <utility>

#include "client/command/suite_data.h"
#include "client/command/text.h"
#include "protocol/models.h"
#include "protocol/parameters.h"

namespace cppool::command {
namespace {

using Rows = std::map<std::string, Json>;

Rows RowsOf(const Json& file) {
  Rows rows;
  for (const protocol::ModelTable& table : protocol::ModelTables())
    for (const auto& [row, params] : table.rows.items()) rows[table.name + ":" + row] = params;
  const Json own = file.value("rows", Json::object());
  for (const auto& [row, params] : own.items()) rows[row] = params;
  return rows;
}

// The rows that a name, or the beginning of a name before '*', stands for; none is an error of the file.
std::vector<std::string> Matching(const Rows& rows, const std::string& pattern) {
  const bool any_rest = pattern.ends_with('*');
  std::vector<std::string> matching;
  for (const auto& [name, params] : rows)
    if (any_rest ? name.starts_with(pattern.substr(0, pattern.size() - 1)) : name == pattern)
      matching.push_back(name);
  if (matching.empty()) throw std::runtime_error("the suite has no row '" + pattern + "'");
  return matching;
}

bool Holds(const Json& when, const Cell& cell) {
  for (const auto& [key, values] : when.items()) {
    const Json value = key == "row" ? Json(cell.rows.front()) : cell.params.value(key, Json());
    if (std::find(values.begin(), values.end(), value) == values.end()) return false;
  }
  return true;
}

// Puts what an entry of `cells`, or an alternative of an axis, says over a cell.
Cell With(Cell cell, const Json& entry) {
  cell.params.update(entry.value("set", Json::object()));
  cell.world_size = entry.value("world_size", cell.world_size);
  cell.essential = entry.value("essential", cell.essential);
  return cell;
}

std::vector<Cell> Over(const std::vector<Cell>& cells, const Json& axis) {
  std::vector<Cell> product;
  for (const Cell& cell : cells) {
    const std::size_t before = product.size();
    for (const Json& alternative : axis)
      if (Holds(alternative.value("when", Json::object()), cell)) product.push_back(With(cell, alternative));
    if (product.size() == before) product.push_back(cell);
  }
  return product;
}

}  // namespace

std::vector<Cell> CellsOfFile(const std::string& name, const Json& file) {
  const Rows rows = RowsOf(file);
  std::vector<Cell> all;
  std::map<std::string, std::size_t> places;  // in `all`, by what a cell asks for
  for (const Json& entry : file.at("cells")) {
    for (const std::string pattern : entry.at("rows")) {
      for (const std::string& row : Matching(rows, pattern)) {
        Cell first;
        first.suite = name;
        first.rows = {row};
        first.params = rows.at(row);
        std::vector<Cell> cells = {With(std::move(first), entry)};
        for (const std::string axis : entry.value("over", Json::array()))
          cells = Over(cells, file.at("axes").at(axis));
        for (Cell& cell : cells) {
          const std::string key = std::to_string(cell.world_size) + " " + cell.params.dump();
          const auto [place, fresh] = places.emplace(key, all.size());
          if (fresh) {
            cell.name = NameOf(cell);
            all.push_back(std::move(cell));
          } else {
            Cell& same = all[place->second];
            same.rows.push_back(row);
            same.essential = same.essential || cell.essential;
          }
        }
      }
    }
  }
  return all;
}

const std::vector<std::string>& SuiteNames() {
  static const std::vector<std::string> names = {"smoke", "essential", "matrix"};
  return names;
}

std::vector<Cell> LoadSuite(const std::string& name) {
  std::vector<std::string> files;
  if (name == "smoke") files = {"smoke"};
  if (name == "essential") files = {"matrix"};
  if (name == "matrix") files = {"matrix", "own"};
  if (files.empty()) throw UsageError(protocol::Unknown("suite", name, SuiteNames()));
  std::vector<Cell> cells;
  for (const std::string& file : files) {
    for (Cell& cell : CellsOfFile(file, Json::parse(SuiteText(file))))
      if (name != "essential" || cell.essential) cells.push_back(std::move(cell));
  }
  return cells;
}

}  // namespace cppool::command
