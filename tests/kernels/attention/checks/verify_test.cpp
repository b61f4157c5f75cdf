// Tests of the Verifier: the estimate of the oracle's memory, the lifetime of the sources of copies when
// memory runs out, and ALiBi's slopes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernels/attention/checks/host/check_kernels.h"
#include "kernels/attention/checks/oracle_mask.h"
#include "kernels/attention/checks/oracle_workspace.h"
#include "kernels/attention/checks/verify.h"
#include "kernels/attention/tensors/tensor_set.h"
#include "tests/catch.h"
#include "tests/kernels/attention/checks/check_rank.h"

namespace cppool::kernels::test {
namespace {

class NoReport : public AttentionReport {
 public:
  bool NextIteration() override { return false; }
  void Work(const std::string&, double) override {}
  void Check(CheckedTensor, const std::string&, const Verdict&) override {}
};

// Allocates the memory that the CUDA kernels allocate, and computes nothing.
class MemoryOfCuda : public CheckKernels {
 public:
  explicit MemoryOfCuda(cppool_runtime* runtime) : runtime_(runtime) {}
  void Load() override {}
  void Generate(InputTensor, std::uint64_t, const Layout&, int, int, Dtype, void*, cppool_stream,
                bool) override {}
  void GenerateBias(std::uint64_t, std::int64_t, int, std::int64_t, std::int64_t, Dtype, void*,
                    cppool_stream) override {}
  void Digest(const void*, std::size_t, std::uint64_t*, cppool_stream) override {}
  void CopyRows(const std::vector<RowsCopy>&, std::chrono::nanoseconds, cppool_stream) override {}
  void RoundValues(Dtype, double*, std::int64_t, cppool_stream) override {}
  void FillValues(double*, double, std::int64_t, cppool_stream) override {}
  void Compare(const CompareArgs&, CompareStats*, cppool_stream) override {}
  void CheckBits(const BitsCheck&, BitsTally*, cppool_stream) override {}
  void Oracle(const OracleArgs& args, cppool_stream stream) override {
    const Buffer workspace(runtime_, OracleWorkspace(ShapeOf(args)), stream);
  }

 private:
  cppool_runtime* runtime_;
};

// A rank's runtime interface that records allocations and copies, and can fail one allocation.
class WatchedSeam {
 public:
  explicit WatchedSeam(const CheckRank& rank) : inner_(rank.rt()) {
    table_.seam = *inner_;
    table_.owner = this;
    table_.seam.alloc = [](cppool_runtime* rt, std::size_t bytes, cppool_stream stream, void** out) {
      return Of(rt).Alloc(bytes, stream, out);
    };
    table_.seam.free = [](cppool_runtime* rt, void* pointer, cppool_stream stream) {
      Of(rt).device_.erase(static_cast<std::byte*>(pointer));
      return Of(rt).inner_->free(Of(rt).inner_, pointer, stream);
    };
    table_.seam.alloc_host = [](cppool_runtime* rt, std::size_t bytes, void** out) {
      const cppool_status status = Of(rt).inner_->alloc_host(Of(rt).inner_, bytes, out);
      if (status == CPPOOL_OK && *out) Of(rt).host_[static_cast<std::byte*>(*out)] = bytes;
      return status;
    };
    table_.seam.free_host = [](cppool_runtime* rt, void* pointer) {
      Of(rt).host_.erase(static_cast<std::byte*>(pointer));
      return Of(rt).inner_->free_host(Of(rt).inner_, pointer);
    };
    table_.seam.copy = [](cppool_runtime* rt, void* to, const void* from, std::size_t bytes,
                          cppool_stream stream) {
      ++Of(rt).copies;
      Of(rt).sources_.push_back(static_cast<const std::byte*>(from));
      return Of(rt).inner_->copy(Of(rt).inner_, to, from, bytes, stream);
    };
    table_.seam.stream_synchronize = [](cppool_runtime* rt, cppool_stream stream) {
      Of(rt).go = true;
      return Of(rt).inner_->stream_synchronize(Of(rt).inner_, stream);
    };
  }

  cppool_runtime* rt() { return &table_.seam; }
  // Whether the source of every copy so far is still allocated.
  bool AllSourcesLive() const {
    return std::all_of(sources_.begin(), sources_.end(),
                       [&](const std::byte* from) { return Within(host_, from) || Within(device_, from); });
  }

