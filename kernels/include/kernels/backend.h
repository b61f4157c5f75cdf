// A backend makes the runtime seam (cppool/runtime.h) for every rank of a world: on the host, or on CUDA
// through a module opened on demand.
//
// Threads: the caller has one thread per rank. OpenRank(r) and everything of a RankRuntime is called on rank
// r's thread, except what is marked "any thread".
#pragma once

#include <cppool/runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cppool::kernels {

struct DeviceInfo {
  std::string name;        // "NVIDIA H200", or the processor's model name
  std::string uuid;        // "GPU-..."; empty on the host
  int ordinal = -1;        // CUDA device ordinal within what this process sees; -1 on the host
  std::string capability;  // "9.0"; empty on the host
  std::size_t total_bytes = 0;
};

struct MemoryInfo {
  std::size_t held_bytes =
      0;  // what this process's allocations hold on the rank's device, pooled memory included
  std::size_t free_bytes = 0;  // what an allocation could still get, on a device that other ranks may share
  std::size_t live_allocations = 0;
};

// Where a stream is, as its marks tell. Read while the rank may be stuck.
struct StreamProgress {
  std::string stream;  // "main", "stream 1"
  std::string stage;   // the last stage that its work has reached; empty before the first
  double seconds = 0;  // since the stage was first seen to be reached
  bool idle = true;    // nothing is known to be pending
  // What it is in, where the runtime knows: "waiting for recv from rank 0", "with send to rank 2" in its stage.
  std::string doing = {};
  std::vector<int> awaits =
      {};                   // ranks of the world known to have a call before them that this stream waits in
  std::string behind = {};  // the rank's stream whose work this one waits for; empty: none, or not known
  int thread = 0;           // the id of the thread that runs its work; 0: no thread does
};

// Milliseconds of each stage on the rank's device: in iterations the median over the counted ones, else the
// one time. A parent ("forward" of "forward/attend 1") is listed too: the sum over its stages on the main
// stream.
using StageTimes = std::vector<std::pair<std::string, double>>;

// What a rank's device is made to do wrong, when a fault is asked for (fault_injector.h).
enum class DeviceFault {
  kStall,        // work that does not end
  kTrap,         // an illegal instruction
  kOutOfBounds,  // a write past the end of an allocation
  kFlipBit,      // bit 6 of a byte: of a float's last byte that is the exponent's highest bit
};

class RankRuntime {
 public:
  virtual ~RankRuntime() = default;
  virtual cppool_runtime* seam() = 0;
  // Whose doing the seam's last_error is: RuntimeError::culprit. A status and a text do not say so.
  virtual int LastErrorCulprit() const = 0;
  // The rank's thread, after a failure: the last stage that the rank has marked, however far its streams are; or nothing,
  // when a stream's work has failed: that stopped where Progress() says.
  virtual std::optional<std::string> FailedInStage() const = 0;

  // The clean state every case starts from: no marks, no allocations, no pending work, no error left over.
  virtual void BeginCase() = 0;
  // For the case that has begun: every mark holds up its stream for a random time of up to about 200 us, which
  // `seed` and the rank pick. Work that lacks a wait then meets its data too early or too late.
  virtual void Perturb(std::uint64_t seed) = 0;
  // Does that in stream order. `byte`: device memory, for kFlipBit. Throws RuntimeError.
  virtual void Break(DeviceFault fault, void* byte, cppool_stream stream) = 0;
  // Marks from here on belong to iteration `index` (negative: warm-up, not counted).
  virtual void BeginIteration(int index) = 0;
  virtual void EndIterations() = 0;
  // Whether a group of calls was begun and has not ended. A case that ends so is wrong, and the next one needs
  // Backend::Recover first: the ranks are out of step, or NCCL still keeps the calls.
  virtual bool InGroup() const = 0;
  // Waits for the rank's work, releases what the case left behind, and returns the stages' times. Throws
  // RuntimeError; FailedInStage() and Progress() then say where the work stopped, until the next BeginCase.
  virtual StageTimes EndCase() = 0;
  // Gives pooled memory back to the device. After a barrier of all ranks: it may wait for the device.
  virtual void Trim() = 0;

  // Any thread. Memory() asks the device, which can take a while; the others do so only when they must.
  virtual MemoryInfo Memory() const = 0;
  virtual std::size_t LiveAllocations() const = 0;
  virtual bool HasRoom(double bytes) const = 0;  // whether that much more could be allocated
  virtual std::vector<StreamProgress> Progress() const = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;       // "cuda", "host"
  virtual std::string transport() const = 0;  // "nccl", "peer", "host"
  virtual int world_size() const = 0;
  // Called on all ranks' threads at once: makes the device ready, joins the communicators and uses each once.
  // Throws RuntimeError.
  virtual std::unique_ptr<RankRuntime> OpenRank(int rank) = 0;
  virtual std::vector<DeviceInfo> Devices() const = 0;  // one per rank, after OpenRank
  // Milliseconds of the start-up by stage, in order, after OpenRank: the slowest rank's.
  virtual std::vector<std::pair<std::string, double>> InitTimes() const = 0;
  // Any thread: makes pending and later communication of all ranks fail with `reason`, so that nobody waits
  // for a rank that has gone.
  virtual void Abort(const std::string& reason) = 0;
  // Any thread: the rank has ended its case in order, with all of its calls over. Whoever waits for another one of
  // them fails at once and names the rank, where the transport can tell (with NCCL the deadline ends that).
  // BeginCase of the rank takes it back: all ranks begin before any communicates.
  virtual void Finished(int rank) = 0;
  // After a failed case: makes communication start anew on all ranks, so that an abort and calls that found no
  // partner are forgotten. No rank may be in a call; work that is still under way has until `limit`. Throws
  // RuntimeError with what keeps it: such work, a device out of order, NCCL after an abort or in a group of calls.
  virtual void Recover(std::chrono::milliseconds limit) = 0;
};

std::unique_ptr<Backend> CreateHostBackend(int world_size);

// Number of devices that CUDA sees (CUDA_VISIBLE_DEVICES is honoured); 0 without a driver or a device. Loads
// libcuda.so.1 but makes no context. Throws RuntimeError when the driver is there and broken.
int CountCudaDevices();

// How the ranks on CUDA exchange. kNccl needs libnccl.so.2, and a device for every rank. kPeer is device copies
// and events within the process: ranks may share devices, rank r then has device r * devices / world_size, and
// a call of send, recv or a collective returns when the peers have made theirs. kAuto is kNccl where every rank
// has a device of its own, else kPeer.
enum class Transport { kAuto, kNccl, kPeer };

// Opens the module `libcppool_cuda.so`: the file that CPPOOL_CUDA_MODULE names, or else the first there is beside
// the program, in `../lib` from there, and where the dynamic linker looks. Throws RuntimeError saying what to do
// when it is missing, of another version, or lacks NCCL or devices.
std::unique_ptr<Backend> CreateCudaBackend(int world_size, Transport transport = Transport::kAuto);

}  // namespace cppool::kernels
