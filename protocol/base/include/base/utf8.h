// UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, at most U+10FFFF.
#pragma once

#include <cstddef>
#include <string_view>

namespace cppool::base {

// The bytes of the character that `bytes` begin with; 0: they begin with none.
std::size_t Utf8Length(std::string_view bytes);
// The code point that one character's bytes encode.
unsigned CodePoint(std::string_view character);
// How many bytes at the front are UTF-8; all, where all are.
std::size_t ValidUtf8Prefix(std::string_view bytes);

}  // namespace cppool::base
