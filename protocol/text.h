// How error texts show what they were given: short, printable and valid UTF-8 whatever it was.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "protocol/failure.h"
#include "protocol/json_text.h"
#include "protocol/parameters.h"

namespace cppool::protocol {

// At most 80 characters of `bytes`, then "..."; what a terminal would act on as \n, \x01 or, past ASCII, \u009b; bytes that
// are not UTF-8 as \xff.
std::string Echo(std::string_view bytes);

std::string EchoValue(const Json& value);  // a value's JSON text, shortened the same way
std::string TypeName(const Json& value);   // "an array", "null", ...

}  // namespace cppool::protocol
