// Look-ups in a schema, for validation and for the string form.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "protocol/parameters.h"

namespace cppool::protocol {

const ParameterSpec* FindSpec(const std::vector<ParameterSpec>& schema,
                              std::string_view name);  // nullptr: none

// Throws InvalidRequest with the name, the nearest known one, and all known ones: those of the schema and
// `others`.
[[noreturn]] void RefuseUnknownName(const std::string& name, const std::vector<ParameterSpec>& schema,
                                    const std::vector<std::string>& others = {});

// Throws InvalidRequest unless it is an object of strings.
void RequireStrings(const Json& kwargs);

}  // namespace cppool::protocol
