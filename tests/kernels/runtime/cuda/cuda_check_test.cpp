// Tests of the checks that throw: the status and the text of the error; and of loading NCCL at run time.
#include "kernels/runtime/cuda/check.h"

#include <string>

#include "kernels/runtime/cuda/nccl_api.h"
#include "tests/catch.h"

namespace cppool::kernels::cuda {
namespace {

template <typename Call>
RuntimeError Thrown(Call call) {
  try {
    call();
  } catch (const RuntimeError& error) {
    return error;
  }
  return RuntimeError(CPPOOL_OK, "nothing was thrown");
}

bool Contains(const RuntimeError& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("CheckCuda distinguishes out of memory from other errors, and names the operation") {
  CHECK_NOTHROW(CheckCuda(cudaSuccess, "nothing"));
  const RuntimeError memory = Thrown([] { CheckCuda(cudaErrorMemoryAllocation, "taking 5 bytes"); });
  CHECK(memory.status() == CPPOOL_OUT_OF_MEMORY);
  CHECK(Contains(memory, "taking 5 bytes"));
  const RuntimeError other = Thrown([] { CheckCuda(cudaErrorIllegalAddress, "copying"); });
  CHECK(other.status() == CPPOOL_CUDA);
  CHECK(Contains(other, "copying"));
  CHECK(Contains(other, "cudaErrorIllegalAddress"));
}

TEST_CASE("CheckNccl names the operation and NCCL's error") {
  CHECK_NOTHROW(CheckNccl(ncclSuccess, "nothing"));
  const RuntimeError error = Thrown([] { CheckNccl(ncclRemoteError, "sending"); });
  CHECK(error.status() == CPPOOL_NCCL);
  CHECK(Contains(error, "sending"));
  CHECK(Contains(error, Nccl().GetErrorString(ncclRemoteError)));
}

TEST_CASE("A missing NCCL library or function is an error with advice") {
  const RuntimeError missing = Thrown([] { NcclApi("libnccl.so.2-of-a-test"); });
  CHECK(missing.status() == CPPOOL_NCCL);
  CHECK(Contains(missing, "libnccl.so.2-of-a-test: cannot open"));
  CHECK(Contains(missing, "LD_LIBRARY_PATH"));
  CHECK(Contains(missing, "peer"));
  const RuntimeError lacking = Thrown([] { NcclApi(CPPOOL_FAKE_NCCL); });
  CHECK(lacking.status() == CPPOOL_NCCL);
  CHECK(Contains(lacking, CPPOOL_FAKE_NCCL " has no ncclGetUniqueId"));
}

}  // namespace cppool::kernels::cuda
