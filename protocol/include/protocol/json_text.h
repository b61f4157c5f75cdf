// JSON text from somebody else as a value. Safe for any bytes: bounded nesting, no duplicate keys, UTF-8
// only.
#pragma once

#include <string_view>

#include "protocol/failure.h"
#include "protocol/framing.h"

namespace cppool::protocol {

// One JSON value and nothing behind it. Throws InvalidRequest (see parameters.h) that says what is wrong and
// where: bytes that are not UTF-8, a syntax error, a key given twice, a number beyond a double, or containers
// nested deeper than `max_nesting`.
Json ParseJson(std::string_view text, int max_nesting = kMaxNesting);

}  // namespace cppool::protocol
