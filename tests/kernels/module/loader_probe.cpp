// Prints the results of the loader in a separate process, whose libraries are set by environment variables:
// loader_probe count|create [COMMIT]
#include <cstdio>
#include <cstring>

#include "kernels/attention/attention_family.h"
#include "kernels/attention/check_kernels.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/backend.h"
#include "kernels/error.h"

using namespace cppool::kernels;

template <typename Call>
void Say(Call call) {
  try {
    call();
  } catch (const RuntimeError& e) {
    std::printf("status %d: %s\n", e.status(), e.what());
  }
}

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  if (std::strcmp(argv[1], "count") == 0) {
    Say([] { std::printf("%d\n", CountCudaDevices()); });
    return 0;
  }
  Say([&] {
    const auto backend = CreateCudaBackend(3, Transport::kPeer, argc > 2 ? argv[2] : "");
    std::printf("%s of %d, %s\n", backend->name().c_str(), backend->place().world_size,
                backend->transport().c_str());
    Say([&] { backend->OpenRank(0); });
    cppool_runtime runtime{};
    runtime.backend = "cuda";
    Say([&] { AttentionFamilies("cuda"); });
    Say([&] { MakeTensorOps(&runtime); });
    Say([&] { MakeCheckKernels(&runtime); });
    runtime.backend = "abacus";
    Say([&] { MakeCheckKernels(&runtime); });
    runtime.backend = "host";
    if (AttentionFamilies("host").size() == 1 && MakeTensorOps(&runtime) && MakeCheckKernels(&runtime))
      std::printf("the host's own\n");
  });
  return 0;
}
