// libcppool_cudnn.so without a GPU and without cuDNN: which calls it takes with which version of libcudnn,
// and what it says when there is none.
#include <cppool/runtime.h>

#include <fstream>
#include <string>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/files.h"

namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

std::string Probe(const std::string& environment, const std::string& words = "") {
  return cppool::test::RunChild("env -u LD_LIBRARY_PATH " + environment +
                                " " CPPOOL_CUDNN_PROBE " " CPPOOL_CUDNN_MODULE_FILE " " + words)
      .output;
}

// With a libcudnn of this version, on a GPU of this compute capability.
std::string Supports(const std::string& call, int version = 91900, const std::string& capability = "90") {
  return Probe("CPPOOL_CUDNN_LIBRARY=" CPPOOL_FAKE_CUDNN " FAKE_CUDNN_VERSION=" + std::to_string(version) +
                   " LD_PRELOAD=" CPPOOL_FAKE_DRIVER_DIR "/libcuda.so.1 FAKE_CU_CAPABILITY=" + capability,
               "supports " + call);
}

const std::string kUnsupported = "status " + std::to_string(CPPOOL_UNSUPPORTED) + ": ";

}  // namespace

TEST_CASE("cuDNN: calls that it takes") {
  for (const char* pass : {"forward ", "backward "}) {
    INFO(pass);
    for (const char* dims : {"64 64", "128 128", "192 128", "128 64"}) {
      INFO(dims);
      const std::string start = pass + std::string(dims);
      CHECK(Supports(start + " 300 500 tl -1 -1") == "ok\n");
      CHECK(Supports(start + " 300 500 tl -1 0") == "ok\n");
      CHECK(Supports(start + " 300 500 br -1 0") == "ok\n");
      CHECK(Supports(start + " 300 500 br 64 0") == "ok\n");
    }
  }
}

TEST_CASE("cuDNN: calls that it does not take, with its own reason") {
  for (const char* pass : {"forward ", "backward "}) {
    INFO(pass);
    const auto reason = [&](const std::string& call) { return Supports(pass + call); };
    CHECK_THAT(reason("100 100 300 300 tl -1 -1"), StartsWith(kUnsupported));
    CHECK_THAT(reason("100 100 300 300 tl -1 -1"), ContainsSubstring("multiple of 8"));
    CHECK_THAT(reason("64 64 500 300 br -1 0"), ContainsSubstring("max_s_q > max_s_kv"));
    CHECK_THAT(reason("64 64 500 300 tl 64 0"), ContainsSubstring("max_s_q <= max_s_kv"));
  }
}

TEST_CASE("cuDNN: calls with a bias") {
  for (const char* pass : {"forward ", "backward "}) {
    INFO(pass);
    const auto answer = [&](const std::string& call) { return Supports(pass + call); };
    for (const char* shape : {"11ss", "1hss", "b1ss", "bhss"}) {
      INFO(shape);
      CHECK(answer("128 128 300 500 tl -1 0 " + std::string(shape)) == "ok\n");
    }
    CHECK(answer("64 64 300 500 tl -1 -1 1hss") == "ok\n");
    CHECK(answer("192 128 300 500 tl 64 0 1hss") == "ok\n");
    CHECK_THAT(answer("64 64 300 500 br -1 0 1hss"), ContainsSubstring("is_bias=False"));
  }
  CHECK(Supports("forward 64 64 300 500 tl -1 0 111s") == "ok\n");
  const std::string shared = Supports("backward 64 64 300 500 tl -1 0 111s");
  CHECK_THAT(shared, StartsWith(kUnsupported));
  CHECK_THAT(shared, ContainsSubstring("no dbias of a bias that all queries share"));
  CHECK(Supports("forward 64 64 300 500 tl -1 0 1hss strided") == "ok\n");
  CHECK_THAT(Supports("backward 64 64 300 500 tl -1 0 1hss strided"), ContainsSubstring("packed dbias"));
  CHECK(Supports("backward 64 64 300 500 tl -1 0 1hss deterministic") == "ok\n");
  CHECK_THAT(Supports("backward 64 64 300 500 tl -1 0 1hss deterministic", 91900, "100"),
             ContainsSubstring("when dbias"));
  // A limit of a version, which the frontend knows.
  CHECK_THAT(Supports("backward 64 64 300 500 tl -1 0 1hss", 90400), ContainsSubstring("dBias"));
}

