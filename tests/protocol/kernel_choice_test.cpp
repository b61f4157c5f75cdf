#include "protocol/kernel_choice.h"

#include "protocol/parameters.h"
#include "tests/catch.h"

namespace cppool::protocol {

TEST_CASE(
    "words for kernels are a name that cppool finds, or a library's path with or without a kernel's name") {
  using From = KernelChoice::From;
  const auto are = [](const char* words, const KernelChoice& choice) {
    CAPTURE(words);
    CHECK(ParseKernels(words) == choice);
    CHECK(choice.Words() == words);
  };
  are("cppool", {From::kCppool, "", ""});
  are("cudnn", {From::kCudnn, "", ""});
  are("./cudnn", {From::kLibrary, "./cudnn", ""});
  are("libmine.so", {From::kLibrary, "libmine.so", ""});
  are("a/libmine.so,fast", {From::kLibrary, "a/libmine.so", "fast"});
  are("a,b/libmine.so,cppool", {From::kLibrary, "a,b/libmine.so", "cppool"});
  are(",a,b", {From::kLibrary, ",a", "b"});
  CHECK(KernelChoice().Words().empty());
}

TEST_CASE("words without a path before their comma name no kernels") {
  using Catch::Matchers::ContainsSubstring;
  for (const char* words : {"", ",", ",fast", ",cudnn"}) {
    CAPTURE(words);
    CHECK_THROWS_WITH(ParseKernels(words), ContainsSubstring("must be \"cppool\", \"cudnn\", a library's") &&
                                               ContainsSubstring(", not \"" + std::string(words) + "\""));
  }
  CHECK_THROWS_WITH(ParseKernels(std::string("a\0b", 3)), ContainsSubstring("without a NUL character: "));
}

}  // namespace cppool::protocol
