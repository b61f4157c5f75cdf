// See nccl.h. A communicator per GPU of one process, each used on a thread of its own, as in the runtime.
#include "tests/measure/transfers/nccl.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "kernels/error.h"
#include "kernels/runtime/cuda/nccl_api.h"

namespace cppool::measure {
namespace {

using kernels::RuntimeError;
using kernels::cuda::CheckNccl;
using kernels::cuda::Nccl;

constexpr std::size_t kMost = 128 * kMiB;  // a rank sends
constexpr int kSymmetricWindow = 1;        // NCCL_WIN_COLL_SYMMETRIC

// New in NCCL 2.27 and 2.28, found at run time. NULL: this NCCL has it not.
struct NewFunctions {
  ncclResult_t (*AlltoAll)(const void*, void*, std::size_t, ncclDataType_t, ncclComm_t,
                           cudaStream_t) = nullptr;
  ncclResult_t (*MemAlloc)(void**, std::size_t) = nullptr;
  ncclResult_t (*MemFree)(void*) = nullptr;
  ncclResult_t (*WindowRegister)(ncclComm_t, void*, std::size_t, void** window, int flags) = nullptr;
  ncclResult_t (*WindowDeregister)(ncclComm_t, void* window) = nullptr;

  NewFunctions() {
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);  // opened by Nccl() before
    if (!library) return;
    Find(library, "ncclAlltoAll", &AlltoAll);
    Find(library, "ncclMemAlloc", &MemAlloc);
    Find(library, "ncclMemFree", &MemFree);
    Find(library, "ncclCommWindowRegister", &WindowRegister);
    Find(library, "ncclCommWindowDeregister", &WindowDeregister);
  }
  bool all() const { return AlltoAll && MemAlloc && MemFree && WindowRegister && WindowDeregister; }

 private:
  template <typename Function>
  static void Find(void* library, const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

enum class Kind { kUsual, kFewCtas, kZeroCta };

ncclConfig_t ConfigOf(Kind kind) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  if (kind == Kind::kFewCtas) {
    config.maxCTAs = 8;
    config.cgaClusterSize = 0;
  }
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
  if (kind == Kind::kZeroCta) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
  return config;
}

// A file that NCCL logs to.
class Log {
 public:
  // Before NCCL is opened.
  void Begin() {
    const int file = mkstemp(path_.data());
    if (file < 0) throw RuntimeError(CPPOOL_INTERNAL, "no file can be made in /tmp");
    close(file);
    setenv("NCCL_DEBUG", "INFO", 1);
    setenv("NCCL_DEBUG_SUBSYS", "INIT,NVLS", 1);
    setenv("NCCL_DEBUG_FILE", path_.c_str(), 1);
  }
  ~Log() { unlink(path_.c_str()); }
  bool Has(const char* text) const {
    std::ostringstream all;
    all << std::ifstream(path_).rdbuf();
    return all.str().find(text) != std::string::npos;
  }

 private:
  std::string path_ = "/tmp/transfers_nccl_XXXXXX";
};
Log& NcclLog() {
  static Log log;
  return log;
}

class World {
 public:
  World(Kind kind, const NewFunctions& functions) : kind_(kind), functions_(functions) {}

  void Open() {
    // Both at once. A thread whose partner has failed in between ends with the program's time limit.
    ncclUniqueId id;
    CheckNccl(Nccl().GetUniqueId(&id), "ncclGetUniqueId");
    OnEveryGpu([&](int gpu) {
      Rank& rank = ranks_[static_cast<std::size_t>(gpu)];
      ncclConfig_t config = ConfigOf(kind_);
      ncclComm_t comm = nullptr;
      CheckNccl(Nccl().CommInitRankConfig(&comm, kGpus, id, gpu, &config), "ncclCommInitRankConfig");
      rank.comm = comm;
    });
    abort_waits = [this] { Abort(); };
    if (kind_ == Kind::kZeroCta &&
        (!NcclLog().Has("Init COMPLETE") || NcclLog().Has("NVLS multicast support is available")))
      throw RuntimeError(CPPOOL_NCCL, "NCCL's log does not show that NVLS is off: no window is registered");
    OnEveryGpu([&](int gpu) {
      Rank& rank = ranks_[static_cast<std::size_t>(gpu)];
      rank.stream = CreateStream(gpu);
      const bool windows = kind_ == Kind::kZeroCta;
      for (auto& [buffer, bytes] : {std::pair{&rank.send, kMost}, std::pair{&rank.recv, kGpus * kMost}}) {
        if (!windows) {
          buffer->owned = Allocate(gpu, bytes);
          buffer->data = buffer->owned.get();
          continue;
        }
        CheckNccl(functions_.MemAlloc(&buffer->data, bytes), "ncclMemAlloc");
        CheckNccl(
            functions_.WindowRegister(rank.comm, buffer->data, bytes, &buffer->window, kSymmetricWindow),
            "ncclCommWindowRegister");
      }
    });
    if (NcclLog().Has("Creating Multicast group"))
      throw RuntimeError(CPPOOL_NCCL, "NCCL has made a multicast object, although NVLS is off");
  }

