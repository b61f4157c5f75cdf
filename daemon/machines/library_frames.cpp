#include "daemon/machines/library_frames.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>

#include "base/digest.h"
#include "base/file_cache.h"
#include "daemon/library.h"
#include "daemon/prepare.h"
#include "kernels/error.h"

namespace cppool::daemon {
namespace {

using protocol::Json;

constexpr std::size_t kPart = std::size_t{3} << 20;  // bytes of a frame, before they become text
constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// The bytes that had this digest; those of now, where nobody has them any more.
std::string ContentOf(const std::string& file, const std::string& wanted) {
  // Another daemon may have made a copy of what the file was.
  const base::FileCache copies("libraries", {256, std::uint64_t{2} << 30});
  if (const auto copy = copies.Read(base::FileCache::Name(file, wanted, ".so")))
    if (base::Digest(*copy) == wanted) return *copy;
  std::string bytes = base::ReadWhole(file).bytes;
  CheckElf(file, bytes);
  return bytes;
}

}  // namespace

std::map<std::string, std::string> LibrarySender::Send(const std::vector<std::string>& files,
                                                       std::map<std::string, std::string> digests,
                                                       const Agents& agents,
                                                       std::chrono::steady_clock::time_point until) try {
  for (const std::string& file : files) {
    std::string& digest = digests[file];
    std::optional<std::string> bytes;
    if (digest.empty()) digest = digests_.Of(file);
    for (const auto& agent : agents.links()) {
      if (sent_.contains({agent.get(), digest})) continue;
      // Nothing, to begin with: it may have a copy.
      for (std::size_t at = 0, end = 0;; end = std::min(at + kPart, bytes->size())) {
        const auto answer =
            agent->Ask({{"frame", "library"},
                        {"path", file},
                        {"digest", digest},
                        {"at", at},
                        {"size", end > 0 ? bytes->size() : 0},
                        {"data", end > 0 ? ToBase64(std::string_view(*bytes).substr(at, end - at)) : ""}},
                       until);
        if (!answer) agents.ThrowLost(*agent, "has not taken " + file);
        if (answer->contains("kind"))
          throw Refusal(KindIn(*answer), agent->Name() + ": " + answer->at("error").get<std::string>(),
                        agent->node());
        if (answer->at("has").get<bool>()) {
          sent_.insert({agent.get(), digest});
          break;
        }
        if (!bytes) bytes = ContentOf(file, digest);
        at = end;
        if (at >= bytes->size()) break;  // its own load says what is wrong
      }
    }
  }
  return digests;
} catch (const base::FileError& error) {
  throw Refusal(protocol::FailureKind::kInvalidRequest, error.what());
} catch (const LibraryError& error) {
  throw Refusal(protocol::FailureKind::kInvalidRequest, error.what());
}

Json LibraryReceiver::Take(const Json& frame, LibraryStore& store) {
  const std::string path = frame.at("path"), digest = frame.at("digest");
  const auto size = frame.at("size").get<std::size_t>(), at = frame.at("at").get<std::size_t>();
  if (at == 0) bytes_.clear();
  bytes_ += FromBase64(frame.at("data").get<std::string>());
  if (size > 0 && bytes_.size() == size && base::Digest(bytes_) == digest)
    store.Keep(path, std::move(bytes_));
  return {{"has", (size == 0 || bytes_.size() >= size || bytes_.empty()) && store.Has(path, digest)}};
}

std::string ToBase64(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const auto byte = [&](std::size_t k) -> std::uint32_t {
      return i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0;
    };
    const std::uint32_t word = byte(0) << 16 | byte(1) << 8 | byte(2);
    for (std::size_t k = 0; k < 4; ++k)
      text += i + k > bytes.size() ? '=' : kDigits[word >> (18 - 6 * k) & 63];
  }
  return text;
}

std::string FromBase64(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  if (text.size() % 4 != 0) throw std::runtime_error("no base64");
  for (std::size_t i = 0; i < text.size(); i += 4) {
    std::uint32_t word = 0;
    std::size_t padding = 0;
    for (std::size_t k = 0; k < 4; ++k) {
      const bool is_padding = text[i + k] == '=' && i + 4 == text.size() && k >= 2;
      const std::size_t digit = is_padding ? 0 : kDigits.find(text[i + k]);
      if (digit == std::string_view::npos || (padding > 0 && !is_padding))
        throw std::runtime_error("no base64");
      padding += is_padding;
      word = word << 6 | static_cast<std::uint32_t>(digit);
    }
    for (std::size_t k = 0; k < 3 - padding; ++k) bytes += static_cast<char>(word >> (16 - 8 * k));
  }
  return bytes;
}

}  // namespace cppool::daemon
