// The built-in case: context-parallel attention, registered through cppool/case.h as any other.
#pragma once

#include <cppool/case.h>

namespace cppool {

const cppool_case* AttentionCase();  // lives as long as the program

}  // namespace cppool
