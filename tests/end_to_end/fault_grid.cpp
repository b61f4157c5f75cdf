#include "tests/end_to_end/fault_grid.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string_view>

namespace cppool::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kShort{1000};  // deadline of faults that end by it
constexpr milliseconds kLong{20000};  // deadline of faults that end before it

// The outcome of a call.
struct End {
  std::optional<Result> result;
  std::optional<PoolError::Kind> lost;
  std::string text;

  bool Answered(Status status, std::string_view kind) const {
    return result && result->status == status && result->failure && result->failure->kind == kind;
  }
  bool Died() const { return lost == PoolError::Kind::kDied; }
  bool Says(std::string_view part) const { return text.find(part) != std::string::npos; }
  std::string Name() const {
    if (lost) return "PoolError " + std::string(ToString(*lost));
    std::string name(ToString(result->status));
    if (result->status == Status::kError && result->failure) name += " " + result->failure->kind;
    return name;
  }
};

struct Where {
  bool cuda, nccl;
  std::string rank;  // "rank 1": the one that has the fault
  int index;
};

// Which daemon runs the next case: the same one, or a new one.
enum class Next { kSame, kNew, kEither };

struct Kind {
  const char* name;
  bool ends_by_deadline;  // with at least one transport
  Next on_host, on_peer, on_nccl;
  // Whether the outcome is right and names the cause.
  std::function<bool(const End&, const Where&)> right;
};

#ifdef CPPOOL_TEST_SANITIZED
constexpr bool kSanitized = true;  // a sanitizer's signal handlers end the process in another way
#else
constexpr bool kSanitized = false;
#endif

bool DiedOf(const End& end, const char* cause) { return end.Died() && (kSanitized || end.Says(cause)); }

bool TimedOut(const End& end) {
  return end.Answered(Status::kError, "timeout") && end.result->fatal && end.Says("forward/");
}

bool OfRank(const End& end, const Where& where) {
  return end.result->failure->rank == where.index && end.Says(where.rank);
}

// A rank that communicates with the faulty one fails: the sizes differ, that rank has finished the case, or
// the deadline passes.
bool CommunicationBroke(const End& end, const Where& where) {
  if (where.nccl && end.Answered(Status::kFailed, "mismatch")) return true;
  return TimedOut(end) || (end.result && end.result->status == Status::kError && end.Says("rank "));
}

const std::vector<Kind>& Kinds() {
  static const std::vector<Kind> kinds = {
      {"throw", false, Next::kSame, Next::kSame, Next::kNew,
       [](const End& end, const Where& where) {
         return end.Answered(Status::kError, "internal") && OfRank(end, where) &&
                end.Says("throw, at the mark 'forward/");
       }},
      {"segfault", false, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where&) { return DiedOf(end, "Segmentation fault"); }},
      {"abort", false, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where&) { return DiedOf(end, "Aborted"); }},
      {"exit", false, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where&) { return DiedOf(end, "code 42") && DiedOf(end, "exit(42)"); }},
      {"stall", true, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where&) { return TimedOut(end); }},
      {"stall_host", true, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where&) { return TimedOut(end); }},
      {"skip_collective", true, Next::kEither, Next::kEither, Next::kNew, CommunicationBroke},
      // Of NCCL new ones; with `transfers` copies, which `auto` may be, the rank itself sees it.
      {"wrong_size", true, Next::kSame, Next::kSame, Next::kEither, CommunicationBroke},
      {"out_of_bounds", false, Next::kSame, Next::kNew, Next::kNew,
       [](const End& end, const Where& where) {
         if (where.cuda) return end.Answered(Status::kError, "cuda") && end.result->fatal;
         return end.Answered(Status::kError, "internal") && OfRank(end, where) &&
                end.Says("bytes 4096 to 4103 of an allocation of 4096 bytes");
       }},
      {"trap", false, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where& where) {
         if (where.cuda) return end.Answered(Status::kError, "cuda") && end.result->fatal;
         return DiedOf(end, "breakpoint trap");
       }},
      {"out_of_memory", false, Next::kSame, Next::kSame, Next::kEither,
       [](const End& end, const Where& where) {
         // If ranks share a memory, the allocation of another rank may fail first.
         return end.Answered(Status::kError, "out_of_memory") && (!where.nccl || OfRank(end, where)) &&
                end.Says("free");
       }},
      {"flip_bit", false, Next::kSame, Next::kSame, Next::kEither,
       [](const End& end, const Where&) {
         return end.Answered(Status::kFailed, "mismatch") && !end.result->fatal;
       }},
      {"flood", false, Next::kSame, Next::kSame, Next::kEither,
       [](const End& end, const Where&) { return end.result && end.result->ok(); }},
      {"half_line", false, Next::kSame, Next::kSame, Next::kEither,
       [](const End& end, const Where&) { return end.result && end.result->ok(); }},
      {"half_answer", false, Next::kNew, Next::kNew, Next::kNew,
       [](const End& end, const Where&) {
         return end.lost == PoolError::Kind::kProtocol && end.Says(R"("status": "pas)");
       }},
  };
  return kinds;
}

