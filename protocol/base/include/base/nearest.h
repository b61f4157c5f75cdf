// Finds the word that was meant, for error texts.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cppool::base {

// The nearest of `candidates` by edit distance, or nothing when none is near.
std::optional<std::string> Nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace cppool::base
