// Arrays of NumPy's .npy format, row by row: little-endian floating-point numbers, or bytes, in C order
// (NumPy enhancement proposal 1). Errors throw NpyError, whose text begins with the file's path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/unique_fd.h"

namespace cppool::base {

enum class NpyType { kFloat16, kFloat32, kFloat64, kUint8 };  // the last: written, not read
std::size_t SizeOf(NpyType type);
const char* NameOf(NpyType type);  // NumPy's: "float32"

class NpyError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct NpyHeader {
  NpyType type = NpyType::kFloat32;
  std::vector<std::int64_t> shape;
};
// The dictionary of a header, as text. Throws NpyError without a path.
NpyHeader ParseNpyHeader(std::string_view text);
// "(2, 3)", "(8,)".
std::string ShapeText(const std::vector<std::int64_t>& shape);

// Several threads may read at once.
class NpyReader {
 public:
  // Reads the header. A file whose size does not fit it is an error.
  explicit NpyReader(const std::string& path);
  const NpyHeader& header() const { return header_; }
  std::int64_t count() const { return count_; }  // elements in the file
  // Reads elements first to first + count - 1, exactly.
  void Read(std::int64_t first, std::int64_t count, double* to) const;

 private:
  std::string path_;
  UniqueFd file_;
  NpyHeader header_;
  std::int64_t count_ = 0;
  std::size_t data_ = 0;  // offset of the first element
};

class NpyWriter {
 public:
  // Makes the file, in place of an earlier one; all elements are zero.
  static void Create(const std::string& path, const NpyHeader& header);
  // Opens a file that Create has made.
  NpyWriter(const std::string& path, NpyType type);
  // Writes elements, which have the file's type, from `first` on. Several writers may write different parts.
  void Write(std::int64_t first, std::int64_t count, const void* elements);

 private:
  std::string path_;
  UniqueFd file_;
  NpyType type_;
  std::size_t data_ = 0;
};

}  // namespace cppool::base
