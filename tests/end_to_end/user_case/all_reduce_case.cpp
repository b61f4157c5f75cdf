// A user's case: an all-reduce of its own (an all-gather, then a kernel that sums), checked against the runtime's all-reduce.
#include <cppool/case.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "sum.h"

namespace {

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
  const int64_t count = v->integer(v, "count");
  if (v->boolean(v, "odd_only") && count % 2 == 0) {
    v->fail(v, "count must be odd when odd_only is set");
    return CPPOOL_INVALID_REQUEST;
  }
#ifndef WITH_CUDA
  if (std::strcmp(v->backend, "cuda") == 0) {
    v->fail(v, "this case was built without nvcc");
    return CPPOOL_UNSUPPORTED;
  }
#endif
  v->needs(v, static_cast<double>(count) * sizeof(float) * (v->world_size + 3));
  return CPPOOL_OK;
}

// Integers, so that a sum over 64 ranks is exact in float32.
float Input(uint64_t seed, int rank, size_t i) {
  return static_cast<float>((seed + 31 * static_cast<uint64_t>(rank) + 7 * i) % 1009) - 504;
}

struct HostSum {
  const float* in;
  float* out;
  size_t count;
  int ranks;

  static void Run(void* self) {
    const auto* s = static_cast<const HostSum*>(self);
    for (size_t i = 0; i < s->count; ++i) {
      float sum = 0;
      for (int rank = 0; rank < s->ranks; ++rank) sum += s->in[rank * s->count + i];
      s->out[i] = sum;
    }
  }
};

#define TRY(call)                                                                              \
  do {                                                                                         \
    const cppool_status status = (call);                                                       \
    if (status != CPPOOL_OK) return status; /* the runtime has the text, and frees the rest */ \
  } while (0)

cppool_status Sum(cppool_case_context* c, HostSum* arguments) {
  cppool_runtime* rt = c->runtime;
  if (std::strcmp(rt->backend, "host") == 0) return rt->enqueue(rt, rt->stream, &HostSum::Run, arguments);
#ifdef WITH_CUDA
  if (const char* error =
          LaunchSum(arguments->in, arguments->out, arguments->count, arguments->ranks, rt->stream)) {
    c->fail(c, error);
    return CPPOOL_CUDA;
  }
#endif
  return CPPOOL_OK;
}

cppool_status Run(cppool_case_context* c) {
  cppool_runtime* rt = c->runtime;
  const auto count = static_cast<size_t>(c->integer(c, "count"));
  const auto seed = static_cast<uint64_t>(c->integer(c, "seed"));
  const size_t bytes = count * sizeof(float);
  if (c->integer(c, "fail_rank") == rt->rank) {
    c->fail(c, "asked to fail");
    return CPPOOL_INTERNAL;
  }
  cppool_comm world = nullptr;
  int rank_in_world = 0, ranks = 0;
  TRY(rt->group(rt, CPPOOL_WORLD, &world, &rank_in_world, &ranks));
  void *host = nullptr, *in = nullptr, *all = nullptr, *ours = nullptr, *reference = nullptr;
  TRY(rt->alloc_host(rt, sizeof(HostSum) + 2 * bytes, &host));
  TRY(rt->alloc(rt, bytes, rt->stream, &in));
  TRY(rt->alloc(rt, bytes * rt->world_size, rt->stream, &all));
  TRY(rt->alloc(rt, bytes, rt->stream, &ours));
  TRY(rt->alloc(rt, bytes, rt->stream, &reference));
  // Not on this function's stack: it may return early, while the stream still uses them.
  auto* sum = static_cast<HostSum*>(host);
  auto* values = reinterpret_cast<float*>(sum + 1);
  for (size_t i = 0; i < count; ++i) values[i] = Input(seed, rt->rank, i);
  TRY(rt->copy(rt, in, values, bytes, rt->stream));

  *sum = {static_cast<const float*>(all), static_cast<float*>(ours), count, ranks};
  while (c->next_iteration(c)) {
    TRY(rt->mark(rt, rt->stream, "gather"));
    TRY(rt->all_gather(rt, in, all, bytes, world, rt->stream));
    TRY(rt->mark(rt, rt->stream, "sum"));
    TRY(Sum(c, sum));
    TRY(rt->mark(rt, rt->stream, nullptr));
  }
  c->work(c, "sum", static_cast<double>(count) * rt->world_size);
  if (c->checks) {
    TRY(rt->all_reduce(rt, in, reference, count, CPPOOL_FLOAT32, CPPOOL_SUM, world, rt->stream));
    TRY(rt->copy(rt, values, ours, bytes, rt->stream));
    TRY(rt->copy(rt, values + count, reference, bytes, rt->stream));
    TRY(rt->stream_synchronize(rt, rt->stream));
    if (c->integer(c, "wrong_rank") == rt->rank) values[count / 2] += 1;
    double worst = 0, error = 0, norm = 0;
    for (size_t i = 0; i < count; ++i) {
      const double difference = static_cast<double>(values[i]) - values[count + i];
      worst = std::fmax(worst, std::fabs(difference));
      error += difference * difference;
      norm += static_cast<double>(values[count + i]) * values[count + i];
    }
    const cppool_check check{"sum", "all_reduce", worst, norm > 0 ? std::sqrt(error / norm) : 0,
                             0,     worst == 0,   0};
    c->check(c, &check);
  }
  char gathered[32];
  std::snprintf(gathered, sizeof(gathered), "%zu", bytes * rt->world_size);
  c->result(c, "gathered_bytes", gathered);
  TRY(rt->stream_synchronize(rt, rt->stream));  // the host memory is in use until then
  for (void* memory : {in, all, ours, reference}) TRY(rt->free(rt, memory, rt->stream));
  return rt->free_host(rt, host);
}

const cppool_case kAllReduce{CPPOOL_CASE_ABI,
                             sizeof(cppool_case),
                             "all_reduce",
                             "gather and sum, against the runtime's all-reduce",
                             kParameters,
                             sizeof(kParameters) / sizeof(kParameters[0]),
                             &Validate,
                             &Run,
                             0};

}  // namespace

extern "C" __attribute__((visibility("default"))) const cppool_case* const* cppool_cases() {
  static const cppool_case* const cases[] = {&kAllReduce, nullptr};
  return cases;
}