const Kind& KindOf(const std::string& name) {
  const auto& kinds = Kinds();
  const auto found =
      std::find_if(kinds.begin(), kinds.end(), [&](const Kind& kind) { return kind.name == name; });
  if (found == kinds.end()) throw std::invalid_argument("unknown kind of fault: " + name);
  return *found;
}

End Run(Pool& pool, const FaultCell& cell, const RunOptions& options) {
  const auto upward = [](int value, int multiple) { return (value + multiple - 1) / multiple * multiple; };
  const int length = upward(64, 2 * cell.world_size), heads = upward(8, cell.world_size);
  const Json params = {{"cp_comm_type", cell.schedule},
                       {"batch_size", 2},
                       {"max_seqlen_q", length},
                       {"max_seqlen_kv", length},
                       {"num_heads", heads},
                       {"num_gqa_groups", heads},
                       {"head_dim_qk", 64},
                       {"head_dim_v", 64}};
  End end;
  try {
    end.result = pool.Run(params, options);
    end.text = end.result->error;
  } catch (const PoolError& error) {
    end.lost = error.kind();
    end.text = error.what();
  }
  return end;
}

}  // namespace

const std::vector<std::string>& FaultKinds() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Kind& kind : Kinds()) all.emplace_back(kind.name);
    return all;
  }();
  return names;
}

std::vector<FaultCell> FaultGrid(const std::vector<std::string>& kinds, const std::vector<int>& world_sizes) {
  std::vector<FaultCell> cells;
  for (const std::string& kind : kinds) {
    for (const int world_size : world_sizes) {
      for (const char* schedule : {"p2p", "all_gather", "a2a", "a2a+p2p"}) {
        if (std::string_view(schedule) == "a2a+p2p" && (world_size < 4 || world_size % 2)) continue;
        cells.push_back({kind, schedule, world_size});
      }
    }
  }
  return cells;
}

PoolOptions FaultPoolOptions(const std::string& backend, const std::string& transport) {
  PoolOptions options;
  options.backend = backend;
  options.transport = transport;
  options.arguments = {"--allow-faults"};
  options.log_level = "error";
  options.retries = 0;
  return options;
}

FaultOutcome Inject(Pool& pool, const FaultCell& cell) {
  const Kind& kind = KindOf(cell.kind);
  const Json hello = pool.Hello();  // so that the measured time does not include the start
  const bool cuda = hello.at("backend") == "cuda";
  const int rank = cell.world_size / 2;
  const Where where{cuda, hello.at("transport") == "nccl", "rank " + std::to_string(rank), rank};
  RunOptions options;
  options.deadline = kind.ends_by_deadline ? kShort : kLong;
  options.fault = Fault{cell.kind, rank, "", 1};

  FaultOutcome outcome;
  const auto start = Clock::now();
  const End end = Run(pool, cell, options);
  outcome.time = Clock::now() - start;
  outcome.limit = options.deadline + pool.options().grace;
  outcome.ended = end.Name();
  outcome.text = end.text;
  outcome.hung = end.lost == PoolError::Kind::kTimeout;
  if (!kind.right(end, where)) outcome.wrong = "ended in " + outcome.ended + ": " + end.text;

  options.deadline = kLong;
  options.fault.reset();
  const End next = Run(pool, cell, options);
  outcome.next = next.Name() + (next.text.empty() ? "" : ": " + next.text);
  outcome.stayed = !next.lost && pool.Hello().at("pid") == hello.at("pid");
  const Next wanted = !cuda ? kind.on_host : where.nccl ? kind.on_nccl : kind.on_peer;
  const bool announced = end.result && !end.result->fatal;  // the answer says that the daemon stays
  if (outcome.wrong.empty() && (outcome.stayed != announced ||
                                (wanted != Next::kEither && outcome.stayed != (wanted == Next::kSame)))) {
    outcome.wrong = std::string("the daemon ") + (outcome.stayed ? "stayed" : "did not stay") + " after " +
                    outcome.ended + ": " + end.text;
  }
  return outcome;
}

}  // namespace cppool::test
