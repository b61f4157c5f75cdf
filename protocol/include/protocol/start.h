// A daemon that cannot start: what the last line of its stderr says, for programs.
//
//     cppoold: start {"error": "--transport nccl: --world-size 4 needs ...", "kind": "unsupported", ...}
//
// The line is UTF-8, has at most kMaxStartLine bytes with its newline, and is written by one write(2). The
// daemon then ends with exit code 2. A text for people precedes it. Noise may follow: a reader takes the last
// line that begins so. Members:
//
// | member       | type    | meaning |
// | ------------ | ------- | --- |
// | `error`      | string  | for people: what is wrong and what to do about it |
// | `kind`       | string  | a kind of failure (failure.h); a reader accepts kinds that it does not know |
// | `detail`     | string  | what happened, without what to do or where |
// | `stage`      | string  | `arguments`, `process` (streams, parent), `backend`, `cases` or `ranks` |
// | `rank`       | integer | the rank that could not start; absent: no single one |
// | `world_size` | integer | as asked for; absent, as the next two, when the arguments could not be read |
// | `backend`    | string  | as asked for, `auto` until it is chosen |
// | `transport`  | string  | as asked for |
// | `devices`    | integer | how many devices CUDA sees; absent: not counted |
//
// `error` and `kind` are always present. Long texts are cut. More members may be added.
// A world of more ranks than devices is `kind` "unsupported" with `devices` below `world_size`.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include <cppool/daemon_end.h>
#include "protocol/failure.h"

namespace cppool::protocol {

inline constexpr int kMaxWorldSize = 64;

inline constexpr std::string_view kStartPrefix = "cppoold: start ";
inline constexpr std::size_t kMaxStartLine = 4000;  // below PIPE_BUF: a pipe takes it whole

// Returns the object of the line: it has `error`, `kind`, and what is not empty or absent.
Json ToJson(const StartFailure& failure);

// The whole line with its newline. Bytes that are not UTF-8 are replaced, long texts cut.
std::string SerializeStart(const StartFailure& failure);

// What a line of stderr, without its newline, says; nothing when it is not such a line, is cut, or is not
// valid.
std::optional<StartFailure> ParseStart(std::string_view line);

}  // namespace cppool::protocol
