// The daemon's answers to `run` and `validate` as the library's Result.
#pragma once

#include <cppool/pool.h>

namespace cppool::client {

// Both throw std::runtime_error that names what is wrong.
Result ResultFromJson(Json json);
Result ValidationFromJson(Json json);  // {"ok": true, "runs": true}, or what `run` would answer

// `features` of an answer to `hello`; empty when there is none. Throws likewise.
std::vector<std::string> FeaturesFromJson(const Json& hello);

}  // namespace cppool::client