  ~World() {
    abort_waits = nullptr;
    if (aborted_) return;
    try {
      OnEveryGpu([&](int gpu) {
        Rank& rank = ranks_[static_cast<std::size_t>(gpu)];
        for (const Buffer* buffer : {&rank.send, &rank.recv})
          if (buffer->window) functions_.WindowDeregister(rank.comm, buffer->window);
        if (rank.comm) Nccl().CommDestroy(rank.comm);
        for (const Buffer* buffer : {&rank.send, &rank.recv})
          if (buffer->data && !buffer->owned) functions_.MemFree(buffer->data);
      });
    } catch (const std::exception& error) {
      std::fprintf(stderr, "transfers: at the end of a communicator: %s\n", error.what());
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Every rank has `bytes` to send, a pattern, and receives what its peer has for it; what it receives is
  // checked.
  Transfer AllGather(std::size_t bytes) {
    Transfer transfer = Prepare(bytes, [this, bytes](Rank& rank, int gpu) {
      char* const own =
          static_cast<char*>(rank.recv.data) + static_cast<std::size_t>(gpu) * bytes;  // in place
      CheckNccl(Nccl().AllGather(own, rank.recv.data, bytes, ncclInt8, rank.comm, rank.stream.get()),
                "ncclAllGather");
    });
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      const Rank& rank = ranks_[static_cast<std::size_t>(gpu)];
      Poison(gpu, rank.recv.data, kGpus * kMost);
      FillPattern(gpu, static_cast<char*>(rank.recv.data) + static_cast<std::size_t>(gpu) * bytes, bytes,
                  Seed(gpu));
    }
    RunOnce(transfer);
    if (kind_ == Kind::kZeroCta && !NcclLog().Has("Init CE"))
      throw RuntimeError(CPPOOL_NCCL, "NCCL has not used copy engines: its log has no 'Init CE'");
    return transfer;
  }
  void CheckAllGather(std::size_t bytes) const {
    for (int gpu = 0; gpu < kGpus; ++gpu)
      for (int from = 0; from < kGpus; ++from)
        CheckPart(gpu, from, static_cast<std::size_t>(from) * bytes, bytes, 0);
  }

  Transfer AllToAll(std::size_t bytes) {
    const std::size_t part = bytes / kGpus;
    Transfer transfer = Prepare(part, [this, part](Rank& rank, int) {
      cudaStream_t stream = rank.stream.get();
      if (kind_ == Kind::kZeroCta) {
        return CheckNccl(
            functions_.AlltoAll(rank.send.data, rank.recv.data, part, ncclInt8, rank.comm, stream),
            "ncclAlltoAll");
      }
      CheckNccl(Nccl().GroupStart(), "ncclGroupStart");
      for (int peer = 0; peer < kGpus; ++peer) {
        const std::size_t at = static_cast<std::size_t>(peer) * part;
        CheckNccl(
            Nccl().Send(static_cast<char*>(rank.send.data) + at, part, ncclInt8, peer, rank.comm, stream),
            "ncclSend");
        CheckNccl(
            Nccl().Recv(static_cast<char*>(rank.recv.data) + at, part, ncclInt8, peer, rank.comm, stream),
            "ncclRecv");
      }
      CheckNccl(Nccl().GroupEnd(), "ncclGroupEnd");
    });
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      const Rank& rank = ranks_[static_cast<std::size_t>(gpu)];
      Poison(gpu, rank.recv.data, kGpus * kMost);
      FillPattern(gpu, rank.send.data, bytes, Seed(gpu));
    }
    RunOnce(transfer);
    return transfer;
  }
  void CheckAllToAll(std::size_t bytes) const {
    const std::size_t part = bytes / kGpus;
    for (int gpu = 0; gpu < kGpus; ++gpu)
      for (int from = 0; from < kGpus; ++from)
        CheckPart(gpu, from, static_cast<std::size_t>(from) * part, part,
                  static_cast<std::size_t>(gpu) * part);
  }

