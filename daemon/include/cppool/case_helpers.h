// Help for cases in C++17: owners of memory, streams and events, errors as exceptions, seeded inputs,
// comparison, 16-bit numbers. Header only, over cppool/case.h; on CUDA too, without including CUDA. For
// example:
//     static cppool_status Run(cppool_case_context* c) {
//       return cppool::cases::Guard(c, [&] {
//         cppool::cases::DeviceBuffer<float> x(c->runtime, 1024);
//         ...
//         cppool::cases::Report(c, "x", "reference", cppool::cases::Compare(got, wanted, 1024, 1e-3));
//       });
//     }
#pragma once

#include <cppool/case.h>
#include <cppool/case_numbers.h>
#include <cppool/case_owners.h>

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <type_traits>

namespace cppool::cases {

// Runs `body` and returns the status of what it throws, with the text as the reason: for `run` and
// `validate`, which no exception may leave.
template <typename Context, typename Body>
cppool_status Guard(Context* c, Body&& body) noexcept {
  try {
    body();
    return CPPOOL_OK;
  } catch (const Error& error) {
    if constexpr (std::is_same_v<Context, cppool_case_context>)
      c->fail_by(c, error.what(), error.culprit());
    else
      c->fail(c, error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    c->fail(c, "no host memory is left");
    return CPPOOL_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    c->fail(c, error.what());
    return CPPOOL_INTERNAL;
  } catch (...) {
    c->fail(c, "something was thrown that is not a std::exception");
    return CPPOOL_INTERNAL;
  }
}

// A case without parameters and features. Everything lives as long as the library.
constexpr cppool_case MakeCase(const char* name, const char* doc,
                               cppool_status (*run)(cppool_case_context*)) {
  return {CPPOOL_CASE_ABI, sizeof(cppool_case), name, doc, nullptr, 0, nullptr, run, 0};
}

// The same with parameters. `validate` may be null.
template <std::size_t N>
constexpr cppool_case MakeCase(const char* name, const char* doc, const cppool_parameter (&parameters)[N],
                               cppool_status (*validate)(cppool_validation*),
                               cppool_status (*run)(cppool_case_context*)) {
  return {CPPOOL_CASE_ABI, sizeof(cppool_case), name, doc, parameters, N, validate, run, 0};
}

// Whether a runtime, or a cppool_validation, is on CUDA.
template <typename Context>
bool OnCuda(const Context* c) {
  return std::strcmp(c->backend, "cuda") == 0;
}

// A communicator, owned by the runtime, and this rank's number in it.
struct Group {
  cppool_comm comm = nullptr;
  int rank = 0;
  int size = 1;
};
inline Group WorldOf(cppool_runtime* rt) {
  Group group;
  Check(rt, rt->group(rt, CPPOOL_WORLD, &group.comm, &group.rank, &group.size));
  return group;
}

inline void Synchronize(cppool_runtime* rt) { Check(rt, rt->stream_synchronize(rt, rt->stream)); }

}  // namespace cppool::cases
