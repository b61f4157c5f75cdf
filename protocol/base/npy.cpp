#include "base/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

namespace cppool::base {
namespace {

static_assert(std::endian::native == std::endian::little, "elements are read and written as they lie");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kLongestHeader = 1 << 16;                // NumPy's own limit is 10000
constexpr std::int64_t kMostElements = std::int64_t{1} << 56;  // no size in bytes overflows

double FloatOfHalf(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent == 31 ? (fraction ? std::numeric_limits<double>::quiet_NaN()
                                                  : std::numeric_limits<double>::infinity())
                       : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                      : std::ldexp(fraction, -24);
  return bits & 0x8000 ? -value : value;
}

struct TypeInfo {
  std::size_t size;
  const char* name;
  const char* descr;  // in a header
};
TypeInfo About(NpyType type) {
  switch (type) {
    case NpyType::kFloat16:
      return {2, "float16", "<f2"};
    case NpyType::kFloat32:
      return {4, "float32", "<f4"};
    case NpyType::kFloat64:
      return {8, "float64", "<f8"};
    case NpyType::kUint8:
      return {1, "uint8", "|u1"};
  }
  throw NpyError("no such type");
}

[[noreturn]] void FailFor(const std::string& path, const std::string& what) {
  throw NpyError(path + ": " + what);
}
[[noreturn]] void FailErrno(const std::string& path, const char* what) {
  FailFor(path, std::string(what) + ": " + std::strerror(errno));
}

UniqueFd Open(const std::string& path, int flags) {
  UniqueFd fd(open(path.c_str(), flags | O_CLOEXEC, 0666));
  if (!fd) FailErrno(path, "cannot be opened");
  return fd;
}

// Returns how many bytes were read: fewer than requested at the end of the file only.
std::size_t ReadAt(const std::string& path, int fd, void* to, std::size_t bytes, std::size_t offset) {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t got =
        pread(fd, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) FailErrno(path, "cannot be read");
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

void WriteAt(const std::string& path, int fd, const void* from, std::size_t bytes, std::size_t offset) {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t put =
        pwrite(fd, static_cast<const char*>(from) + done, bytes - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) FailErrno(path, "cannot be written");
    done += static_cast<std::size_t>(put);
  }
}

struct Preamble {
  std::size_t header = 0;  // offset of the dictionary
  std::size_t length = 0;
};

Preamble ReadPreamble(const std::string& path, int fd) {
  unsigned char bytes[12];
  const std::size_t got = ReadAt(path, fd, bytes, sizeof(bytes), 0);
  if (got < 10 || std::memcmp(bytes, kMagic.data(), kMagic.size()) != 0)
    FailFor(path, "is not a .npy file (it does not begin with \\x93NUMPY)");
  const int version = bytes[6];
  if (version < 1 || version > 3)
    FailFor(path, "is of version " + std::to_string(version) + " of the .npy format, which has 1 to 3");
  Preamble preamble{version == 1 ? std::size_t{10} : std::size_t{12}, bytes[8] + 256U * bytes[9]};
  if (version > 1) preamble.length += 65536U * bytes[10] + 16777216U * bytes[11];
  if (got < preamble.header || preamble.length > kLongestHeader) FailFor(path, "has a broken header");
  return preamble;
}

// Parses the Python literals that a header can have.
class HeaderParser {
 public:
  explicit HeaderParser(std::string_view text) : text_(text) {}

  NpyHeader Parse() {
    std::optional<std::string> type;
    std::optional<bool> fortran;
    std::optional<std::vector<std::int64_t>> shape;
    Expect('{');
    while (!Accept('}')) {
      const std::string key = String();
      Expect(':');
      if (key == "descr") {
        if (Peek() == '[') throw NpyError("holds records, not numbers");
        type = String();
      } else if (key == "fortran_order") {
        fortran = Boolean();
      } else if (key == "shape") {
        shape = Shape();
      } else {
        Broken();
      }
      if (!Accept(',') && Peek() != '}') Broken();
    }
    if (Peek() != 0 || !type || !fortran || !shape) Broken();
    if (*fortran) throw NpyError("is in Fortran order: save it with numpy.ascontiguousarray");
    return {TypeOf(*type), std::move(*shape)};
  }

 private:
  [[noreturn]] static void Broken() { throw NpyError("has a broken header"); }

  static NpyType TypeOf(const std::string& text) {
    if (text == "<f2") return NpyType::kFloat16;
    if (text == "<f4") return NpyType::kFloat32;
    if (text == "<f8") return NpyType::kFloat64;
    std::string shown;
    for (const char c : text.substr(0, 16)) shown += c >= ' ' && c <= '~' ? c : '?';
    throw NpyError("is of dtype '" + shown +
                   "' and must be float16 ('<f2'), float32 ('<f4') or float64 ('<f8'), little-endian");
  }

  char Peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool Accept(char c) {
    if (Peek() != c || at_ >= text_.size()) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Accept(c)) Broken();
  }
  std::string String() {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') Broken();
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) Broken();
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }
  bool Boolean() {
    Peek();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, {"False", false}}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    Broken();
  }
  std::vector<std::int64_t> Shape() {
    std::vector<std::int64_t> shape;
    Expect('(');
    while (!Accept(')')) {
      Peek();
      std::int64_t length = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), length);
      if (error != std::errc() || length < 0) Broken();
      at_ = static_cast<std::size_t>(end - text_.data());
      if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // as Python 2 wrote it
      shape.push_back(length);
      if (!Accept(',') && Peek() != ')') Broken();
    }
    return shape;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

