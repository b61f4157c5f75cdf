// The last failed call of a rank's seam (cppool/runtime.h). Used on the rank's thread only.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "kernels/error.h"

namespace cppool::kernels {

class LastError {
 public:
  LastError() = default;
  LastError(const LastError&) = delete;  // failure() points into it
  LastError& operator=(const LastError&) = delete;

  // Makes a call. An exception becomes the call's status, and the last failure. After Refuse no call is made.
  template <typename Call>
  cppool_status Guard(Call call) noexcept {
    try {
      if (refused_ != CPPOOL_OK) throw RuntimeError(refused_, why_);
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

  // Every call fails so from here on, until Clear.
  void Refuse(cppool_status status, std::string why) {
    refused_ = status;
    why_ = std::move(why);
  }

  void Clear() noexcept {
    refused_ = CPPOOL_OK;
    Forget();
  }

  // Valid until the next call that fails, or Clear; CPPOOL_OK and an empty text after Clear.
  const cppool_failure& failure() const { return failure_; }

 private:
  void Forget() noexcept {
    text_.clear();
    failure_ = {sizeof(cppool_failure), CPPOOL_OK, RuntimeError::kOwn, text_.c_str()};
  }

  cppool_status Keep(cppool_status status, const char* text, int culprit = RuntimeError::kOwn) noexcept {
    Forget();
    try {
      text_ = text;
    } catch (...) {  // no memory for the text: the other fields are kept
    }
    failure_ = {sizeof(cppool_failure), status, culprit, text_.c_str()};
    return status;
  }

  cppool_status refused_ = CPPOOL_OK;
  std::string why_;  // of Refuse
  std::string text_;
  cppool_failure failure_{sizeof(cppool_failure), CPPOOL_OK, RuntimeError::kOwn, ""};
};

}  // namespace cppool::kernels
