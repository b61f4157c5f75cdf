// Compiled as the library is: no bug is there, which the compiler knows.
#include "kernels/planted_bug.h"

static_assert(!cppool::kernels::kPlantsBugs);
static_assert(!cppool::kernels::Planted(cppool::kernels::Bug::kDqLeftZero));
static_assert(!cppool::kernels::PlantedByChance(cppool::kernels::Bug::kOrderVaries));
