// A libcudnn.so.9 that has a version and nothing else: all that the frontend needs to know documented limits.
#include <cstddef>
#include <cstdlib>

extern "C" std::size_t cudnnGetVersion() {
  const char* version = std::getenv("FAKE_CUDNN_VERSION");
  return version ? std::strtoul(version, nullptr, 10) : 91900;
}
