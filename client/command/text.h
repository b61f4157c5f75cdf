// How the command writes texts.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

#include <cppool/pool.h>

namespace cppool::command {

// As XML text or attribute: markup is escaped; control characters and bytes that XML 1.0 forbids are replaced by '?'.
std::string XmlEscape(std::string_view text);
std::string FirstLine(const std::string& text);
void PrintJson(std::ostream& out, const Json& value);  // one line, at once
std::string Fixed(double value, int digits);           // "-" when it is not finite

}  // namespace cppool::command
