// The loader of the CUDA module: what it finds, and what it says when it does not.
#include <cppool/runtime.h>

#include <string>

#include "tests/catch.h"
#include "tests/kernels/runtime/common/child.h"

namespace {

// The paths come from CMake; the probe prints "status N: text" for a RuntimeError.
std::string Count(const std::string& environment) {
  return cppool::test::RunChild("LD_LIBRARY_PATH=" CPPOOL_FAKE_DRIVER_DIR " " + environment +
                                " " CPPOOL_LOADER_PROBE " count")
      .output;
}

std::string Create(const std::string& module) {
  return cppool::test::RunChild("CPPOOL_CUDA_MODULE=" + module + " " CPPOOL_LOADER_PROBE " create").output;
}

std::string Status(cppool_status status) { return "status " + std::to_string(status) + ": "; }

}  // namespace

TEST_CASE("CUDA devices: counted by the driver; none without a device") {
  CHECK(Count("FAKE_CU_COUNT=3") == "3\n");
  CHECK(Count("FAKE_CU_COUNT=0") == "0\n");
  CHECK(Count("FAKE_CU_INIT=100 FAKE_CU_COUNT=3") == "0\n");  // CUDA_ERROR_NO_DEVICE
  CHECK(Count("FAKE_CU_INIT=34 FAKE_CU_COUNT=3") == "0\n");   // the stub for linking
  CHECK(Count("FAKE_CU_COUNT_RESULT=100 FAKE_CU_COUNT=3") == "0\n");
}

TEST_CASE("CUDA devices: a broken driver is an error, not no devices") {
  const std::string not_ready = Count("FAKE_CU_INIT=802");
  CHECK_THAT(not_ready, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
  CHECK_THAT(not_ready,
             Catch::Matchers::ContainsSubstring("cuInit returned CUDA_ERROR_SYSTEM_NOT_READY (802)"));
  CHECK_THAT(not_ready, Catch::Matchers::ContainsSubstring("fabricmanager"));
  CHECK_THAT(Count("FAKE_CU_INIT=999"), Catch::Matchers::ContainsSubstring("cuInit returned error 999"));
  CHECK_THAT(Count("FAKE_CU_COUNT_RESULT=304"),
             Catch::Matchers::ContainsSubstring("cuDeviceGetCount returned error 304"));
}

TEST_CASE("CUDA module: missing, the wrong file, another version") {
  const std::string missing = Create("/nowhere/libcppool_cuda.so");
  CHECK_THAT(missing, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
  CHECK_THAT(missing,
             Catch::Matchers::ContainsSubstring("was not found (looked at /nowhere/libcppool_cuda.so)"));
  CHECK_THAT(missing, Catch::Matchers::ContainsSubstring("CPPOOL_CUDA=ON"));
  CHECK_THAT(Create(CPPOOL_FAKE_DRIVER_DIR "/libcuda.so.1"),
             Catch::Matchers::ContainsSubstring("not cppool's CUDA module"));
  CHECK_THAT(Create("/proc/self/maps"), Catch::Matchers::ContainsSubstring("does not load"));
  const std::string other = Create(CPPOOL_FAKE_MODULE_OTHER_VERSION);
  CHECK_THAT(other, Catch::Matchers::ContainsSubstring(
                        "is of version 0.0.1-other, this program of " CPPOOL_VERSION));
  CHECK_THAT(other, Catch::Matchers::ContainsSubstring(CPPOOL_FAKE_MODULE_OTHER_VERSION));
}

TEST_CASE("CUDA module: the right one is used for the backend and its kernels") {
  CHECK(Create(CPPOOL_FAKE_MODULE) ==
        "fake of 3, peer\n" + Status(CPPOOL_UNSUPPORTED) + "fake rank\n" + Status(CPPOOL_UNSUPPORTED) +
            "fake families\n" + Status(CPPOOL_UNSUPPORTED) + "fake tensor operations\n" +
            Status(CPPOOL_UNSUPPORTED) + "fake checks\n" + Status(CPPOOL_INTERNAL) +
            "no kernels for the backend abacus\nthe host's own\n");
}
