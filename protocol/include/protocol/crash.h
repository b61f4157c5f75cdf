// A daemon that a case or a library ends by a crash, or by a call of exit(): what a line of its stderr says,
// for programs.
//
//     cppoold: crash {"error": "rank 1 crashed (Segmentation fault) in stage 'forward/attend 1', ...", ...}
//
// The line is UTF-8, has at most kMaxCrashLine bytes with its newline, and is written by one write(2).
// Members:
//
// | member    | type            | meaning |
// | --------- | --------------- | --- |
// | `error`   | string          | for people: what happened where |
// | `rank`    | integer         | the rank whose work it was; absent: not known |
// | `stage`   | string          | the last mark that the rank has come to; absent: none, or not known |
// | `case`    | string          | the case under way; absent: none |
// | `library` | string          | the library whose code it was, or that the case is from; absent: none |
// | `stack`   | list of strings | the thread's functions, innermost first; absent: not known |
//
// `error` is always present. Long texts and stacks are cut. More members may be added.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <cppool/daemon_end.h>
#include "protocol/failure.h"

namespace cppool::protocol {

inline constexpr std::string_view kCrashPrefix = "cppoold: crash ";
inline constexpr std::size_t kMaxCrashLine = 4000;  // below PIPE_BUF: a pipe takes it whole

// Returns the object of the line: it has `error`, and what is not empty or absent.
Json ToJson(const Crash& crash);

// The whole line with its newline. Bytes that are not UTF-8 are replaced; long texts are cut, and so is the
// stack at its outer end.
std::string SerializeCrash(const Crash& crash);

// Parses a line of stderr, without its newline; nothing when it is not such a line, is cut, or is not valid.
std::optional<Crash> ParseCrash(std::string_view line);

}  // namespace cppool::protocol
