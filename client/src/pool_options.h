// PoolOptions as JSON, for the C interface and for a server: members have the names of the options, and
// limits end in _ms.
#pragma once

#include <cppool/pool.h>

namespace cppool::client {

// Throws std::invalid_argument that names a member that is unknown or wrong, and what is allowed.
PoolOptions PoolOptionsFromJson(const Json& json);
Json ToJson(const PoolOptions& options);  // without its functions

}  // namespace cppool::client
