#include "protocol/json_text.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/utf8.h"
#include "protocol/json_parse.h"
#include "protocol/parameters.h"
#include "protocol/text.h"

namespace cppool::protocol {
namespace {

// Builds the value from the parser's events. The library's parser does not recurse, but its values do when
// they are copied or destroyed: refusing a container here bounds all of that.
class Builder {
 public:
  explicit Builder(int max_nesting) : max_nesting_(static_cast<std::size_t>(max_nesting)) {}

  bool null() { return Add(nullptr); }
  bool boolean(bool value) { return Add(value); }
  bool number_integer(std::int64_t value) { return Add(value); }
  bool number_unsigned(std::uint64_t value) { return Add(value); }
  bool number_float(double value, const std::string& literal) {
    // An integer beyond 64 bits arrives as the nearest double: as an id it would be echoed as another number.
    if (InId() && literal.find_first_of(".eE") == std::string::npos) {
      parsed_.id_problem = "the id " + Quoted(literal) + " does not fit in 64 bits: write it as a string";
    }
    return Add(value);
  }
  bool string(std::string& value) { return Add(std::move(value)); }
  bool binary(Json::binary_t&) { return false; }  // not in JSON text
  bool start_object(std::size_t) { return Open(Json::object()); }
  bool start_array(std::size_t) { return Open(Json::array()); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool key(std::string& name) {
    Json& object = *open_.back();
    if (open_.size() == 1) top_key_ = name;
    if (object.contains(name)) {
      if (!parsed_.duplicate) parsed_.duplicate = name;
      if (open_.size() == 1 && name == "id") parsed_.id_problem = "the key \"id\" is given twice";
    }
    slot_ = &object[name];
    return true;
  }

  bool parse_error(std::size_t position, const std::string& token, const Json::exception& error) {
    constexpr int kNumberOverflow = 406;
    if (error.id == kNumberOverflow) {
      error_ = "the number " + Quoted(token) + " is too large for a double";
      overflow_ = Overflow{position - token.size(), token.size(), InId()};
      return false;
    }
    // The message is "[json.exception.parse_error.101] parse error at line 1, column 2: ...; last read:
    // 'TOKEN'; expected ...". The prefix is removed; the token, which can be any text of a megabyte, is moved
    // to the end and shortened.
    std::string message = error.what();
    if (const auto prefix = message.find("] "); prefix != std::string::npos) message.erase(0, prefix + 2);
    const std::string read = "; last read: '" + token + "'";
    if (const auto at = message.find(read); at != std::string::npos) message.erase(at, read.size());
    error_ = "not JSON: " + message + (token.empty() ? "" : "; near " + Quoted(token));
    return false;
  }

  struct Overflow {
    std::size_t begin, size;  // the literal's place, in bytes
    bool in_id;
  };

  const std::string& error() const { return error_; }
  const std::optional<Overflow>& overflow() const { return overflow_; }  // set when a number ended the parse
  ParsedText Take() { return std::move(parsed_); }

 private:
  bool InId() const { return !open_.empty() && parsed_.value.is_object() && top_key_ == "id"; }

  // Adds the next value. Pointers into an array stay valid: nothing is appended to it while a container in it
  // is open.
  Json& Place(Json value) {
    if (open_.empty()) return parsed_.value = std::move(value);
    Json& container = *open_.back();
    if (container.is_object()) return *slot_ = std::move(value);
    return container.emplace_back(std::move(value));
  }

  bool Add(Json value) {
    Place(std::move(value));
    return true;
  }

  bool Open(Json container) {
    if (open_.size() == max_nesting_) {
      error_ = "nested deeper than " + std::to_string(max_nesting_);
      return false;
    }
    open_.push_back(&Place(std::move(container)));
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  std::size_t max_nesting_;
  ParsedText parsed_;
  std::vector<Json*> open_;  // the containers around the next value, outermost first
  Json* slot_ = nullptr;     // in an object: the value of the key just read
  std::string top_key_;
  std::string error_;
  std::optional<Overflow> overflow_;
};

}  // namespace

ParsedText ParseText(std::string_view text, int max_nesting) {
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
    throw InvalidRequest("not JSON: an empty line");
  if (const std::size_t valid = base::ValidUtf8Prefix(text); valid < text.size()) {
    throw InvalidRequest("not UTF-8 from byte " + std::to_string(valid) + ": " + Quoted(text.substr(valid)));
  }
  // The library reads NUL as the end of its input and would accept whatever follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw InvalidRequest("not JSON: a NUL byte at byte " + std::to_string(nul));
  }
  // The library's parser stops at a number that no double holds, and an id may follow it: the number is
  // replaced by 0 and the text is parsed again, at most kMaxOverflows times.
  constexpr int kMaxOverflows = 8;
  std::string readable, overflow, id_overflow;
  for (int overflows = 0;; ++overflows) {
    Builder builder(max_nesting);
    if (Json::sax_parse(text.begin(), text.end(), &builder)) {
      ParsedText parsed = builder.Take();
      parsed.overflow = overflow;
      if (!id_overflow.empty()) parsed.id_problem = id_overflow;
      return parsed;
    }
    if (overflow.empty()) overflow = builder.error();  // the first error, of any kind
    if (!builder.overflow() || overflows == kMaxOverflows) throw InvalidRequest(overflow);
    if (builder.overflow()->in_id) id_overflow = builder.error();
    if (readable.empty()) readable = text;
    std::fill_n(readable.begin() + static_cast<std::ptrdiff_t>(builder.overflow()->begin),
                builder.overflow()->size, ' ');
    readable[builder.overflow()->begin] = '0';
    text = readable;
  }
}

Json ParseJson(std::string_view text, int max_nesting) {
  ParsedText parsed = ParseText(text, max_nesting);
  if (!parsed.overflow.empty()) throw InvalidRequest(parsed.overflow);
  if (parsed.duplicate) throw InvalidRequest("the key " + Quoted(*parsed.duplicate) + " is given twice");
  return std::move(parsed.value);
}

std::string JsonText(const Json& value) { return value.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace cppool::protocol
