// Calls of a foreign kernel's functions: what they fail with becomes an error that names the kernel, the
// function and the call.
#pragma once

#include <cppool/attention.h>

#include <array>
#include <exception>
#include <optional>
#include <string>

#include "kernels/attention/families/table/call.h"
#include "kernels/error.h"
#include "kernels/float_environment.h"

namespace cppool::kernels::table {

// The error for a function that has failed with `status`, or has thrown. `why`: its reason; empty: it gave
// none.
RuntimeError KernelError(const cppool_attention_kernel& kernel, const char* name, const CallForm& form,
                         int status, std::string why);

// Calls function(why, size) of the kernel. Nothing: CPPOOL_OK. A text: CPPOOL_UNSUPPORTED with this reason,
// which may be empty. Throws KernelError for every other status, and for an exception.
template <typename Function>
std::optional<std::string> CallKernel(const cppool_attention_kernel& kernel, const char* name,
                                      const CallForm& form, Function&& function) {
  std::array<char, 512> why{};
  int status = CPPOOL_INTERNAL;
  try {
    const FloatEnvironment kept;
    status = static_cast<int>(function(why.data(), why.size()));
    why.back() = '\0';
  } catch (const std::exception& error) {
    throw KernelError(kernel, name, form, status, std::string("threw ") + error.what());
  } catch (...) {
    throw KernelError(kernel, name, form, status, "threw something that is not a std::exception");
  }
  if (status == CPPOOL_OK) return std::nullopt;
  if (status == CPPOOL_UNSUPPORTED) return why.data();
  throw KernelError(kernel, name, form, status, why.data());
}

}  // namespace cppool::kernels::table
