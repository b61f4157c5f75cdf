// The same requests on GPUs, for as many as there are.
#include <cstdio>

#include "attention_smoke.h"
#include "kernels/backend.h"
#include "user_case_smoke.h"

namespace cppool::test {
namespace {

template <typename Function>
void ForEachWorld(Function&& function) {
  const int devices = kernels::CountCudaDevices();
  for (const int world_size : {1, 2, 4}) {
    if (world_size > devices) {
      WARN("world size " << world_size << " is left out: there are " << devices << " devices");
    } else {
      function(world_size);
    }
  }
}

}  // namespace

TEST_CASE("attention on GPUs, every schedule") {
  ForEachWorld([](int world_size) {
    DaemonProcess daemon({"--world-size", std::to_string(world_size), "--backend", "cuda"});
    const Json hello = daemon.Ask({{"op", "hello"}});
    CHECK(hello.at("backend") == "cuda");
    CHECK(hello.at("transport") == "nccl");
    RunAttentionSmoke(daemon, world_size);
  });
}

TEST_CASE("a user's case, built against the installed prefix, on GPUs") {
  ForEachWorld([](int world_size) { RunUserCase("cuda", world_size); });
}

TEST_CASE("more ranks than devices are refused, saying how many there are") {
  const int devices = kernels::CountCudaDevices();
  for (const char* backend : {"cuda", "auto"}) {
    if (devices == 0) continue;
    DaemonProcess daemon({"--world-size", std::to_string(devices + 1), "--backend", backend});
    CHECK(daemon.Wait() == 2);
    CHECK(daemon.Stderr().find("CUDA sees " + std::to_string(devices)) != std::string::npos);
  }
  if (devices == 0) WARN("there are no devices");
}

}  // namespace cppool::test
