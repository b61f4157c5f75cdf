#include "protocol/models.h"

#include <utility>

#include "protocol/model_data.h"

namespace cppool::protocol {
namespace {

std::vector<ModelTable> ReadTables() {
  const Json file = Json::parse(ModelText("models"));
  std::vector<ModelTable> tables;
  for (const auto& [name, content] : file.at("tables").items()) {
    ModelTable table{name, content.at("kernel_backend"), Json::object()};
    for (const auto& [row, parameters] : content.at("rows").items()) {
      table.rows[row] = file.at("common");
      table.rows[row].update(parameters);
    }
    tables.push_back(std::move(table));
  }
  return tables;
}

}  // namespace

const std::vector<ModelTable>& ModelTables() {
  static const std::vector<ModelTable> tables = ReadTables();
  return tables;
}

}  // namespace cppool::protocol
