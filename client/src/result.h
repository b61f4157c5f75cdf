// The daemon's answer to `run` as the library's Result.
#pragma once

#include "cppool/pool.h"

namespace cppool::internal {

Result ResultFromJson(Json json);  // throws std::runtime_error that names what is wrong

}  // namespace cppool::internal
