#include "protocol/framing.h"

#include <random>

#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using test::Repeat;

std::vector<LineReader::Line> ReadAll(LineReader& reader, std::string_view bytes, std::size_t chunk) {
  std::vector<LineReader::Line> lines;
  for (std::size_t at = 0; at < bytes.size(); at += chunk) {
    reader.Append(bytes.substr(at, chunk));
    while (auto line = reader.Next()) lines.push_back(std::move(*line));
  }
  while (auto line = reader.Finish()) lines.push_back(std::move(*line));
  return lines;
}

TEST_CASE("lines do not depend on the size of the chunks") {
  const std::string bytes =
      "one\ntwo\r\n\n\r\nlonger than it may be\r\n12345678\r\n123456789\r\n12\r34\nlast";
  const std::vector<std::pair<std::string, std::size_t>> wanted = {
      {"one", 0},      {"two", 0},      {"", 0},       {"", 0},    {"longer t", 13},
      {"12345678", 0}, {"12345678", 1}, {"12\r34", 0}, {"last", 0}};
  for (std::size_t chunk = 1; chunk <= bytes.size(); ++chunk) {
    CAPTURE(chunk);
    LineReader reader(8);
    const auto lines = ReadAll(reader, bytes, chunk);
    REQUIRE(lines.size() == wanted.size());
    for (std::size_t i = 0; i < lines.size(); ++i) {
      CAPTURE(i);
      CHECK(lines[i].text == wanted[i].first);
      CHECK(lines[i].dropped == wanted[i].second);
      CHECK(lines[i].overlong == (wanted[i].second > 0));
    }
    CHECK(reader.buffered() == 0);
  }
}

TEST_CASE("random bytes in random chunks give the same lines as a plain split") {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::string bytes;
    for (unsigned i = random() % 200; i > 0; --i) bytes += "\n\nab\rc"[random() % 6];
    std::vector<std::string> wanted;
    std::size_t start = 0;
    for (std::size_t end; (end = bytes.find('\n', start)) != std::string::npos; start = end + 1) {
      wanted.push_back(bytes.substr(start, end - start));
    }
    if (start < bytes.size()) wanted.push_back(bytes.substr(start));
    const std::size_t limit = 1 + random() % 6;
    LineReader reader(limit);
    const auto lines = ReadAll(reader, bytes, 1 + random() % 20);
    REQUIRE(lines.size() == wanted.size());
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::string whole = wanted[i];
      if (!whole.empty() && whole.back() == '\r') whole.pop_back();
      REQUIRE(lines[i].text == whole.substr(0, limit));
      REQUIRE(lines[i].dropped == whole.size() - lines[i].text.size());
    }
  }
}

TEST_CASE("an over-long line takes no more memory than the limit, and the next line is not lost") {
  LineReader reader(kMaxRequestBytes);
  const std::string block(1 << 16, 'x');
  for (int i = 0; i < 160; ++i) {  // 10 MiB
    reader.Append(block);
    REQUIRE_FALSE(reader.Next());
    REQUIRE(reader.buffered() <= kMaxRequestBytes);
  }
  reader.Append("y\nnext\n");
  const auto overlong = reader.Next();
  REQUIRE(overlong);
  CHECK(overlong->overlong);
  CHECK(overlong->text == std::string(kMaxRequestBytes, 'x'));
  CHECK(overlong->dropped == 160 * block.size() + 1 - kMaxRequestBytes);
  const auto next = reader.Next();
  REQUIRE(next);
  CHECK(next->text == "next");
  CHECK_FALSE(next->overlong);
}

TEST_CASE("reading byte by byte takes linear time") {
  // Quadratic time would take hours here and run into the test's time-out.
  LineReader reader(1 << 30);
  const int bytes = 4 << 20;
  for (int i = 0; i < bytes; ++i) {
    reader.Append("x");
    REQUIRE_FALSE(reader.Next());
  }
  reader.Append(Repeat("\n", 1 << 20));
  REQUIRE(reader.Next()->text.size() == static_cast<std::size_t>(bytes));
  int empty = 0;
  while (reader.Next()) ++empty;
  CHECK(empty == (1 << 20) - 1);
}

TEST_CASE("Finish returns lines that were not taken, then the last line, once each") {
  LineReader reader(100);
  CHECK_FALSE(reader.Finish());
  reader.Append("first\nsecond");
  CHECK(reader.buffered() == 11);
  CHECK(reader.Finish()->text == "first");  // was not taken before the end of input
  CHECK(reader.Finish()->text == "second");
  CHECK_FALSE(reader.Finish());
  reader.Append("\n");
  CHECK(reader.Next()->text.empty());
}

TEST_CASE("a line is a response only if it starts with the sentinel") {
  CHECK(StripSentinel("[CP_POOL_RESP] {\"ok\":true}", kDefaultSentinel) == "{\"ok\":true}");
  CHECK(StripSentinel("[CP_POOL_RESP] ", kDefaultSentinel) == "");
  CHECK_FALSE(StripSentinel(" [CP_POOL_RESP] {}", kDefaultSentinel));
  CHECK_FALSE(StripSentinel("[CP_POOL_RESP]", kDefaultSentinel));
  CHECK_FALSE(StripSentinel("NCCL INFO [CP_POOL_RESP] {}", kDefaultSentinel));
  CHECK_FALSE(StripSentinel("", kDefaultSentinel));
  CHECK(StripSentinel("{}", "") == "{}");
}

}  // namespace
}  // namespace cppool::protocol