 private:
  struct Buffer {
    void* data = nullptr;
    void* window = nullptr;
    Memory owned;  // empty: by ncclMemAlloc
  };
  struct Rank {
    std::atomic<ncclComm_t> comm{nullptr};
    Buffer send, recv;
    Stream stream;
  };

  static std::uint32_t Seed(int gpu) { return 7u + static_cast<std::uint32_t>(gpu); }

  template <typename Call>
  Transfer Prepare(std::size_t arrives, Call call) {
    Transfer transfer;
    transfer.bytes = static_cast<double>(arrives);
    for (int gpu = 0; gpu < kGpus; ++gpu) {
      const auto at = static_cast<std::size_t>(gpu);
      transfer.streams[at] = ranks_[at].stream.get();
      transfer.turn[at] = [this, at, gpu, call] { call(ranks_[at], gpu); };
    }
    return transfer;
  }

  void CheckPart(int gpu, int from, std::size_t at, std::size_t bytes, std::size_t source_offset) const {
    ExpectPattern(gpu, static_cast<const char*>(ranks_[static_cast<std::size_t>(gpu)].recv.data) + at,
                  {bytes, bytes, 1}, Seed(from), source_offset, "NCCL");
  }

  void Abort() {
    if (aborted_.exchange(true)) return;
    for (Rank& rank : ranks_)
      if (ncclComm_t comm = rank.comm) Nccl().CommAbort(comm);
  }

  const Kind kind_;
  const NewFunctions& functions_;
  std::array<Rank, kGpus> ranks_;
  std::atomic<bool> aborted_{false};
};

// Why zero-CTA collectives are not measured; empty: they are.
std::string ZeroCtaRefusal(int version, const NewFunctions& functions) {
  if (NCCL_VERSION_CODE < NCCL_VERSION(2, 28, 0)) return "nccl.h of the build is older than 2.28";
  if (version < NCCL_VERSION(2, 28, 3)) return "they came with NCCL 2.28.3";
  if (version >= NCCL_VERSION(2, 29, 0))
    return "that this NCCL makes no multicast object for a window was not read in its source, as for 2.28";
  if (!functions.all()) return "this NCCL lacks ncclAlltoAll, ncclMemAlloc or ncclCommWindowRegister";
  return "";
}

}  // namespace

void PrepareNccl() {
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  const char* const nvls = std::getenv("NCCL_NVLS_ENABLE");
  if (!nvls || std::strcmp(nvls, "0") != 0)
    throw RuntimeError(CPPOOL_NCCL, "NCCL_NVLS_ENABLE could not be set to 0");
  NcclLog().Begin();
}

void MeasureNccl(const Attention& attention) {
  int version = 0;
  CheckNccl(Nccl().GetVersion(&version), "ncclGetVersion");
  const NewFunctions functions;
  const std::string refusal = ZeroCtaRefusal(version, functions);
  std::printf("\nNCCL %d.%d.%d, NCCL_NVLS_ENABLE=0. %s\n\n", version / 10000, version / 100 % 100,
              version % 100,
              refusal.empty() ? "GB/s: bytes that arrive from the other GPU." : refusal.c_str());
  PrintSideBySideHeader("collective | MiB that a rank sends", 2);
  for (const auto& [kind, name] :
       {std::pair(Kind::kUsual, "usual"), std::pair(Kind::kFewCtas, "at most 8 CTAs"),
        std::pair(Kind::kZeroCta, "zero-CTA")}) {
    if (kind == Kind::kZeroCta && !refusal.empty()) continue;
    World world(kind, functions);
    world.Open();
    for (const std::size_t size : {16 * kMiB, 64 * kMiB, kMost}) {
      for (const bool gather : {true, false}) {
        const Transfer transfer = gather ? world.AllGather(size) : world.AllToAll(size);
        for (const bool backward : {false, true}) {
          const SideBySide figures = MeasureSideBySide(attention, backward, transfer);
          gather ? world.CheckAllGather(size) : world.CheckAllToAll(size);
          PrintSideBySide(std::string(gather                   ? "all-gather, "
                                      : kind == Kind::kZeroCta ? "ncclAlltoAll, "
                                                               : "send and recv, ") +
                              name + " | " + std::to_string(size / kMiB) + " |",
                          backward, figures);
        }
      }
    }
  }
}

}  // namespace cppool::measure
