// A backend makes the runtime seam (cppool/runtime.h) for every rank of a world: on the host, or on CUDA
// through a module that is opened on demand.
//
// Threads: the caller has one thread per rank. OpenRank(r) and all functions of a RankRuntime are called on
// rank r's thread, except those marked "any thread".
#pragma once

#include <cppool/runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/group_shape.h"
#include "kernels/host_link.h"
#include "kernels/ring_transfers.h"
#include "kernels/runtime.h"
#include "kernels/trace.h"
#include "kernels/world_link.h"

namespace cppool::kernels {

struct DeviceInfo {
  std::string name;        // "NVIDIA H200", or the processor's model name
  std::string uuid;        // "GPU-..."; empty on the host
  int ordinal = -1;        // CUDA device ordinal within what this process sees; -1 on the host
  std::string capability;  // "9.0"; empty on the host
  std::size_t total_bytes = 0;
};

// What a case has allocated and not freed.
struct LiveMemory {
  std::size_t allocations = 0, device_bytes = 0, host_bytes = 0;
};

struct MemoryInfo {
  std::size_t held_bytes = 0;  // held by this process on the rank's device, pooled memory included
  std::size_t free_bytes = 0;  // what an allocation could still get, on a device that other ranks may share
  std::size_t live_allocations = 0;
};

// How far a stream is, according to its marks. Can be read while the rank is stuck.
struct StreamProgress {
  std::string stream;  // "main", "stream 1"
  std::string stage;   // the last stage that its work has reached; empty before the first
  double seconds = 0;  // since the stage was first seen to be reached
  bool idle = true;    // no pending work is known
  // The call that the stream is in, where the runtime knows it: "waiting for recv from rank 0", or "with send
  // to rank 2" for the calls of its stage. Ranks are those of the world.
  std::string doing = {};
  std::vector<int> awaits = {};  // the ranks of the world whose calls this stream waits for, where known
  std::string behind = {};       // the rank's stream whose work this one waits for; empty: none, or not known
  int thread = 0;                // the id of the thread that runs its work; 0: none does
};

// Milliseconds of each stage on the rank's device: the median over the counted iterations, or the one time
// outside of them. A parent ("forward" of "forward/attend 1") is listed too, with the sum over its stages on
// the main stream.
using StageTimes = std::vector<std::pair<std::string, double>>;

// Milliseconds of every counted iteration so far, in their order, for the stages of the main stream that are
// no part of another one ("forward", and not "forward/attend 1"). An iteration without the stage is left out.
using StageSamples = std::vector<std::pair<std::string, std::vector<double>>>;

// Faults of a rank's device, on request (fault_injector.h).
enum class DeviceFault {
  kStall,        // work that does not end
  kTrap,         // an illegal instruction
  kOutOfBounds,  // a write past the end of an allocation
  kFlipBit,      // flips bit 6 of a byte; in the last byte of a float that is the exponent's highest bit
};

// The part of a world whose ranks one process runs.
struct Place {
  Place(int size) : Place(size, 0, size) {}  // the whole world
  Place(int size, int first_rank, int count) : world_size(size), first(first_rank), ranks(count) {}
  bool whole() const { return ranks == world_size; }

  int world_size;
  int first;  // of its ranks, which follow each other
  int ranks;
};

class RankRuntime {
 public:
  virtual ~RankRuntime() = default;
  virtual cppool_runtime* seam() = 0;  // its `self` is this
  virtual const Place& place() const = 0;
  // As GetCopyGroup, WhyNoRing and StartRing.
  virtual Group CopyGroup(GroupShape shape) = 0;
  virtual std::optional<std::string> WhyNoRing() const = 0;
  virtual Arrivals StartRing(RingTransfers transfers, cppool_comm comm, cppool_stream stream) = 0;
  // After a failure: the last stage that the rank has marked, however far its streams are. Nothing when the
  // work of a stream has failed: Progress() then says where.
  virtual std::optional<std::string> FailedInStage() const = 0;

  // Makes the clean state that every case starts from: no marks, no allocations, no pending work, no old
  // error.
  virtual void BeginCase() = 0;
  // For the case that has begun: every mark delays its stream by a random time of up to about 200 us, chosen
  // by `seed` and the rank. Work that lacks a wait then runs before or after its data is there.
  virtual void Perturb(std::uint64_t seed) = 0;
  // For the case that has begun: records at most `limit` slices, in memory that is taken now. Throws
  // RuntimeError.
  virtual void BeginTrace(std::size_t limit) = 0;
  // Does the fault in stream order. `byte`: device memory, for kFlipBit. Throws RuntimeError.
  virtual void Break(DeviceFault fault, void* byte, cppool_stream stream) = 0;
  // Marks from here on belong to iteration `index` (negative: warm-up, not counted).
  virtual void BeginIteration(int index) = 0;
  // Between two iterations: waits while the rank's thread is far ahead of the main stream's work (two
  // iterations and 10 ms), so that a cancelled case ends soon. Throws RuntimeError after an abort.
  virtual void KeepUp() = 0;
  virtual void EndIterations() = 0;
  // Between two iterations, or after them: ends the main stream's stage, waits for that stream's work, and
  // returns the times. Throws RuntimeError when the work has failed.
  virtual StageSamples Samples() = 0;
  // Between two iterations: waits for the rank's work, since the case may take back what that uses. From then
  // on every call of the seam fails with CPPOOL_CANCELLED until the next BeginCase, so that the case returns.
  // Throws RuntimeError when the work has failed.
  virtual void Cancel(const std::string& why) = 0;
  virtual LiveMemory Live() const = 0;
  // Between group_start and group_end. A case must not end so: Backend::Recover is then needed before the
  // next one, because the ranks are out of step or NCCL still holds the calls.
  virtual bool InGroup() const = 0;
  // The shapes of the communicators that the rank has: the usual ones, and those that cases have asked for.
  virtual std::vector<GroupShape> Groups() const = 0;
  // Waits for the rank's work, releases what the case left behind, and returns the stages' times. Throws
  // RuntimeError; FailedInStage() and Progress() then say where the work stopped, until the next BeginCase.
  virtual StageTimes EndCase() = 0;
  // After EndCase, also one that has thrown: what was recorded since BeginTrace, as far as it is known. Empty
  // without one, and the second time.
  virtual RankTrace TakeTrace() = 0;
  // Gives pooled memory back to the device. After a barrier of all ranks: it may wait for the device.
  virtual void Trim() = 0;