TEST_CASE("cuDNN: calls with ALiBi") {
  for (const char* pass : {"forward ", "backward "}) {
    INFO(pass);
    const auto answer = [&](const std::string& call) { return Supports(pass + call); };
    for (const char* mask : {"tl -1 -1", "tl -1 0", "br -1 0", "tl 64 0", "tl 64 32"}) {
      INFO(mask);
      CHECK(answer("128 128 300 500 " + std::string(mask) + " alibi") == "ok\n");
    }
    // The mask's own limits are those without ALiBi.
    CHECK_THAT(answer("64 64 500 300 br -1 0 alibi"), ContainsSubstring("max_s_q > max_s_kv"));
    CHECK_THAT(answer("64 64 500 300 tl 64 0 alibi"), ContainsSubstring("max_s_q <= max_s_kv"));
    CHECK_THAT(answer("100 100 300 300 tl -1 -1 alibi"), ContainsSubstring("multiple of 8"));
  }
}

TEST_CASE("cuDNN: calls that ask for the largest logits") {
  for (const char* call : {"128 128 300 500 tl -1 0 max_logit", "64 64 1 500 tl -1 -1 max_logit",
                           "64 64 300 500 tl -1 0 max_logit 1hss", "64 64 300 500 tl -1 0 max_logit alibi"}) {
    INFO(call);
    CHECK(Supports(std::string("forward ") + call) == "ok\n");
    CHECK(Supports(std::string("backward ") + call) == "ok\n");
  }
}

TEST_CASE("cuDNN: calls in fp8") {
  const auto reason = [&](const std::string& call, const std::string& capability) {
    const std::string text = Supports(call + " fp8", 91900, capability);
    CHECK_THAT(text, StartsWith(kUnsupported));
    return text;
  };
  const std::string call = "forward 128 128 256 256 tl -1 0";
  CHECK(Supports(call + " fp8", 91900, "90") == "ok\n");
  CHECK_THAT(reason(call + " 1hss", "90"), ContainsSubstring("does not support bias"));
  CHECK_THAT(reason("forward 128 128 256 512 br -1 0", "90"), ContainsSubstring("Blackwell"));
  CHECK_THAT(reason(call, "80"), ContainsSubstring("Hopper"));
  CHECK(Supports(call + " fp8", 91900, "100") == "ok\n");
  CHECK_THAT(reason("backward 128 128 256 256 tl -1 0", "90"), ContainsSubstring("delta is given"));
}

TEST_CASE("cuDNN: its version and the GPU decide") {
  CHECK(Supports("backward 128 128 256 256 tl -1 0", 91002) == "ok\n");
  CHECK_THAT(Supports("backward 128 128 256 256 tl -1 0", 91000), ContainsSubstring("9.10.0/9.10.1"));
  CHECK(Supports("backward 256 256 256 256 tl -1 0", 91900, "90") == "ok\n");
  CHECK_THAT(Supports("backward 256 256 256 256 tl -1 0", 91900, "80"),
             ContainsSubstring("less than or equal to 128"));
  CHECK_THAT(Supports("forward 128 128 256 256 tl -1 0", 91900, "75"), ContainsSubstring("SM80"));
}

TEST_CASE("cuDNN: without libcudnn every call is refused, with where it was looked for") {
  const std::string call = "supports forward 128 128 256 256 tl -1 0";
  const std::string nowhere = Probe("CPPOOL_CUDNN_LIBRARY=/nowhere/libcudnn.so.9", call);
  CHECK_THAT(nowhere, StartsWith(kUnsupported + "libcudnn.so.9 was not found"));
  CHECK_THAT(nowhere, ContainsSubstring("/nowhere/libcudnn.so.9"));
  CHECK_THAT(nowhere, ContainsSubstring("pip install nvidia-cudnn-cu13"));
  CHECK_THAT(Probe("CPPOOL_CUDNN_LIBRARY=/nowhere/libcudnn.so.9"), StartsWith("libcudnn.so.9 was not found"));
  CHECK_THAT(Probe("CPPOOL_CUDNN_LIBRARY=" CPPOOL_FAKE_CUDNN " FAKE_CUDNN_VERSION=92801"),
             StartsWith("9.28.1 (built with 9."));

  cppool::test::TemporaryFolder folder;
  std::ofstream(folder / "libcudnn.so.9") << "not a library";
  CHECK_THAT(Probe("CPPOOL_CUDNN_LIBRARY=" + folder.File("libcudnn.so.9"), call),
             ContainsSubstring("file too short") || ContainsSubstring("invalid ELF header"));
  CHECK_THAT(Probe("CPPOOL_CUDNN_LIBRARY=" CPPOOL_FAKE_CUDNN " FAKE_CUDNN_VERSION=8902", call),
             ContainsSubstring("libcudnn is version 8.9.2, and this module was built for version 9"));
}

TEST_CASE("cuDNN: prepare fails in words where libcudnn cannot make a plan") {
  const std::string text =
      Probe("CPPOOL_CUDNN_LIBRARY=" CPPOOL_FAKE_CUDNN, "prepare forward 128 128 256 256 tl -1 0");
  CHECK_THAT(text, StartsWith("status "));
  CHECK_THAT(text, ContainsSubstring("libcudart") || ContainsSubstring("cudnnCreate"));
}