// Throws NpyError without a path.
std::int64_t CountOf(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t length : shape) {
    if (length > 0 && count > kMostElements / length) throw NpyError("has a shape beyond any file");
    count *= length;
  }
  return count;
}

template <typename Element, typename Convert>
void ConvertAll(const std::vector<char>& bytes, std::int64_t count, double* to, Convert&& convert) {
  for (std::int64_t i = 0; i < count; ++i) {
    Element element;
    std::memcpy(&element, &bytes[i * sizeof(Element)], sizeof(Element));
    to[i] = convert(element);
  }
}

}  // namespace

std::size_t SizeOf(NpyType type) { return About(type).size; }

const char* NameOf(NpyType type) { return About(type).name; }

NpyHeader ParseNpyHeader(std::string_view text) { return HeaderParser(text).Parse(); }

std::string ShapeText(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

NpyReader::NpyReader(const std::string& path)
    : path_(path), file_(Open(path, O_RDONLY | O_NONBLOCK)) {  // opening a FIFO must not block
  struct stat status {};
  if (fstat(file_.get(), &status) != 0) FailErrno(path, "cannot be examined");
  if (!S_ISREG(status.st_mode)) FailFor(path, "is not a regular file");
  const Preamble preamble = ReadPreamble(path, file_.get());
  std::string text(preamble.length, '\0');
  if (ReadAt(path, file_.get(), text.data(), text.size(), preamble.header) < text.size())
    FailFor(path, "has a broken header");
  try {
    header_ = ParseNpyHeader(text);
    count_ = CountOf(header_.shape);
  } catch (const NpyError& error) {
    FailFor(path, error.what());
  }
  data_ = preamble.header + preamble.length;
  const std::size_t wanted = data_ + static_cast<std::size_t>(count_) * SizeOf(header_.type);
  if (static_cast<std::size_t>(status.st_size) != wanted) {
    const bool truncated = static_cast<std::size_t>(status.st_size) < wanted;
    FailFor(path, std::string(truncated ? "is truncated: " : "is too long: ") +
                      std::to_string(status.st_size) + " bytes, and its shape " + ShapeText(header_.shape) +
                      " of " + NameOf(header_.type) + " takes " + std::to_string(wanted));
  }
}

void NpyReader::Read(std::int64_t first, std::int64_t count, double* to) const {
  const std::size_t size = SizeOf(header_.type);
  std::vector<char> bytes(static_cast<std::size_t>(count) * size);
  const std::size_t offset = data_ + static_cast<std::size_t>(first) * size;
  if (ReadAt(path_, file_.get(), bytes.data(), bytes.size(), offset) < bytes.size())
    FailFor(path_, "was truncated while it was read");
  switch (header_.type) {
    case NpyType::kFloat16:
      return ConvertAll<std::uint16_t>(bytes, count, to, FloatOfHalf);
    case NpyType::kFloat32:
      return ConvertAll<float>(bytes, count, to, [](float value) -> double { return value; });
    case NpyType::kFloat64:
      return ConvertAll<double>(bytes, count, to, [](double value) { return value; });
    case NpyType::kUint8:
      break;  // no header that is read has it
  }
}

void NpyWriter::Create(const std::string& path, const NpyHeader& header) {
  std::string text = std::string("{'descr': '") + About(header.type).descr +
                     "', 'fortran_order': False, 'shape': " + ShapeText(header.shape) + ", }";
  // Elements begin at a multiple of 64, as NumPy aligns them.
  const std::size_t before = kMagic.size() + 4, after = (before + text.size() + 1 + 63) / 64 * 64;
  text.append(after - before - text.size() - 1, ' ');
  text += '\n';
  std::string bytes(kMagic);
  bytes += {1, 0, static_cast<char>(text.size() & 255), static_cast<char>(text.size() >> 8)};
  bytes += text;
  // An earlier file is not written to: it may have other names. A device is.
  if (struct stat earlier{};
      lstat(path.c_str(), &earlier) == 0 && (S_ISREG(earlier.st_mode) || S_ISLNK(earlier.st_mode)))
    unlink(path.c_str());
  const UniqueFd file = Open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  WriteAt(path, file.get(), bytes.data(), bytes.size(), 0);
  const std::size_t whole =
      bytes.size() + static_cast<std::size_t>(CountOf(header.shape)) * SizeOf(header.type);
  if (ftruncate(file.get(), static_cast<off_t>(whole)) != 0)
    FailErrno(path, "cannot be extended to its size");
}

NpyWriter::NpyWriter(const std::string& path, NpyType type)
    : path_(path), file_(Open(path, O_RDWR | O_NOFOLLOW)), type_(type) {
  const Preamble preamble = ReadPreamble(path, file_.get());
  data_ = preamble.header + preamble.length;
}

void NpyWriter::Write(std::int64_t first, std::int64_t count, const void* elements) {
  const std::size_t size = SizeOf(type_);
  WriteAt(path_, file_.get(), elements, static_cast<std::size_t>(count) * size,
          data_ + static_cast<std::size_t>(first) * size);
}

}  // namespace cppool::base
