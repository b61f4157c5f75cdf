// A mutator that sometimes repeats a piece of the input up to a megabyte, the length of the longest line.
// libFuzzer's limits
// (-rss_limit_mb, -malloc_limit_mb, -timeout) bound memory and time of every target for such inputs too.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned int seed) {
  constexpr unsigned kOneIn = 4096;
  constexpr std::size_t kUsual = 4096;  // bytes: smaller inputs are faster, and find most bugs
  if (size == 0 || seed % kOneIn != 0)
    return LLVMFuzzerMutate(data, size, std::min(max_size, std::max(size, kUsual)));
  std::minstd_rand random(seed);
  const std::size_t begin = random() % size;
  const std::size_t length = 1 + random() % std::min<std::size_t>(size - begin, 32);
  // A random power of two of copies, as far as there is room; the rest of the input follows them.
  const std::size_t copies = std::min((std::size_t{2} << random() % 20), (max_size - size) / length);
  std::memmove(data + begin + copies * length, data + begin, size - begin);
  for (std::size_t i = 1; i <= copies; ++i)
    std::memmove(data + begin + (copies - i) * length, data + begin + copies * length, length);
  return size + copies * length;
}
