#include "kernels/attention/checks/oracle_mask.h"

#include <cmath>
#include <cstddef>
#include <utility>

namespace cppool::kernels {
namespace {

std::vector<double> GeometricSlopes(std::size_t count) {
  const double ratio = std::pow(2.0, -8.0 / static_cast<double>(count));
  std::vector<double> slopes = {ratio};
  while (slopes.size() < count) slopes.push_back(slopes.back() * ratio);
  return slopes;
}

}  // namespace

std::vector<float> OracleAlibiSlopes(int heads) {
  const auto wanted = static_cast<std::size_t>(heads);
  std::size_t above = 1;
  while (above < wanted) above += above;
  std::vector<double> slopes = GeometricSlopes(above);
  if (above != wanted) {
    const std::vector<double> finer = std::move(slopes);
    slopes = GeometricSlopes(above / 2);
    for (std::size_t i = 0; slopes.size() < wanted; i += 2) slopes.push_back(finer[i]);
  }
  return {slopes.begin(), slopes.end()};
}

}  // namespace cppool::kernels
