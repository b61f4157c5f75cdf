// A case with parameters and a kernel: an all-reduce (an all-gather, then a kernel that sums), checked
// against the runtime's all-reduce.
#include <cppool/case_helpers.h>

#include "sum.h"

namespace cases = cppool::cases;

static const cppool_parameter kParameters[] = {
    {"count", CPPOOL_TYPE_INTEGER, "1024", nullptr, 1, 1 << 24, 0, "elements of each rank"},
    {"seed", CPPOOL_TYPE_INTEGER, "1", nullptr, 0, 1e9, 0, "seed of the inputs"},
    {"wrong_rank", CPPOOL_TYPE_INTEGER, "-1", nullptr, -1, 63, 0,
     "a rank whose check fails, to see how that looks"},
    {"fail_rank", CPPOOL_TYPE_INTEGER, "-1", nullptr, -1, 63, 0, "a rank that fails before it begins"},
    {"odd_only", CPPOOL_TYPE_BOOLEAN, "false", nullptr, 0, 0, 0, "an even count is an invalid request"},
};

static cppool_status Validate(cppool_validation* v) {
  return cases::Guard(v, [&] {
    const int64_t count = v->integer(v, "count");
    if (v->boolean(v, "odd_only") && count % 2 == 0)
      throw cases::Error(CPPOOL_INVALID_REQUEST, "count must be odd when odd_only is set");
    if (cases::OnCuda(v) && !kSumOnCuda)
      throw cases::Error(CPPOOL_UNSUPPORTED, "this case was built without nvcc");
    v->needs(v, static_cast<double>(count) * sizeof(float) * (v->world_size + 3));
  });
}

static cppool_status Run(cppool_case_context* c) {
  return cases::Guard(c, [&] {
    cppool_runtime* rt = c->runtime;
    const auto count = static_cast<size_t>(c->integer(c, "count"));
    if (c->integer(c, "fail_rank") == rt->rank) throw cases::Error(CPPOOL_INTERNAL, "asked to fail");
    const cases::Group world = cases::WorldOf(rt);
    cases::DeviceBuffer<float> in(rt, count), all(rt, count * world.size), ours(rt, count), wanted(rt, count);
    const cases::HostBuffer<float> values(rt, count), reference(rt, count);
    for (size_t i = 0; i < count; ++i) values[i] = cases::SmallInteger(c->integer(c, "seed"), rt->rank, i);
    in.CopyFrom(values.data());
    const cases::HostWork sum(rt, [count, ranks = world.size, from = all.data(), to = ours.data()] {
      Sum(from, to, count, ranks);
    });
    while (c->next_iteration(c)) {
      {
        const cases::Stage stage(rt, "gather");
        cases::Check(rt, rt->all_gather(rt, in.data(), all.data(), in.bytes(), world.comm, rt->stream));
      }
      const cases::Stage stage(rt, "sum");
      if (!cases::OnCuda(rt))
        sum.Enqueue();
      else if (const char* error = LaunchSum(all.data(), ours.data(), count, world.size, rt->stream))
        throw cases::Error(CPPOOL_CUDA, error);
    }
    c->work(c, "sum", static_cast<double>(count) * world.size);
    c->result(c, "gathered_bytes", std::to_string(all.bytes()).c_str());
    if (!c->checks) return;
    cases::Check(rt, rt->all_reduce(rt, in.data(), wanted.data(), count, CPPOOL_FLOAT32, CPPOOL_SUM,
                                    world.comm, rt->stream));
    ours.CopyTo(values.data());
    wanted.CopyTo(reference.data());
    cases::Synchronize(rt);
    if (c->integer(c, "wrong_rank") == rt->rank) values[count / 2] = NAN;
    cases::Report(c, "sum", "all_reduce", cases::Compare(values, reference, count, 0));
  });
}

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case kAllReduce = cases::MakeCase(
      "all_reduce", "gather and sum, against the runtime's all-reduce", kParameters, &Validate, &Run);
  static const cppool_case* const all[] = {&kAllReduce, nullptr};
  return all;
}