  int allocations_left = 1 << 30;  // allocations before the one that fails
  int copies = 0;
  std::atomic<bool> go{false};  // set by the first stream_synchronize
  double held = 0, most = 0;

 private:
  using Blocks = std::map<const std::byte*, std::size_t>;
  struct Table {  // standard layout: a function of the table finds the owner from its address
    cppool_runtime seam;
    WatchedSeam* owner;
  };
  static WatchedSeam& Of(cppool_runtime* rt) { return *reinterpret_cast<Table*>(rt)->owner; }
  static bool Within(const Blocks& blocks, const std::byte* at) {
    const auto after = blocks.upper_bound(at);
    return after != blocks.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }
  cppool_status Alloc(std::size_t bytes, cppool_stream stream, void** out) {
    if (allocations_left-- == 0) return CPPOOL_OUT_OF_MEMORY;
    const cppool_status status = inner_->alloc(inner_, bytes, stream, out);
    if (status == CPPOOL_OK && *out) device_[static_cast<std::byte*>(*out)] = bytes;
    held = 0;
    for (const auto& [pointer, size] : device_) held += static_cast<double>(size);
    most = std::max(most, held);
    return status;
  }

  cppool_runtime* inner_;
  Table table_{};
  Blocks device_, host_;
  std::vector<const std::byte*> sources_;
};

AttentionSpec Spec(int heads, int kv_heads, std::int64_t q, std::int64_t kv) {
  AttentionSpec spec;
  spec.batch = 1;
  spec.seqlen_q = q;
  spec.seqlen_kv = kv;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.dim_qk = spec.dim_v = 64;
  spec.scale = 0.125;
  DrawSequences(spec, 1);
  return spec;
}

}  // namespace

TEST_CASE("the oracle on a GPU allocates no more memory than OracleBytes") {
  std::vector<AttentionSpec> specs = {Spec(16, 1, 192, 256), Spec(8, 2, 300, 64), Spec(4, 4, 64, 1000),
                                      Spec(16, 16, 128, 128)};
  specs.push_back(specs[0]);
  specs.back().training = false;
  specs.push_back(specs[0]);
  specs.back().softmax = SoftmaxType::kLearnable;
  specs.back().max_logit = true;
  specs.push_back(specs[1]);
  specs.back().bias = BiasType::kPostScale;
  specs.push_back(specs[0]);
  specs.back().batch = 5;
  specs.back().seqlen_kv = specs.back().seqlen_q;
  specs.back().format = QkvFormat::kThd;
  specs.back().mask = AttnMaskType::kPaddingCausal;
  specs.back().pad_between_seqs = true;
  DrawSequences(specs.back(), 1);
  specs.push_back(specs[0]);
  specs.back().fp8 = Fp8Recipe{ScalingMode::kMxfp8, true, false, true, true};
  specs.push_back(specs[1]);
  specs.back().fp8 = Fp8Recipe{ScalingMode::kCurrent, true, false, false, true};
  for (const AttentionSpec& spec : specs) {
    const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
    WatchedSeam seam(rank);
    seam.rt()->backend = "cuda";  // selects the sample for a GPU
    MemoryOfCuda kernels(seam.rt());
    const TensorSet local(seam.rt(), spec, 1), global(seam.rt(), spec, 1);
    const RankTokens tokens(spec, 1, 0);
    NoReport report;
    const double before = seam.held;
    Verifier verifier(seam.rt(), spec, kernels, tokens, local, global, report);
    Fp8Problem quantized;
    quantized.dout = {global.get(InputTensor::kDout), Dtype::kBf16};
    if (spec.fp8) verifier.UseQuantized(quantized, 0);
    verifier.AgainstOracle();
    const double estimated = OracleBytes(spec, false, 1);
    const auto tokens_of_both = static_cast<double>(spec.queries.rows + spec.keys.rows);
    // Rows, and where the blocks of each sequence, and of dbias, begin.
    const double tables = 16.0 * tokens_of_both + 8.0 * (tokens_of_both / kBlockRows + 4.0 * spec.batch) +
                          8.0 * spec.heads * (static_cast<double>(spec.seqlen_q) / kBlockRows + 2);
    INFO("heads " << spec.heads << "/" << spec.kv_heads << ", q " << spec.seqlen_q << ", kv "
                  << spec.seqlen_kv << ": held " << seam.most - before << ", tables " << tables
                  << ", estimated " << estimated);
    CHECK(seam.most - before <= estimated + tables);
    if (spec.training) CHECK(estimated < 1.1 * (seam.most - before));
  }
}

TEST_CASE("the estimate counts every query head that the oracle on a GPU processes at a time") {
  AttentionSpec spec = Spec(64, 1, 1024, 1024);
  const double pairs = 64.0 * 1024 * 1024;
  CHECK(OracleBytes(spec, false, 1) > 16 * pairs);  // P and dP
  CHECK(OracleBytes(spec, true, 1) < 8 * pairs);    // the host's oracle works row by row
  spec = Spec(64, 1, 1 << 17, 1 << 17);
  CHECK(OracleBytes(spec, false, 1) <
        8.0 * 2 * (64 * 129 + 128) * (1 << 17) + 1.5e9);  // a chunk of rows at a time
}

TEST_CASE("when a check runs out of memory, the sources of pending copies stay allocated") {
  AttentionSpec spec = Spec(2, 2, 16, 16);
  spec.bias = BiasType::kAlibi;
  int refused = 0, copies = 0;
  for (int allowed = 0;; ++allowed) {
    const CheckRank rank(CreateHostBackend(1), &MakeHostCheckKernels);
    WatchedSeam seam(rank);
    const TensorSet local(seam.rt(), spec, 1), global(seam.rt(), spec, 1);
    const RankTokens tokens(spec, 1, 0);
    NoReport report;
    for (const TensorSet* set : {&local, &global}) set->PoisonOutputs();
    // Blocks the main stream until the checks wait for it or have ended.
    Enqueue(rank.rt(), rank.stream(), [&] {
      while (!seam.go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    seam.allocations_left = allowed;
    bool failed = false;
    try {
      Verifier verifier(seam.rt(), spec, rank.kernels(), tokens, local, global, report);
      verifier.AgainstNoCp();
    } catch (const RuntimeError& error) {
      CHECK(error.status() == CPPOOL_OUT_OF_MEMORY);
      CHECK(seam.AllSourcesLive());
      failed = true;
      copies += seam.copies;
    }
    seam.go = true;
    rank.Synchronize();
    if (!failed) break;
    ++refused;
    REQUIRE(allowed < 100);
  }
  CHECK(refused >= 4);
  CHECK(copies > 0);
}

TEST_CASE("the oracle's ALiBi slopes have the published values") {
  CHECK(OracleAlibiSlopes(1) == std::vector<float>{0x1p-8f});
  CHECK(OracleAlibiSlopes(2) == std::vector<float>{0x1p-4f, 0x1p-8f});
  CHECK(OracleAlibiSlopes(3) == std::vector<float>{0x1p-4f, 0x1p-8f, 0x1p-2f});
  CHECK(OracleAlibiSlopes(6) == std::vector<float>{0x1p-2f, 0x1p-4f, 0x1p-6f, 0x1p-8f, 0x1p-1f, 0x1p-3f});
  CHECK(OracleAlibiSlopes(8) ==
        std::vector<float>{0x1p-1f, 0x1p-2f, 0x1p-3f, 0x1p-4f, 0x1p-5f, 0x1p-6f, 0x1p-7f, 0x1p-8f});
  const std::vector<float> ten = OracleAlibiSlopes(10);
  REQUIRE(ten.size() == 10);
  CHECK(std::vector<float>(ten.begin(), ten.begin() + 8) == OracleAlibiSlopes(8));
  CHECK(ten[8] == 0.70710678f);
  CHECK(ten[9] == 0.35355339f);
}

TEST_CASE("the ALiBi slopes of the kernels and of the oracle agree") {
  for (int heads = 1; heads <= 64; ++heads) {
    INFO(heads << " heads");
    CHECK(AlibiSlopes(heads) == OracleAlibiSlopes(heads));
  }
  const std::vector<float> ours = AlibiSlopes(1000), oracle = OracleAlibiSlopes(1000);
  REQUIRE(ours.size() == oracle.size());
  for (std::size_t h = 0; h < ours.size(); ++h) CHECK(Near(ours[h], oracle[h], 1e-6));
}

}  // namespace cppool::kernels::test
