// The floor of a single-process pool's start: CUDA contexts, NCCL communicators and the first collective for
// W GPUs, a thread per rank, and nothing else. Run it beside pool_latency, with only W devices visible:
//
//     CUDA_VISIBLE_DEVICES=0,1 nccl_floor 2
#include <cuda_runtime.h>
#include <nccl.h>

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

}  // namespace

int main(int argc, char** argv) {
  const int world_size = argc > 1 ? std::atoi(argv[1]) : 2;
  const double start = Seconds();
  double last = start;
  const auto lap = [&](const char* what) {
    const double now = Seconds();
    std::printf("%-28s %7.3f s\n", what, now - last);
    last = now;
  };
  try {
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
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nccl_floor: %s\n", error.what());
    return 1;
  }
  std::fflush(stdout);
  std::_Exit(0);  // tearing down is not what is measured
}
