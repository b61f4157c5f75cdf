// JSON text from somebody else as a value. Safe for any bytes: bounded nesting, no duplicate keys, UTF-8
// only.
#pragma once

#include <string>
#include <string_view>

#include "protocol/failure.h"
#include "protocol/framing.h"

namespace cppool::protocol {

// One JSON value and nothing behind it. Throws InvalidRequest (see parameters.h) that says what is wrong and
// where: bytes that are not UTF-8, a syntax error, a key given twice, a number beyond a double, or containers
// nested deeper than `max_nesting`.
Json ParseJson(std::string_view text, int max_nesting = kMaxNesting);

// Any bytes as an error text shows them: in double quotes, at most 80 characters, printable and UTF-8.
std::string Quoted(std::string_view bytes);

}  // namespace cppool::protocol
