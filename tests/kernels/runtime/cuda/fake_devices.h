// Fake devices in host memory, for tests without a GPU.
#pragma once

#include <cstddef>

namespace cppool::kernels::test {

// Declares that this memory is on `device`. Call it before any thread uses the memory.
void Place(const void* memory, std::size_t bytes, int device);
// Removes all declarations of Place.
void Forget();
// Sets the device of the calling thread. A reduction on this thread that reads memory of another device
// throws.
void UseDevice(int device);

}  // namespace cppool::kernels::test