  // Any thread. Memory() asks the device, which can take a while; the others do so only where needed.
  virtual MemoryInfo Memory() const = 0;
  virtual bool HasRoom(double bytes) const = 0;  // whether that much more could be allocated
  virtual std::vector<StreamProgress> Progress() const = 0;
  // The ids of the threads that the rank runs its work on, spare ones too. Those of CUDA and NCCL are not
  // known.
  virtual std::set<int> Threads() const { return {}; }
};

inline RankRuntime& RuntimeOf(cppool_runtime* rank) { return *static_cast<RankRuntime*>(rank->self); }
// The one that this rank of a backend is in.
Place PlaceOf(cppool_runtime* rank);

// Of the ranks of a place.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;       // "cuda", "host"
  virtual std::string transport() const = 0;  // "nccl", "peer", "host"; "gloo": host, several processes
  virtual const Place& place() const = 0;
  // Called on all ranks' threads at once, here and in the other places: makes the device ready, joins the
  // usual communicators and uses each once. Throws RuntimeError.
  virtual std::unique_ptr<RankRuntime> OpenRank(int rank) = 0;
  virtual std::vector<DeviceInfo> Devices() const = 0;  // one per rank of the place, after OpenRank
  // Milliseconds of the start-up by stage, in order, after OpenRank: the slowest rank's.
  virtual std::vector<std::pair<std::string, double>> InitTimes() const = 0;
  // Any thread: begins and ends the range of a profiler that is attached to this process. Nothing without
  // one.
  virtual void Profile(bool begin) = 0;
  // Any thread: makes pending and later communication of these ranks fail with `reason`, so that no rank
  // waits for one that is gone.
  virtual void Abort(const std::string& reason) = 0;
  // Any thread: the rank has ended its case in order, with all of its calls over. A rank that waits for
  // another call of it fails at once with an error that names it, where the transport can tell (with NCCL the
  // deadline ends such a wait). BeginCase of the rank takes it back: all ranks begin before any communicates.
  virtual void Finished(int rank) = 0;
  // Any thread: what a rank of another process has told by WorldLink::tell.
  virtual void Take(const RankNews&) {}
  // After a failed case: resets communication on all ranks, so that an abort and calls that found no partner
  // are forgotten. No rank may be in a call; work that is still under way has until `limit`. Throws
  // RuntimeError when it cannot: work that does not end, a device in an error state, NCCL after an abort or
  // in a group of calls.
  virtual void Recover(std::chrono::milliseconds limit) = 0;
};

// What the host backends of one world exchange through: within a process, or through a link to the other
// processes of the world, each of which has as many ranks as this one.
struct HostTransport;
std::shared_ptr<HostTransport> CreateHostTransport(int world_size);
std::shared_ptr<HostTransport> CreateHostTransport(const Place& place, std::unique_ptr<HostLink> link);

// `transport`: of all places that this process has; NULL: the backend makes its own, and must be the whole
// world.
std::unique_ptr<Backend> CreateHostBackend(const Place& place,
                                           std::shared_ptr<HostTransport> transport = nullptr);

// Number of devices that CUDA sees (CUDA_VISIBLE_DEVICES is honoured); 0 without a driver or a device. Loads
// libcuda.so.1 but makes no context. Throws RuntimeError when the driver is there and broken.
int CountCudaDevices();

// How the ranks on CUDA exchange. kNccl needs libnccl.so.2, and a device for every rank. kPeer uses device
// copies and events within the process: ranks may share devices (rank r has device r * devices / world_size),
// and a call of send, recv or a collective returns when the peers have made theirs. kAuto is kNccl where
// every rank has a device of its own, else kPeer. Between processes there is kNccl alone.
enum class Transport { kAuto, kNccl, kPeer };

// Opens the module `libcppool_cuda.so`: the file that CPPOOL_CUDA_MODULE names, else the first one found
// beside the program, in `../lib` from there, and on the dynamic linker's path. Throws RuntimeError that says
// what to do when it is missing, of another build, or lacks NCCL or devices. `commit` is the one that the
// program was built from: a module of another commit is refused; empty: any is taken. `link`: to the other
// processes, of a place that is a part of its world; each has as many ranks, and a device for each.
std::unique_ptr<Backend> CreateCudaBackend(const Place& place, Transport transport = Transport::kAuto,
                                           const std::string& commit = "", WorldLink link = {});

// The file of that module, which is opened for it. Throws as CreateCudaBackend.
std::string CudaModuleFile();

// The soundness probe of a world after a failed case: does communication still give the right results? On all
// ranks' threads at once, between BeginCase and EndCase: a sum and a message to each neighbour on every
// communicator that the world has. The numbers depend on the rank and on `round`, which is new each time, so
// that data left by an earlier case or probe is not taken for this one's. Throws RuntimeError with what is
// wrong; host memory that work may still use is left to EndCase.
void ProbeGroups(RankRuntime& rank, std::uint64_t round);

}  // namespace cppool::kernels
