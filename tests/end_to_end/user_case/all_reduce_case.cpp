// A user's case: an all-reduce of its own (an all-gather, then a kernel that sums), checked against the runtime's all-reduce.
#include <cppool/case_helpers.h>

#include "sum.h"

namespace {

namespace cases = cppool::cases;

const cppool_parameter kParameters[] = {
    {"count", CPPOOL_TYPE_INTEGER, "1024", nullptr, 1, 1 << 24, 0, "elements of each rank"},
    {"seed", CPPOOL_TYPE_INTEGER, "1", nullptr, 0, 1e9, 0, "of the inputs"},
    {"wrong_rank", CPPOOL_TYPE_INTEGER, "-1", nullptr, -1, 63, 0,
     "the rank whose result is changed, so that its check fails"},
    {"fail_rank", CPPOOL_TYPE_INTEGER, "-1", nullptr, -1, 63, 0,
     "the rank that fails before it communicates"},
    {"odd_only", CPPOOL_TYPE_BOOLEAN, "false", nullptr, 0, 0, 0, "an even count is an invalid request"},
};

cppool_status Validate(cppool_validation* v) {
  return cases::Guard(v, [&] {
    const int64_t count = v->integer(v, "count");
    if (v->boolean(v, "odd_only") && count % 2 == 0)
      throw cases::Error(CPPOOL_INVALID_REQUEST, "count must be odd when odd_only is set");
#ifndef WITH_CUDA
    if (cases::OnCuda(v)) throw cases::Error(CPPOOL_UNSUPPORTED, "this case was built without nvcc");
#endif
    v->needs(v, static_cast<double>(count) * sizeof(float) * (v->world_size + 3));
  });
}

// The sum on the host, as the argument of work on a stream.
struct HostSum {
  const float* in;
  float* out;
  size_t count;
  int ranks;

  static void Run(void* self) {
    const auto* s = static_cast<const HostSum*>(self);
    for (size_t i = 0; i < s->count; ++i) {
      s->out[i] = 0;
      for (int rank = 0; rank < s->ranks; ++rank) s->out[i] += s->in[rank * s->count + i];
    }
  }
};

void Sum(cppool_runtime* rt, HostSum* arguments) {
  if (!cases::OnCuda(rt)) cases::Check(rt, rt->enqueue(rt, rt->stream, &HostSum::Run, arguments));
#ifdef WITH_CUDA
  const auto& [in, out, count, ranks] = *arguments;
  if (cases::OnCuda(rt))
    if (const char* error = LaunchSum(in, out, count, ranks, rt->stream))
      throw cases::Error(CPPOOL_CUDA, error);
#endif
}

cppool_status Run(cppool_case_context* c) {
  return cases::Guard(c, [&] {
    cppool_runtime* rt = c->runtime;
    const auto count = static_cast<size_t>(c->integer(c, "count"));
    if (c->integer(c, "fail_rank") == rt->rank) throw cases::Error(CPPOOL_INTERNAL, "asked to fail");
    const cases::Group world = cases::WorldOf(rt);
    cases::DeviceBuffer<float> in(rt, count), all(rt, count * world.size), ours(rt, count),
        reference(rt, count);
    cases::HostBuffer<float> values(rt, count), wanted(rt, count);
    for (size_t i = 0; i < count; ++i) values[i] = cases::SmallInteger(c->integer(c, "seed"), rt->rank, i);
    in.CopyFrom(values.data());

    cases::HostBuffer<HostSum> sum(rt, 1);  // not on the stack: the stream may use it after an error, too
    sum[0] = {all.data(), ours.data(), count, world.size};
    while (c->next_iteration(c)) {
      {
        const cases::Stage stage(rt, "gather");
        cases::Check(rt, rt->all_gather(rt, in.data(), all.data(), in.bytes(), world.comm, rt->stream));
      }
      const cases::Stage stage(rt, "sum");
      Sum(rt, sum.data());
    }
    c->work(c, "sum", static_cast<double>(count) * world.size);
    c->result(c, "gathered_bytes", std::to_string(all.bytes()).c_str());
    if (!c->checks) return;
    cases::Check(rt, rt->all_reduce(rt, in.data(), reference.data(), count, CPPOOL_FLOAT32, CPPOOL_SUM,
                                    world.comm, rt->stream));
    ours.CopyTo(values.data());
    reference.CopyTo(wanted.data());
    cases::Synchronize(rt);
    if (c->integer(c, "wrong_rank") == rt->rank) values[count / 2] = NAN;
    cases::Report(c, "sum", "all_reduce", cases::Compare(values, wanted, count, 0));
  });
}

const cppool_case kAllReduce = cases::MakeCase(
    "all_reduce", "gather and sum, against the runtime's all-reduce", kParameters, &Validate, &Run);

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kAllReduce, nullptr};
  return cases;
}
