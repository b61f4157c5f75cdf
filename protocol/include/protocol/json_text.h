// JSON text as a value, and the other way round. Reading is safe for any bytes: bounded nesting, no duplicate
// keys, UTF-8 only.
#pragma once

#include <string>
#include <string_view>

#include "protocol/failure.h"
#include "protocol/framing.h"

namespace cppool::protocol {

// The text must be one JSON value. Throws InvalidRequest (see parameters.h) that says what is wrong and
// where: bytes that are not UTF-8, a syntax error, a key given twice, a number beyond a double, or containers
// nested deeper than `max_nesting`.
Json ParseJson(std::string_view text, int max_nesting = kMaxNesting);

// A value as JSON on one line. Bytes in it that are not UTF-8 are replaced.
std::string JsonText(const Json& value);

// Any bytes as an error text shows them: in double quotes, at most 80 characters, printable and UTF-8.
std::string Quoted(std::string_view bytes);

// The JSON text of a value, in the same form: in double quotes if it is a string.
std::string EchoValue(const Json& value);

}  // namespace cppool::protocol
