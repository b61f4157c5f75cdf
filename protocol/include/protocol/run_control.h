// A request `run` or `validate` from when it has been read to its answer: another thread may cancel it, and
// see how far it is.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

namespace cppool::protocol {

// Shared by the thread that cancels, the one that answers, and the ranks.
class RunControl {
 public:
  // False: it has been answered, or is being answered. True: it will be answered as cancelled.
  bool Cancel();
  bool cancelled() const;

  // `notify` is called by the first Cancel, on its thread; at once when there was one. Empty: nothing is
  // called any more.
  void OnCancel(std::function<void()> notify);

  bool MayBegin(std::int64_t index);  // as Meeting's
  std::int64_t begun() const;         // iterations that a rank has begun

  // Its answer is being made: it cannot be cancelled from now on. Returns cancelled().
  bool Close();
  bool closed() const;

 private:
  mutable std::mutex mutex_;
  std::function<void()> notify_;
  std::int64_t begun_ = 0;
  bool cancelled_ = false;
  bool closed_ = false;
};

}  // namespace cppool::protocol
