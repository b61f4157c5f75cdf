// How error texts quote what they were given: short, printable and valid UTF-8, whatever the bytes are.
#pragma once

#include <string>
#include <string_view>

#include "protocol/failure.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::protocol {

// At most 80 characters of `bytes`, then "...". Characters that a terminal acts on are escaped, as \n, \x01
// or \u009b, and bytes that are not UTF-8 as \xff.
std::string Echo(std::string_view bytes);

std::string TypeName(const Json& value);  // "an array", "null", ...

}  // namespace cppool::protocol
