// Lines on pipes, apart from what they mean. One request per line; one response per line, behind the
// sentinel.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace cppool::protocol {

inline constexpr std::string_view kDefaultSentinel = "[CP_POOL_RESP] ";
inline constexpr std::size_t kMaxRequestBytes = 1 << 20;
inline constexpr int kMaxNesting = 64;

// Cuts a byte stream into lines, in time linear in the bytes. It holds at most `limit` bytes of a line
// whatever arrives: the rest of an over-long one is dropped up to its newline and the line is handed out as
// `overlong` with its first bytes. Lines wait here until they are taken, so take them all after every Append.
// "\r\n" ends a line too. Not thread-safe.
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
  // At the end of input: the lines not taken yet, the last of them also without a newline; nothing when all
  // are taken.
  std::optional<Line> Finish();
  std::size_t buffered() const;  // bytes held

 private:
  void EndLine();

  std::size_t limit_;
  std::deque<Line> ready_;
  std::size_t ready_bytes_ = 0;
  std::string partial_;      // the line that has not ended
  std::size_t dropped_ = 0;  // its bytes beyond the limit
  char last_dropped_ = 0;
};

// The JSON text of a response line, or nothing when the line does not begin with the sentinel.
std::optional<std::string_view> StripSentinel(std::string_view line, std::string_view sentinel);

}  // namespace cppool::protocol
