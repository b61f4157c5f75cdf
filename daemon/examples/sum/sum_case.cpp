// A whole case: rank r contributes r + 1, and the all-reduce must give the sum over all ranks.
#include <cppool/case_helpers.h>

namespace cases = cppool::cases;

static cppool_status Run(cppool_case_context* c) {
  return cases::Guard(c, [&] {  // an exception becomes the rank's error
    cppool_runtime* rt = c->runtime;
    const cases::Group world = cases::WorldOf(rt);
    cases::DeviceBuffer<float> in(rt, 1), out(rt, 1);
    const cases::HostBuffer<float> value(rt, 1);
    value[0] = static_cast<float>(world.rank + 1);
    in.CopyFrom(value.data());
    while (c->next_iteration(c)) {          // warm-up and timed iterations
      const cases::Stage stage(rt, "sum");  // timed, and named when a deadline passes
      cases::Check(rt, rt->all_reduce(rt, in.data(), out.data(), 1, CPPOOL_FLOAT32, CPPOOL_SUM, world.comm,
                                      rt->stream));
    }
    out.CopyTo(value.data());
    cases::Synchronize(rt);
    const float expected[] = {static_cast<float>(world.size * (world.size + 1) / 2)};
    cases::Report(c, "sum", "closed form", cases::Compare(value, expected, 1, 0));
  });
}

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case kSum = cases::MakeCase("sum", "a sum over all ranks", &Run);
  static const cppool_case* const all[] = {&kSum, nullptr};
  return all;
}
