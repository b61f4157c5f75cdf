#include "protocol/kernel_words.h"

#include "tests/catch.h"

namespace cppool::protocol {

TEST_CASE(
    "words for kernels are a name that cppool finds, or a library's path with or without a kernel's name") {
  const auto are = [](const char* words, const char* path, const char* name) {
    const KernelWords parsed = ParseKernels(words);
    CAPTURE(words);
    CHECK(parsed.path == path);
    CHECK(parsed.name == name);
  };
  are("", "", "");
  are("cppool", "", "cppool");
  are("cudnn", "", "cudnn");
  are("./cudnn", "./cudnn", "");
  are("libmine.so", "libmine.so", "");
  are("a/libmine.so,fast", "a/libmine.so", "fast");
  are("a,b/libmine.so,cppool", "a,b/libmine.so", "cppool");
}

TEST_CASE("words without a path before their comma name no kernels") {
  for (const char* words : {"cppool", "cudnn", "libmine.so", "a/libmine.so,fast", ",a,b"})
    CHECK(NameKernels(words));
  for (const char* words : {"", ",", ",fast", ",cudnn"}) CHECK_FALSE(NameKernels(words));
}

}  // namespace cppool::protocol
