// Ranks that are threads of this process, which run the cases of libraries.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/case_registry.h"
#include "daemon/case_run.h"
#include "daemon/leftovers.h"
#include "daemon/library_store.h"
#include "daemon/ranks.h"
#include "daemon/under_way.h"
#include "daemon/world.h"

namespace cppool::daemon {

class ThreadRanks : public Ranks {
 public:
  struct Options {
    FailureLimits limits;
    protocol::KernelChoice kernels;  // for a request without "kernels"; nothing named: the case's own
    LibraryStore::Options libraries;
    // Device memory that libraries may take beside their cases' allocations before another daemon should be
    // used.
    std::size_t most_library_bytes = std::size_t{1} << 30;
    std::optional<FaultMeans> faults;  // nothing: requests with faults are refused
  };

  // All must outlive it. `world` is open. Of a part of a world, for an agent, which runs its ranks itself:
  // Run is for whole ones.
  ThreadRanks(World& world, const CaseRegistry& registry, UnderWay& under_way, Options options);

  protocol::Json Hello() const override;
  std::vector<std::string_view> Features() const override;
  protocol::Json Cases(const protocol::ListRequest& request, Clock::time_point until) override {
    return CasesOf(request.load, {}, until);
  }
  void Validate(const protocol::RunRequest& request, Clock::time_point until) override {
    CheckTrace(request.trace);
    PrepareRun(request, until);
  }
  protocol::RunResult Run(const protocol::RequestQueue::Entry& request, const std::string& tag,
                          Clock::time_point until, RunTrace* trace) override;
  std::chrono::milliseconds DeadlineMargin() const override { return {}; }
  // The ranks give pooled memory back. Between requests that follow one another they keep it: to return it
  // and take it again would cost each of them some milliseconds.
  void WhileIdle() override;
  protocol::Json Memory() override;
  std::string BeingOpened() const override { return libraries_.BeingOpened(); }
  std::string NamedLibrary(const std::string& copy) const override { return libraries_.Named(copy); }

  // The parts of Run, for an agent. All checks before a run starts. `host`: receives its parts, for a trace;
  // NULL: none was asked for.
  std::shared_ptr<const PreparedRun> PrepareRun(const protocol::RunRequest& request, Clock::time_point until,
                                                std::vector<HostSlice>* host = nullptr);
  // The entries of the answer to `list`. `digests`: of the libraries, as a request has them.
  protocol::Json CasesOf(const std::vector<std::string>& load,
                         const std::map<std::string, std::string>& digests, Clock::time_point until);
  LibraryStore& libraries() { return libraries_; }
  void BeginRun() { leftovers_.BeginRun(libraries_.opened()); }
  // Of a run that is not fatal: adds what it has left behind, and why the daemon should be replaced.
  void EndRun(const PreparedRun& prepared, Clock::time_point until, protocol::RunResult& result);
  // The libraries that were loaded, or found loaded, since the last call.
  struct Loaded {
    LibraryKind kind;
    std::string file, digest;
  };
  std::vector<Loaded> TakeLoaded() { return std::exchange(loaded_, {}); }

 private:
  // The daemon's cases and those of `libraries`.
  const CaseRegistry& CasesWith(const std::vector<const LoadedLibrary*>& libraries);
  std::vector<const LoadedLibrary*> LoadAll(const std::vector<std::string>& files, LibraryKind kind,
                                            Clock::time_point until,
                                            const std::map<std::string, std::string>& digests);
  // The kernels that a case may choose: a user's library is opened, and cuDNN's when the case wants its
  // kernel.
  WantedKernels LoadKernels(const protocol::RunRequest& request, Clock::time_point until);
  int RankAt(int index) const { return world_.place().first + index; }
  // Device memory of this process and of others that is not in the ranks' pools, by rank; empty: not known.
  std::vector<std::size_t> MemoryBesidePools() const;
  std::string WhyRespawn() const;  // empty: this daemon can go on

  World& world_;
  const CaseRegistry& registry_;
  UnderWay& under_way_;
  const Options options_;
  LibraryStore libraries_;
  Leftovers leftovers_;
  std::vector<Loaded> loaded_;
  std::vector<const LoadedLibrary*> joined_with_;  // the libraries of `joined_`
  std::optional<CaseRegistry> joined_;             // for the latest request with libraries
  std::vector<std::size_t> beside_pools_;  // MemoryBesidePools() before the first library; empty: none yet
  bool trim_due_ = false;                  // a case has run since the last trim
};

}  // namespace cppool::daemon
