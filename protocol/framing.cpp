#include "protocol/framing.h"

#include <algorithm>
#include <utility>

namespace cppool::protocol {

LineReader::LineReader(std::size_t limit) : limit_(limit) {}

void LineReader::Append(std::string_view bytes) {
  while (!bytes.empty()) {
    const std::size_t newline = bytes.find('\n');
    const std::string_view part = bytes.substr(0, newline);
    const std::size_t kept = std::min(part.size(), limit_ - partial_.size());
    partial_ += part.substr(0, kept);
    if (kept < part.size()) {
      dropped_ += part.size() - kept;
      last_dropped_ = part.back();
    }
    if (newline == std::string_view::npos) return;
    EndLine();
    bytes.remove_prefix(newline + 1);
  }
}

void LineReader::EndLine() {
  // The '\r' of "\r\n" is no part of the line, and does not count against the limit.
  if (dropped_ > 0) {
    if (last_dropped_ == '\r') --dropped_;
  } else if (!partial_.empty() && partial_.back() == '\r') {
    partial_.pop_back();
  }
  Line line;
  line.text = std::exchange(partial_, {});
  line.dropped = std::exchange(dropped_, 0);
  line.overlong = line.dropped > 0;
  ready_bytes_ += line.text.size();
  ready_.push_back(std::move(line));
}

std::optional<LineReader::Line> LineReader::Next() {
  if (ready_.empty()) return std::nullopt;
  Line line = std::move(ready_.front());
  ready_.pop_front();
  ready_bytes_ -= line.text.size();
  return line;
}

std::optional<LineReader::Line> LineReader::Finish() {
  if (!partial_.empty() || dropped_ > 0) EndLine();
  return Next();
}

std::size_t LineReader::buffered() const { return ready_bytes_ + partial_.size(); }

std::optional<std::string_view> StripSentinel(std::string_view line, std::string_view sentinel) {
  if (line.substr(0, sentinel.size()) != sentinel) return std::nullopt;
  return line.substr(sentinel.size());
}

}  // namespace cppool::protocol
