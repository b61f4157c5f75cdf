// Tests that the host runtime's functions return a status when the process is out of memory: exceptions must
// not cross the C interface.
#include <cstdlib>
#include <new>

#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

namespace {

thread_local bool no_memory = false;

struct NoMemory {
  NoMemory() { no_memory = true; }
  ~NoMemory() { no_memory = false; }
};

}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = no_memory ? nullptr : std::malloc(bytes ? bytes : 1);
  return memory ? memory : throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

TEST_CASE(
    "host runtime: a failure without memory for its text returns a status and does not keep the older text") {
  cppool::test::World world(1);
  world.rank(0).BeginCase();
  cppool_runtime* const rt = world.rank(0).seam();
  CHECK(rt->free(rt, &world, rt->stream) == CPPOOL_INTERNAL);
  const std::string older = rt->last_error(rt);
  CHECK_FALSE(older.empty());
  cppool_status status = CPPOOL_OK;
  {
    const NoMemory now;
    status = rt->fill(rt, &world, 0, 1, nullptr);
  }
  CHECK(status == CPPOOL_OUT_OF_MEMORY);
  CHECK(rt->last_error(rt) != older);
  world.rank(0).EndCase();
}
