// The driver in builds without libFuzzer: runs a target once for each file in the given folders, and with
// damaged copies of them.
//
//     fuzz_request COUNT FOLDER ...    # so many damaged copies in all, the same ones each time
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

#include "tests/files.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

std::string current;

// If the target aborts, the input comes after its last words.
void ShowInput(int) {
  if (write(2, current.data(), current.size()) < 0) _exit(2);
  _exit(1);
}

void Try(std::string input) {
  current = std::move(input);
  // A copy of exactly its size, so that a sanitizer sees a read past its end.
  const std::vector<std::uint8_t> bytes(current.begin(), current.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

std::string Damaged(std::string text, std::mt19937& random) {
  // clang-format off
  static const std::vector<std::string> pieces = {
      "{", "}", "[", "]", "\"", ",", ":", "\\", "\\u", "\\ud800", "-", ".", "e", "1e400", "99999999999999999999", "null", "true",
      std::string(1, '\0'), "\xff", "\xc3", "\xed\xa0\x80", "\xf0\x9f", "\"op\":", "\"id\":", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
      " ", "\r", "\n", "=", "None", "(", ")"};
  // clang-format on
  for (unsigned steps = 1 + random() % 4; steps > 0; --steps) {
    const std::size_t at = random() % (text.size() + 1);
    switch (random() % 5) {
      case 0:
        text.insert(at, pieces[random() % pieces.size()]);
        break;
      case 1:
        text.erase(at, random() % 8);
        break;
      case 2:
        if (at < text.size()) text[at] = static_cast<char>(random());
        break;
      case 3:
        text.insert(at, text.substr(random() % (text.size() + 1), random() % 40));
        break;
      case 4:
        text.resize(at);
        break;
    }
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 2; i < argc; ++i)
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  if (files.empty()) return 2;
  std::signal(SIGABRT, ShowInput);
  std::vector<std::string> inputs;
  for (const std::filesystem::path& file : files) Try(inputs.emplace_back(cppool::test::ReadFile(file)));
  std::mt19937 random(20240611);
  const int count = std::atoi(argv[1]);
  for (int i = 0; i < count; ++i) Try(Damaged(inputs[random() % inputs.size()], random));
  std::fprintf(stderr, "%zu inputs replayed, and %d damaged ones\n", files.size(), count);
}
