// SHA-256 (FIPS 180-4), HMAC (RFC 2104) and bytes that nobody can guess: how two processes that share a
// secret recognise each other without sending it.
#pragma once

#include <string>
#include <string_view>

namespace cppool::base {

std::string Sha256(std::string_view bytes);                              // 64 hexadecimal digits
std::string HmacSha256(std::string_view key, std::string_view message);  // likewise
bool SameSecretText(std::string_view a,
                    std::string_view b);  // in time that tells nothing of where they differ
std::string RandomDigits();  // 64 hexadecimal digits of the system's generator. Throws std::system_error.

}  // namespace cppool::base
