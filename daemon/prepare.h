// From a request to something that can run: case, parameters, relations, memory. The order is the contract's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/case_registry.h"
#include "daemon/world.h"
#include "kernels/fault_injector.h"
#include "protocol/request.h"

namespace cppool::daemon {

// A run that every rank can start: immutable, and shared with the ranks' threads.
struct PreparedRun {
  RegisteredCase registered;  // a copy: small, and it outlives every thread that uses it
  protocol::Json params;      // every one of the schema's, after the case's own changes
  std::string params_json;
  std::shared_ptr<const void> prepared;  // what the case keeps for its ranks
  double bytes_per_rank = 0;  // what the case said that it needs; 0: it did not
  std::optional<std::uint64_t> seed;
  protocol::Json kernels;  // what the case said that it runs; null: it did not
  std::int64_t warmup = 0;
  std::int64_t repeat = 1;
  bool checks = true;
  std::optional<std::uint64_t> perturb;
  std::string dump, inputs;  // folders; empty: none
  std::optional<kernels::Fault> fault;
};

// What a request's fault may do beside its rank's work: the beginning of the request's answer, and a way to write it.
struct FaultMeans {
  std::string half_answer;
  std::function<void(std::string_view)> write_answer;
};

// Why a request does not run: kind and text of its answer. kUnsupported is answered `skipped`.
class Refusal : public std::runtime_error {
 public:
  Refusal(protocol::FailureKind kind, const std::string& detail) : std::runtime_error(detail), kind_(kind) {}
  protocol::FailureKind kind() const { return kind_; }

 private:
  protocol::FailureKind kind_;
};

// Case, names, types and ranges (InvalidRequest, Refusal), then what the case itself says to them. Nothing is allocated on a device.
// Without `faults` a request with a fault is refused.
std::shared_ptr<const PreparedRun> Prepare(const CaseRegistry& registry, const protocol::RunRequest& request,
                                           const std::string& backend, int world_size,
                                           const std::optional<FaultMeans>& faults = std::nullopt);

// Throws Refusal(kOutOfMemory) when a device does not have what its ranks need together. The ranks must be idle.
void CheckMemory(const PreparedRun& run, World& world);

}  // namespace cppool::daemon
