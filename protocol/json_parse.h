// What ParseJson and ParseRequest share: a parse that goes on past problems which leave the rest of the text
// readable.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "protocol/failure.h"

namespace cppool::protocol {

struct ParsedText {
  Json value;
  std::optional<std::string> duplicate;  // the first key that its object has twice
  std::string id_problem;  // why the top-level object's "id" is not what was meant; empty: it is
  std::string
      overflow;  // what is said of the first number beyond a double, which reads as 0; empty: there is none
};

// Throws InvalidRequest where nothing readable is left.
ParsedText ParseText(std::string_view text, int max_nesting);

}  // namespace cppool::protocol
