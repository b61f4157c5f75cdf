// The requests that have been read and not begun, in order, and the one under way.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>

#include "protocol/framing.h"
#include "protocol/request.h"
#include "protocol/run_control.h"

namespace cppool::protocol {

// A line of stdin, parsed as ParseRequest does.
struct IncomingRequest {
  explicit IncomingRequest(const LineReader::Line& line, const RunOptions& defaults = {});

  const Request* request() const { return std::get_if<Request>(&content); }
  const RunRequest* run() const;  // of `run` and `validate`; else null
  const std::optional<Json>& id() const;
  bool Overtakes() const;    // `cancel` and `status` do not wait for their turn
  bool MayTakeLong() const;  // runs a case or opens libraries: others may want to overtake it

  const std::variant<Request, RequestError> content;
  RunControl control;  // of `run` and `validate`
};

// Thread-safe.
class RequestQueue {
 public:
  using Entry = std::shared_ptr<IncomingRequest>;
  static constexpr std::size_t kMost = 64;  // that wait

  std::size_t waiting() const;
  void Push(Entry request);
  Entry Pop();              // null: none waits. It is under way until the next Pop
  Entry under_way() const;  // the latest that was popped, answered or not; null: none

  // Cancels the `run` or `validate` with this id. `waited`: it is taken out of the queue, and the caller
  // answers it. Null without an `error`: it is under way, and will be answered as cancelled. `error`: why
  // nothing was cancelled.
  struct Cancelled {
    Entry waited;
    std::string error;
  };
  Cancelled Cancel(const Json& id);

 private:
  mutable std::mutex mutex_;
  std::deque<Entry> waiting_;
  Entry under_way_;
};

}  // namespace cppool::protocol
