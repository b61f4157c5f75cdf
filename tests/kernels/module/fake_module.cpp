// A fake libcppool_cuda.so for the tests of the loader, with the commit "fake". FAKE_SEAM_ID replaces its
// build id.
#include "kernels/build_id.h"
#include "kernels/error.h"
#include "kernels/module/cuda_module.h"

namespace {

using namespace cppool::kernels;

class FakeBackend final : public Backend {
 public:
  FakeBackend(const Place& place, Transport transport) : place_(place), transport_(transport) {}
  std::string name() const override { return "fake"; }
  std::string transport() const override { return transport_ == Transport::kPeer ? "peer" : "another"; }
  const Place& place() const override { return place_; }
  std::unique_ptr<RankRuntime> OpenRank(int) override { throw RuntimeError(CPPOOL_UNSUPPORTED, "fake rank"); }
  std::vector<DeviceInfo> Devices() const override { return {}; }
  std::vector<std::pair<std::string, double>> InitTimes() const override { return {}; }
  void Abort(const std::string&) override {}
  void Finished(int) override {}
  void Profile(bool) override {}
  void Recover(std::chrono::milliseconds) override {}

 private:
  const Place place_;
  Transport transport_;
};

std::unique_ptr<Backend> CreateBackend(const Place& place, Transport transport, WorldLink) {
  return std::make_unique<FakeBackend>(place, transport);
}
std::vector<const AttentionFamily*> Families() { throw RuntimeError(CPPOOL_UNSUPPORTED, "fake families"); }
std::unique_ptr<TensorOps> MakeOps(cppool_runtime*) {
  throw RuntimeError(CPPOOL_UNSUPPORTED, "fake tensor operations");
}
std::unique_ptr<CheckKernels> MakeCheck(cppool_runtime*) {
  throw RuntimeError(CPPOOL_UNSUPPORTED, "fake checks");
}

#ifdef FAKE_SEAM_ID
constexpr const char* kId = FAKE_SEAM_ID;
#else
const char* const kId = SeamId();
#endif

const CudaModule kModule{kId, "fake", CreateBackend, Families, MakeOps, MakeCheck};

}  // namespace

extern "C" __attribute__((visibility("default"))) const CudaModule* cppool_cuda_module() { return &kModule; }
