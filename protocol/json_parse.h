// The parse behind ParseJson and ParseRequest: it continues after problems that leave the rest of the text
// readable.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "protocol/failure.h"

namespace cppool::protocol {

struct ParsedText {
  Json value;
  std::optional<std::string> duplicate;  // the first key that an object has twice
  std::string id_problem;  // why the "id" of the top-level object cannot be echoed; empty: it can
  std::string overflow;    // the error for the first number beyond a double, which is read as 0; empty: none
};

// Throws InvalidRequest when the text cannot be parsed further.
ParsedText ParseText(std::string_view text, int max_nesting);

}  // namespace cppool::protocol
