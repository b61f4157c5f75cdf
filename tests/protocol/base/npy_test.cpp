// .npy files: files that NumPy writes are read, broken files are refused with the reason.
#include "base/npy.h"

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

using namespace base;
namespace fs = std::filesystem;

std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const NpyError& error) {
    return error.what();
  }
  return "";
}

void CheckHas(const std::string& text, const std::string& part) {
  INFO(text << " (wanted: " << part << ")");
  CHECK(text.find(part) != std::string::npos);
}

// A version 1.0 file as NumPy writes it, with this dictionary and these elements.
void WriteFile(const std::string& path, const std::string& dictionary, const std::string& elements) {
  std::ofstream out(path, std::ios::binary);
  out << "\x93NUMPY" << '\x01' << '\x00' << static_cast<char>(dictionary.size() % 256)
      << static_cast<char>(dictionary.size() / 256) << dictionary << elements;
}

}  // namespace

TEST_CASE("headers in the forms of different versions of NumPy are read") {
  const NpyHeader header =
      ParseNpyHeader("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n");
  CHECK(header.type == NpyType::kFloat32);
  CHECK(header.shape == std::vector<std::int64_t>{2, 3});
  CHECK(ParseNpyHeader("{\"shape\":(8,),\"descr\":\"<f8\",\"fortran_order\":False}").type ==
        NpyType::kFloat64);
  CHECK(ParseNpyHeader("{'descr': '<f2', 'fortran_order': False, 'shape': (5L,), }").shape ==
        std::vector<std::int64_t>{5});
  CHECK(ParseNpyHeader("{'descr': '<f2', 'fortran_order': False, 'shape': ()}").shape.empty());
  CHECK(ParseNpyHeader("{'descr': '<f2', 'fortran_order': False, 'shape': (0, 4)}").shape ==
        std::vector<std::int64_t>{0, 4});
}

TEST_CASE("headers that cannot be read are refused with the reason") {
  const auto error = [](const std::string& text) { return ErrorOf([&] { ParseNpyHeader(text); }); };
  CheckHas(error("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }"), "Fortran order");
  for (const char* type : {"<i4", ">f4", "|u1", "<c8", "<f16", "float32", ""})
    CheckHas(error("{'descr': '" + std::string(type) + "', 'fortran_order': False, 'shape': (2,), }"),
             "must be float16");
  CheckHas(error("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }"), "records");
  for (const char* text :
       {"", "{", "{}", "{'descr': '<f4'}", "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}",
        "{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': 2}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2 3)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,", "{'descr': '<f4, 'fortran_order': False}",
        "{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x"})
    CheckHas(error(text), "broken header");
}

TEST_CASE("damaged headers are read or refused") {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }          \n";
  std::mt19937 random(7);
  int read = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = good;
    for (unsigned steps = 1 + random() % 3; steps > 0 && !text.empty(); --steps) {
      const std::size_t at = random() % text.size();
      if (random() % 2) {
        text[at] = static_cast<char>(random());
      } else {
        text.erase(at, 1 + random() % 12);
      }
    }
    try {
      ParseNpyHeader(text);
      ++read;
    } catch (const NpyError& error) {
      REQUIRE(std::string(error.what()).size() < 200);
      ++refused;
    }
  }
  CHECK(read > 100);
  CHECK(refused > 1000);
}

TEST_CASE("written elements are read back, from any position") {
  const TemporaryFolder folder;
  const std::string path = folder.File("a.npy");
  NpyWriter::Create(path, {NpyType::kFloat32, {3, 4}});
  NpyWriter writer(path, NpyType::kFloat32);
  const std::vector<float> row = {1.5F, -2, 0.1F, 3e38F};
  writer.Write(8, 4, row.data());
  const NpyReader reader(path);
  CHECK(reader.header().shape == std::vector<std::int64_t>{3, 4});
  CHECK(fs::file_size(path) == 128 + 48);  // elements begin at a multiple of 64, as NumPy has it
  std::vector<double> all(12);
  reader.Read(0, 12, all.data());
  CHECK(all == std::vector<double>{0, 0, 0, 0, 0, 0, 0, 0, 1.5, -2, 0.1F, 3e38F});
  double one = 0;
  reader.Read(9, 1, &one);
  CHECK(one == -2);
  NpyWriter::Create(path, {NpyType::kFloat16, {6}});  // replaces the older file
  NpyWriter half(path, NpyType::kFloat16);
  const std::vector<std::uint16_t> bits = {0x3C00, 0xBC00, 0x0001, 0x7BFF, 0x7C00, 0x7E00};
  half.Write(0, 6, bits.data());
  std::vector<double> values(6);
  NpyReader(path).Read(0, 6, values.data());
  CHECK(values[0] == 1);
  CHECK(values[1] == -1);
  CHECK(values[2] == std::ldexp(1.0, -24));
  CHECK(values[3] == 65504);
  CHECK(std::isinf(values[4]));
  CHECK(std::isnan(values[5]));
}

TEST_CASE("files that are not valid .npy files are refused with the reason") {
  const TemporaryFolder folder;
  const std::string path = folder.File("a.npy");
  const auto error = [&] { return ErrorOf([&] { NpyReader reader(path); }); };
  CheckHas(error(), "a.npy: cannot be opened: No such file");
  std::ofstream(path) << "hello, this is text";
  CheckHas(error(), "is not a .npy file");
  std::ofstream(path) << "";
  CheckHas(error(), "is not a .npy file");
  const std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n";
  WriteFile(path, dictionary, std::string(24, '\0'));
  CHECK(error().empty());
  WriteFile(path, dictionary, std::string(23, '\0'));
  CheckHas(error(), "is truncated");
  WriteFile(path, dictionary, std::string(25, '\0'));
  CheckHas(error(), "is too long");
  fs::resize_file(path, 20);
  CheckHas(error(), "broken header");
  WriteFile(path, "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", "");
  CheckHas(error(), "beyond any file");
  {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(6);
    file << '\x07';
  }
  CheckHas(error(), "version 7");
  fs::remove(path);
  fs::create_directory(path);
  CheckHas(error(), "is not a regular file");
  CheckHas(ErrorOf([&] { NpyWriter::Create(path, {NpyType::kFloat32, {1}}); }), "cannot be opened");
  CheckHas(ErrorOf([&] { NpyWriter::Create("/dev/full", {NpyType::kFloat32, {1}}); }), "No space left");

  const std::string other = folder.File("b.npy");
  NpyWriter::Create(other, {NpyType::kFloat64, {8}});
  const NpyReader reader(other);
  fs::resize_file(other, 160);
  double values[8];
  CheckHas(ErrorOf([&] { reader.Read(0, 8, values); }), "was truncated while it was read");
}

}  // namespace cppool::test
