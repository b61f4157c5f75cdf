// Lines on pipes, apart from what they mean. One request per line; one response per line, behind the sentinel.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace cppool::protocol {

inline constexpr std::string_view kDefaultSentinel = "[CP_POOL_RESP] ";
inline constexpr std::size_t kMaxRequestBytes = 1 << 20;
inline constexpr int kMaxNesting = 64;

// Cuts a byte stream into lines, holding at most `limit` bytes whatever arrives: the rest of an over-long line is dropped up to its
// newline and the line is handed out as `overlong` with its first bytes. "\r\n" ends a line too. Not thread-safe.
class LineReader {
 public:
  struct Line {
    std::string text;
    bool overlong = false;
    std::size_t dropped = 0;  // bytes beyond the limit
  };
  explicit LineReader(std::size_t limit);

  void Append(std::string_view bytes);
  // The next whole line, without its newline.
  std::optional<Line> Next();
  // At the end of input: the last line if it had no newline.
  std::optional<Line> Finish();
  std::size_t buffered() const;

 private:
  // private state is the implementation's
  std::size_t limit_;
  std::string buffer_;
  std::size_t scanned_ = 0;
  std::size_t start_ = 0;
  std::size_t dropped_ = 0;
};

// The JSON text of a response line, or nothing when the line does not begin with the sentinel.
std::optional<std::string_view> StripSentinel(std::string_view line, std::string_view sentinel);

}  // namespace cppool::protocol
