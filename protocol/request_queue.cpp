#include "protocol/request_queue.h"

#include <algorithm>
#include <utility>

#include "protocol/json_text.h"

namespace cppool::protocol {
namespace {

constexpr std::size_t kMostNamed = 8;  // ids in an error's text

std::variant<Request, RequestError> Parse(const LineReader::Line& line, const RunOptions& defaults) {
  try {
    if (line.overlong) {
      throw RequestError("a request line has at most " + std::to_string(kMaxRequestBytes) +
                             " bytes; this one has " + std::to_string(line.text.size() + line.dropped),
                         std::nullopt);
    }
    return ParseRequest(line.text, defaults);
  } catch (const RequestError& error) {
    return error;
  }
}

bool CanBeCancelled(const IncomingRequest& request) { return request.run() && request.id(); }

}  // namespace

IncomingRequest::IncomingRequest(const LineReader::Line& line, const RunOptions& defaults)
    : content(Parse(line, defaults)) {}

const RunRequest* IncomingRequest::run() const { return request() ? RunOf(request()->operation) : nullptr; }

const std::optional<Json>& IncomingRequest::id() const {
  return request() ? request()->id : std::get<RequestError>(content).id;
}

bool IncomingRequest::Overtakes() const {
  return request() && (std::holds_alternative<CancelRequest>(request()->operation) ||
                       std::holds_alternative<StatusRequest>(request()->operation));
}

bool IncomingRequest::MayTakeLong() const {
  return run() || (request() && std::holds_alternative<ListRequest>(request()->operation));
}

std::size_t RequestQueue::waiting() const {
  const std::lock_guard lock(mutex_);
  return waiting_.size();
}

void RequestQueue::Push(Entry request) {
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(request));
}

RequestQueue::Entry RequestQueue::Pop() {
  const std::lock_guard lock(mutex_);
  if (waiting_.empty()) return nullptr;
  under_way_ = std::move(waiting_.front());
  waiting_.pop_front();
  return under_way_;
}

RequestQueue::Entry RequestQueue::under_way() const {
  const std::lock_guard lock(mutex_);
  return under_way_;
}

RequestQueue::Cancelled RequestQueue::Cancel(const Json& id) {
  const std::lock_guard lock(mutex_);
  const auto meant = [&](const Entry& entry) { return CanBeCancelled(*entry) && *entry->id() == id; };
  const bool running = under_way_ && meant(under_way_) && !under_way_->control.closed();
  const auto matches = running + std::ranges::count_if(waiting_, meant);
  if (matches > 1)
    return {nullptr, std::to_string(matches) + " requests that wait or run have the id " + EchoValue(id) +
                         ": none is cancelled"};
  if (running && under_way_->control.Cancel()) return {};
  if (const auto found = std::ranges::find_if(waiting_, meant); found != waiting_.end()) {
    Entry waited = std::move(*found);
    waiting_.erase(found);
    return {std::move(waited), ""};
  }
  std::string known;
  std::size_t unnamed = 0, named = 0;
  const auto name = [&](const Entry& entry, const char* what) {
    if (!CanBeCancelled(*entry)) return;
    if (named == kMostNamed) return static_cast<void>(++unnamed);
    known += (named++ ? ", " : "") + EchoValue(*entry->id()) + what;
  };
  if (under_way_ && !under_way_->control.closed()) name(under_way_, " runs");
  for (const Entry& entry : waiting_) name(entry, " waits");
  if (unnamed > 0) known += ", and " + std::to_string(unnamed) + " more wait";
  return {nullptr, "no `run` or `validate` with the id " + EchoValue(id) + " waits or runs" +
                       (known.empty() ? ": none does" : " (" + known + ")") + "; it is answered or unknown"};
}

}  // namespace cppool::protocol
