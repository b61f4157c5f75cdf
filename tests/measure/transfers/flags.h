// From the end of a copy, by way of a flag that is written after it in stream order, to a kernel that polls
// the flag.
#pragma once

#include "tests/measure/transfers/load.h"

namespace cppool::measure {

// Prints a table. A way that fails, or whose flag was seen before the bytes that it stands for, has the
// reason in place of figures.
void MeasureFlags(const Attention& attention);

}  // namespace cppool::measure
