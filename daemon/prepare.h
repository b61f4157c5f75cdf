// From a request to a run that can start: checks the case, the parameters, their relations and the memory, in
// the protocol's order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/case_registry.h"
#include "daemon/library_store.h"
#include "daemon/world.h"
#include "kernels/fault_injector.h"
#include "protocol/request.h"
#include "protocol/response.h"

namespace cppool::daemon {

// The kernels that a case which chooses kernels is to run on.
struct WantedKernels {
  std::string words;                       // as the request or the daemon's option has them; empty: neither
  const LoadedLibrary* library = nullptr;  // of the user, with these kernels; null: the words name none
  // On the dispatcher's thread: the kernel of that library, or of cuDNN's. Throws LibraryError. Empty: the
  // words name neither.
  std::function<const cppool_attention_kernel*()> find;
};

// A run that every rank can start. Immutable and shared by the ranks' threads.
struct PreparedRun {
  RegisteredCase registered;  // a copy, which lives as long as the threads that use it
  protocol::Json params;      // all of the schema's parameters, after the case's replace_params
  std::string params_json;
  std::shared_ptr<const void> prepared;  // what the case keeps for its ranks
  double bytes_per_rank = 0;             // as the case declared with `needs`; 0: not declared
  std::optional<std::uint64_t> seed;
  protocol::Json kernels;  // the kernels that the case names; null: it names none
  RunOptions options;      // the request's
  WantedKernels wanted_kernels;
  protocol::Json python;                // `options.python`; null: a case of a library
  std::optional<kernels::Fault> fault;  // `options.fault`, where this daemon takes it
  std::vector<std::string> warnings;    // about the request, for the answer
};

// For faults that disturb the answers: the beginning of the request's answer, and a function that writes to
// the channel of answers.
struct FaultMeans {
  std::string half_answer;
  std::function<void(std::string_view)> write_answer;
};

// A request that is not run, with the kind and the text of its answer.
class Refusal : public std::runtime_error {
 public:
  // `node`: the one of several that refuses.
  Refusal(protocol::FailureKind kind, const std::string& detail, std::string node = "")
      : std::runtime_error(detail), kind_(kind), node_(std::move(node)) {}
  protocol::FailureKind kind() const { return kind_; }
  const std::string& node() const { return node_; }

 private:
  protocol::FailureKind kind_;
  std::string node_;
};

// Throws Refusal when the file of a trace cannot be written; empty: there is none.
void CheckTrace(const std::string& file);

// Checks case, names, types and ranges, then calls the case's `validate`. Throws InvalidRequest or Refusal.
// Allocates nothing on a device. Without `faults` a request with a fault is refused. `load_kernels` is called
// for a case that chooses kernels. `has_room`: as cppool_validation's; without it there is room.
std::shared_ptr<PreparedRun> Prepare(const CaseRegistry& registry, const protocol::RunRequest& request,
                                     const std::string& backend, int world_size,
                                     const std::optional<FaultMeans>& faults = std::nullopt,
                                     const std::function<WantedKernels()>& load_kernels = {},
                                     const std::function<bool(double)>& has_room = {});

// Whether every device has enough memory for its ranks, even if what the pool holds lies in pieces. The ranks
// must be idle.
bool FitsInPieces(const PreparedRun& run, World& world);
// Whether every device has so much free memory for each of its ranks. The ranks must be idle.
bool HasRoom(double bytes_per_rank, World& world);
// Throws Refusal(kOutOfMemory) when a device has less free memory than its ranks need together. The ranks
// must be idle.
void CheckMemory(const PreparedRun& run, World& world);

}  // namespace cppool::daemon
