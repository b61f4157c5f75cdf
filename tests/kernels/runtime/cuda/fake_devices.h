// Devices made up of plain memory, for what can be tested without a GPU.
#pragma once

#include <cstddef>

namespace cppool::kernels::test {

// Says that this memory is on a device. Before any thread uses it.
void Place(const void* memory, std::size_t bytes, int device);
// Forgets what was placed.
void Forget();
// The calling thread's: a reduction that reads memory placed on another one throws.
void UseDevice(int device);

}  // namespace cppool::kernels::test
