#include "base/nearest.h"

#include <algorithm>
#include <array>

namespace cppool::base {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// Damerau-Levenshtein distance in its optimal string alignment form (insert, delete, replace, swap
// neighbours), ignoring the case of ASCII letters. Three rows of the table are enough for the swap.
std::size_t Distance(std::string_view a, std::string_view b) {
  std::array<std::vector<std::size_t>, 3> rows;
  for (auto& row : rows) row.resize(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) rows[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    auto& row = rows[i % 3];
    const auto& above = rows[(i + 2) % 3];
    const auto& two_above = rows[(i + 1) % 3];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const char x = Lower(a[i - 1]), y = Lower(b[j - 1]);
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (x == y ? 0 : 1)});
      if (i > 1 && j > 1 && x == Lower(b[j - 2]) && Lower(a[i - 2]) == y) {
        row[j] = std::min(row[j], two_above[j - 2] + 1);
      }
    }
  }
  return rows[a.size() % 3][b.size()];
}

}  // namespace

std::optional<std::string> Nearest(std::string_view word, const std::vector<std::string>& candidates) {
  const std::string* nearest = nullptr;
  std::size_t best = 0;
  for (const std::string& candidate : candidates) {
    // One edit for three letters: "p2q" is near "p2p", but "fp8" is not near "fp16".
    const std::size_t limit = std::max<std::size_t>(1, candidate.size() / 3);
    // A difference in length beyond the limit rules it out, which also bounds the work for very long words.
    if (word.empty() || candidate.size() > word.size() + limit || word.size() > candidate.size() + limit)
      continue;
    const std::size_t distance = Distance(word, candidate);
    if (distance > limit || distance >= candidate.size() || (nearest != nullptr && distance >= best))
      continue;
    nearest = &candidate;
    best = distance;
  }
  if (nearest == nullptr) return std::nullopt;
  return *nearest;
}

}  // namespace cppool::base
