// The text of a rank's last failed call of the seam (cppool/runtime.h), and who caused it. For the rank's thread only.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "kernels/error.h"

namespace cppool::kernels {

class LastError {
 public:
  // Makes a call and turns what it throws into its status and the last error.
  template <typename Call>
  cppool_status Guard(Call call) noexcept {
    try {
      call();
      return CPPOOL_OK;
    } catch (const RuntimeError& error) {
      return Keep(error.status(), error.what(), error.culprit());
    } catch (const std::bad_alloc&) {
      return Keep(CPPOOL_OUT_OF_MEMORY, "the runtime itself found no memory");
    } catch (const std::exception& error) {
      return Keep(CPPOOL_INTERNAL, error.what());
    } catch (...) {
      return Keep(CPPOOL_INTERNAL, "an exception that is not a std::exception");
    }
  }

  void Clear() noexcept {
    text_.clear();
    culprit_ = RuntimeError::kOwn;
  }

  const char* text() const { return text_.c_str(); }  // until the next call; "" after Clear
  int culprit() const { return culprit_; }

 private:
  cppool_status Keep(cppool_status status, const char* text, int culprit = RuntimeError::kOwn) noexcept {
    Clear();
    culprit_ = culprit;
    try {
      text_ = text;
    } catch (...) {  // no memory for the text: only the status
    }
    return status;
  }

  std::string text_;
  int culprit_ = RuntimeError::kOwn;
};

}  // namespace cppool::kernels
