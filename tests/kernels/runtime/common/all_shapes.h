// The shapes of groups that a test goes through.
#pragma once

#include <vector>

#include "kernels/group_shape.h"

namespace cppool::kernels::test {

// Every shape of a world once: groups of one rank are the same for every stride.
inline std::vector<GroupShape> AllShapes(int world) {
  std::vector<GroupShape> shapes;
  for (int size = 1; size <= world; ++size) {
    for (int stride = 1; size * stride <= world; ++stride) {
      if (world % (size * stride) == 0 && (size > 1 || stride == 1)) shapes.push_back({size, stride});
    }
  }
  return shapes;
}

}  // namespace cppool::kernels::test
