// The daemon's answers to `run` and `validate` as the library's Result.
#pragma once

#include <cppool/pool.h>

namespace cppool::client {

// All throw std::runtime_error that says which member is wrong.
Result ResultFromJson(Json json);
Result ValidationFromJson(Json json);  // {"ok": true, "runs": true}, or what `run` would answer

// `features` of an answer to `hello`; empty when it has none.
std::vector<std::string> FeaturesFromJson(const Json& hello);

}  // namespace cppool::client
