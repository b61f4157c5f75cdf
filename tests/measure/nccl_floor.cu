// The lower bound of a single-process pool's start: creates CUDA contexts and NCCL communicators and runs the
// first collective for W GPUs, with one thread per rank, and nothing else. Run it alternately with
// pool_latency, with only W devices visible:
//
//     CUDA_VISIBLE_DEVICES=0,1 nccl_floor 2
//     CUDA_VISIBLE_DEVICES=0,1 nccl_floor 2 --killed    # kills such a process and starts another (respawn)
#include <cuda_runtime.h>
#include <nccl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void Check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
void Check(ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(ncclGetErrorString(result));
}

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void OnEveryRank(int world_size, const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&work, rank] {
      try {
        Check(cudaSetDevice(rank));
        work(rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "nccl_floor: rank %d: %s\n", rank, error.what());
        std::exit(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Starts everything and prints the time of each step.
void Start(int world_size) {
  const double start = Seconds();
  double last = start;
  const auto lap = [&](const char* what) {
    const double now = Seconds();
    std::printf("%-28s %7.3f s\n", what, now - last);
    last = now;
  };
  int devices = 0;
  Check(cudaGetDeviceCount(&devices));
  lap("cuInit and device count");
  OnEveryRank(world_size, [](int) { Check(cudaFree(nullptr)); });
  lap("contexts");
  ncclUniqueId id;
  Check(ncclGetUniqueId(&id));
  std::vector<ncclComm_t> world(world_size), pair(world_size), stride(world_size);
  OnEveryRank(world_size, [&](int rank) { Check(ncclCommInitRank(&world[rank], world_size, id, rank)); });
  lap("world communicator");
  OnEveryRank(world_size, [&](int rank) {
    cudaStream_t stream;
    float* value;
    Check(cudaStreamCreate(&stream));
    Check(cudaMalloc(&value, sizeof(float)));
    Check(cudaMemset(value, 0, sizeof(float)));
    Check(ncclAllReduce(value, value, 1, ncclFloat, ncclSum, world[rank], stream));
    Check(cudaStreamSynchronize(stream));
  });
  lap("first all-reduce");
  std::printf("ready after %.3f s\n", last - start);
  if (world_size >= 4 && world_size % 2 == 0) {
    OnEveryRank(world_size, [&](int rank) {
      Check(ncclCommSplit(world[rank], rank / 2, rank, &pair[rank], nullptr));
      Check(ncclCommSplit(world[rank], rank % 2, rank, &stride[rank], nullptr));
    });
    lap("two splits (sub-groups)");
  }
  std::printf("ready with sub-groups after %.3f s\n", last - start);
  std::fflush(stdout);
}

// Forks a process and returns when it has started everything and sleeps. The caller kills and reaps it.
pid_t StartAnother(int world_size) {
  int ready[2];
  if (pipe(ready) != 0) throw std::runtime_error("no pipe");
  const pid_t child = fork();  // safe, because the parent has no CUDA context
  if (child < 0) throw std::runtime_error("no process");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      if (std::freopen("/dev/null", "w", stdout) == nullptr) std::_Exit(1);
      Start(world_size);
      if (write(ready[1], "r", 1) == 1) pause();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "nccl_floor: %s\n", error.what());
    }
    std::_Exit(1);
  }
  close(ready[1]);
  char byte;
  const bool started = read(ready[0], &byte, 1) == 1;
  close(ready[0]);
  if (!started) throw std::runtime_error("the process that was started has ended");
  return child;
}

// Measures how much a killed process delays the start of the next one, when both hold only CUDA and NCCL.
void Killed(int world_size) {
  constexpr int kRounds = 7;
  std::vector<double> fresh, end, next;
  const auto kill_and_reap = [](pid_t child) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  };
  for (int i = 0; i < kRounds; ++i) {
    double begin = Seconds();
    const pid_t first = StartAnother(world_size);
    fresh.push_back(Seconds() - begin);
    begin = Seconds();
    kill_and_reap(first);
    end.push_back(Seconds() - begin);
    const pid_t second = StartAnother(world_size);
    next.push_back(Seconds() - begin);
    kill_and_reap(second);
  }
  const auto median = [](std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  };
  std::printf("fresh start %.3f s; killed: ended after %.3f s, the next one ready after %.3f s, %.3f times\n",
              median(fresh), median(end), median(next), median(next) / median(fresh));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int world_size = argc > 1 ? std::atoi(argv[1]) : 2;
    if (argc > 2 && std::string(argv[2]) == "--killed")
      Killed(world_size);
    else
      Start(world_size);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nccl_floor: %s\n", error.what());
    return 1;
  }
  std::fflush(stdout);
  std::_Exit(0);  // skips the teardown, which is not measured
}
