// What validation and the string form share about a schema.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "protocol/parameters.h"

namespace cppool::protocol {

const ParameterSpec* FindSpec(const std::vector<ParameterSpec>& schema,
                              std::string_view name);  // nullptr: none

// Throws InvalidRequest: the name, the nearest one, and all there are: the schema's, and `others`.
[[noreturn]] void RefuseUnknownName(const std::string& name, const std::vector<ParameterSpec>& schema,
                                    const std::vector<std::string>& others = {});

// Throws InvalidRequest unless it is an object of strings.
void RequireStrings(const Json& kwargs);

}  // namespace cppool::protocol
