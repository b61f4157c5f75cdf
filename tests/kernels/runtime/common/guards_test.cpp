// The host runtime detects writes outside of allocations; the error names the rank and the allocation.
#include <cstring>

#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

using namespace cppool::kernels;
using cppool::test::World;

namespace {

// The error at the end of rank 1's case after a write of `count` bytes at `offset` of an allocation of 100
// bytes.
std::string AfterWrite(World& world, bool host_memory, bool freed, std::ptrdiff_t offset, std::size_t count) {
  return world.CaseErrors([&](cppool_runtime* rt) {
    if (rt->rank != 1) return;
    void* memory = nullptr;
    Check(rt, host_memory ? rt->alloc_host(rt, 100, &memory) : rt->alloc(rt, 100, rt->stream, &memory));
    Enqueue(rt, rt->stream, [at = static_cast<char*>(memory) + offset, count] { std::memset(at, 0, count); });
    if (freed) Check(rt, host_memory ? rt->free_host(rt, memory) : rt->free(rt, memory, rt->stream));
  })[1];
}

}  // namespace

TEST_CASE("host memory: only writes outside of an allocation are reported, whether it was freed or not") {
  World world(2);
  for (const bool host_memory : {false, true}) {
    for (const bool freed : {false, true}) {
      CAPTURE(host_memory, freed);
      const auto after = [&](std::ptrdiff_t offset, std::size_t count) {
        return AfterWrite(world, host_memory, freed, offset, count);
      };
      CHECK(after(0, 100) == "");
      CHECK(after(100, 1) == "wrote out of bounds: bytes 100 to 100 of an allocation of 100 bytes");
      CHECK(after(92, 16) == "wrote out of bounds: bytes 100 to 107 of an allocation of 100 bytes");
      CHECK(after(150, 2) == "wrote out of bounds: bytes 150 to 151 of an allocation of 100 bytes");
      CHECK(after(-1, 2) == "wrote out of bounds: bytes -1 to -1 of an allocation of 100 bytes");
      CHECK(after(-256, 3) == "wrote out of bounds: bytes -256 to -254 of an allocation of 100 bytes");
      CHECK(after(0, 100) == "");  // earlier errors are not reported again
    }
  }
}
