// The attention families of the CUDA module.
#pragma once

#include <vector>

#include "kernels/attention/attention_family.h"

namespace cppool::kernels::cuda {

// The preferred ones first. Those that are for one kind of GPU are among them if all GPUs are of that kind.
std::vector<const AttentionFamily*> AttentionFamilies();

}  // namespace cppool::kernels::cuda
