// Writes output such as a library prints: lines of 64 bytes, with the sentinel inside one of a thousand
// lines.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <string>

// Writes one line per write(), or with `blocks` a thousand lines, as a full stdio buffer does. False: a write
// failed.
inline bool WriteChatter(int fd, long long bytes, bool blocks) {
  constexpr std::size_t kLine = 64;
  std::string text;
  for (int i = 0; i < 1000; ++i) {
    std::string line = i == 0 ? "NCCL INFO [CP_POOL_RESP] {\"ok\": true}" : "NCCL INFO Channel";
    line += " " + std::to_string(i) + " ";
    text += line + std::string(kLine - 1 - line.size(), '.') + "\n";
  }
  while (bytes > 0) {
    for (std::size_t at = 0; at < text.size() && bytes > 0;) {
      const std::size_t unit = blocks ? text.size() - at : kLine - at % kLine;
      const std::size_t count = std::min(unit, static_cast<std::size_t>(bytes));
      const ssize_t written = write(fd, text.data() + at, count);
      if (written <= 0) return false;
      at += static_cast<std::size_t>(written);
      bytes -= written;
    }
  }
  return true;
}
