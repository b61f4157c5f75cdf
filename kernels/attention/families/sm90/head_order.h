// In which order the forward kernel takes its items, which are tiles of queries times heads: the tiles of
// some heads come before those of the next ones, and within these heads one tile of each comes before the
// next tile, the most work first.
//
// Few heads at a time keep what is read of keys and values small, and let it arrive under the work on the
// heads before; but the last heads' tiles have to fill the multiprocessors to the end.
#pragma once

#include <algorithm>

#include "kernels/host_device.h"

namespace cppool::kernels::cuda::sm90 {

struct Item {
  int tile, head;
};

struct HeadOrder {
  int first = 1;  // heads whose tiles come first
  int next = 1;   // then those of so many heads at a time: they divide the others
};

// `tiles`: of each head, those that have work.
CPPOOL_HOST_DEVICE inline Item ItemOf(const HeadOrder& order, int tiles, int item) {
  int heads = order.first, first = 0;
  if (item >= tiles * order.first) {
    item -= tiles * order.first;
    heads = order.next;
    const int group = item / (tiles * heads);
    item -= group * (tiles * heads);
    first = order.first + group * heads;
  }
  return {item / heads, first + item % heads};
}

// For keys that are all there: about four tiles for each multiprocessor come at a time.
inline HeadOrder OrderOfHeads(int heads, int tiles, int multiprocessors) {
  const int next = std::clamp(4 * multiprocessors / tiles, 1, heads);
  return {next + (heads - next) % next, next};
}

// For keys that arrive by groups of heads while the kernel runs: the first heads have a tile for each
// multiprocessor, so that all of them begin with what arrives first. Heads are taken so many at a time to the
// end, unless their tiles leave much of a last round empty: then about four tiles for each multiprocessor
// come at a time.
inline HeadOrder OrderOfArrivals(int heads, int tiles, int multiprocessors) {
  int first = std::clamp((multiprocessors + tiles - 1) / tiles, 1, heads);
  while (heads % first != 0) ++first;
  const int rounds = (first * tiles + multiprocessors - 1) / multiprocessors;
  int next = first;
  if (10 * first * tiles < 9 * rounds * multiprocessors)
    next = std::clamp(4 * multiprocessors / tiles, 1, std::max(heads - first, 1));
  return {first + (heads - first) % next, next};
}

}  // namespace cppool::kernels::cuda::sm90
