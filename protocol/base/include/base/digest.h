// The digest of a file's bytes: what answers name a library by, and what caches name files by.
#pragma once

#include <string>
#include <string_view>

namespace cppool::base {

// 16 hexadecimal digits: FNV-1a with 64 bits (Fowler, Noll and Vo; draft-eastlake-fnv). It tells versions of
// a file apart, and is no protection against somebody who makes two files with the same digest.
std::string Digest(std::string_view bytes);
bool IsDigest(std::string_view text);  // whether it has the form of one

}  // namespace cppool::base
