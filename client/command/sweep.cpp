#include "client/command/sweep.h"

#include <algorithm>
#include <utility>

#include "client/suite/value_text.h"
#include "protocol/json_text.h"

namespace cppool::command {

std::vector<SweepAxis> SweepAxesOf(const std::vector<std::string>& params) {
  std::vector<SweepAxis> axes;
  for (const std::string& text : params) {
    const auto [key, values] = suite::SplitAssignment(text, "--param");
    SweepAxis axis{key, suite::ValuesFromText(values, "--param " + key)};
    if (std::ranges::any_of(axes, [&](const SweepAxis& other) { return other.key == axis.key; }))
      throw suite::UsageError("--param " + key + " is given twice: give its values in one list, " + key +
                              "=A,B");
    axes.push_back(std::move(axis));
  }
  return axes;
}

std::vector<SweepPoint> Over(const suite::Cell& cell, const std::vector<SweepAxis>& axes) {
  std::vector<SweepPoint> product = {{cell, {}}};
  for (const SweepAxis& axis : axes) {
    if (product.size() * axis.values.size() > suite::kMaxCells) {
      throw suite::UsageError("--param: the lists of values make more than " +
                              std::to_string(suite::kMaxCells) + " combinations: give fewer values");
    }
    std::vector<SweepPoint> longer;
    for (const SweepPoint& point : product)
      for (const Json& value : axis.values) {
        longer.push_back(point);
        longer.back().cell.params[axis.key] = value;
        if (axis.values.size() > 1) longer.back().swept.push_back(value);
      }
    product = std::move(longer);
  }
  return product;
}

std::vector<SweepPoint> PointsOf(const std::string& case_name, const std::vector<int>& world_sizes,
                                 const std::vector<SweepAxis>& axes) {
  std::vector<SweepPoint> points;
  for (const int world_size : world_sizes) {
    suite::Cell cell;
    cell.world_size = world_size;
    cell.case_name = case_name;
    const std::vector<SweepPoint> product = Over(cell, axes);
    points.insert(points.end(), product.begin(), product.end());
  }
  for (SweepPoint& point : points) {
    Json& params = point.cell.params;
    if (params.contains("max_seqlen_q") && !params.contains("max_seqlen_kv"))
      params["max_seqlen_kv"] = params["max_seqlen_q"];
    point.cell.name = "W=" + std::to_string(point.cell.world_size) + " " + protocol::JsonText(params);
  }
  return points;
}

}  // namespace cppool::command
