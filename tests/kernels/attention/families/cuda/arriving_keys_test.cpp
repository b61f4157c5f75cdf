// Keys that arrive while the forward kernel runs, on one GPU: the test writes them and their flags.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/attention/families/cuda/attention_run.h"

namespace cppool::kernels::test {
namespace {

constexpr int kRanks = 4;
constexpr Band kCausal{-kOpen, 0};

std::uint32_t Load(std::uint32_t& word) { return std::atomic_ref(word).load(); }

// One rank's forward pass over its own keys and those of the others, which come when the test says so.
class Arriving {
 public:
  Arriving(const Device& device, const KernelShape& shape, QkvFormat format, int rank, int heads_per_piece)
      : device_(device), second_(device.rt()) {
    const Sequences sequences = UniformSequences(2, 400);
    std::vector<Layout> blocks;
    for (int distance = 0; distance < kRanks; ++distance)
      blocks.push_back(RankLayout(format, sequences, kRanks, (rank + kRanks - distance) % kRanks));
    problem_ = {shape, blocks[0], Concatenate(blocks), {kCausal, kCausal}};
    problem_.key.block_rows = blocks[0].rows;
    inputs_ = MakeInputs(problem_, 7);
    const Dtype dtype = DtypeOf(shape);
    q_ = ToDevice(device, inputs_.q, dtype);
    k_ = ToDevice(device, inputs_.k, dtype);
    v_ = ToDevice(device, inputs_.v, dtype);
    others_k_ = Poisoned(device, inputs_.k.size() / kRanks * (kRanks - 1), dtype);
    others_v_ = Poisoned(device, inputs_.v.size() / kRanks * (kRanks - 1), dtype);
    out_ = Poisoned(device, inputs_.dout.size(), dtype);
    lse_ = Poisoned(device, states(), Dtype::kFp32);
    pieces_ = (kRanks - 1) * ((shape.kv_heads + heads_per_piece - 1) / heads_per_piece);
    flags_ = Buffer(device.rt(), pieces_ * sizeof(std::uint32_t), device.stream());
    Check(device.rt(), device.rt()->fill(device.rt(), flags_.get(), 0, flags_.bytes(), device.stream()));
    void* words = nullptr;  // the pass, then what the kernel shares with the host
    Check(device.rt(), device.rt()->alloc_host(device.rt(), 64 + sizeof(RingControl), &words));
    pass_ = new (words) std::uint32_t(kPass);
    control_ = new (static_cast<std::byte*>(words) + 64) RingControl{};

    KernelRequest request = RequestOf(problem_);
    request.training = false;
    device.kernel().Load(request);
    plan_ = device.kernel().Plan(request, problem_.query, problem_.key, problem_.bands, device.stream());
    ForwardArgs args;
    args.plan = plan_.get();
    args.q = {q_.get(), dtype}, args.k = {k_.get(), dtype}, args.v = {v_.get(), dtype};
    args.out = {out_.get(), dtype}, args.lse = lse_.get<float>();
    args.arriving.k = {others_k_.get(), dtype}, args.arriving.v = {others_v_.get(), dtype};
    args.arriving.block_rows = problem_.key.block_rows;
    args.arriving.blocks = kRanks;
    args.arriving.heads_per_piece = heads_per_piece;
    args.arriving.arrivals.flags = flags_.get<std::uint32_t>();
    args.arriving.arrivals.pass = kPass;
    args.arriving.arrivals.control = control_;
    device.Wait();
    device.kernel().Forward(shape, args, device.stream());
  }
  ~Arriving() {
    std::atomic_ref(control_->aborted).store(1);
    device_.Wait();
    device_.rt()->free_host(device_.rt(), pass_);
  }

  std::size_t pieces() const { return pieces_; }
  RingControl& control() { return *control_; }
  // Returns 1 + the piece that the kernel waits for, at the latest after 10 s.
  std::uint32_t Awaited() {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (Load(control_->awaited) == 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Load(control_->awaited);
  }
  void Bring() {
    Copy(others_k_.get(), k_.at(k_.bytes() / kRanks), others_k_.bytes());
    Copy(others_v_.get(), v_.at(v_.bytes() / kRanks), others_v_.bytes());
  }
  void Raise(std::size_t piece) { Copy(flags_.at(piece * sizeof *pass_), pass_, sizeof *pass_); }
  void ExpectResults() {
    device_.Wait();
    const Outputs want = Reference(problem_, inputs_);
    const double unit = 1.0 / 256;
    CHECK(Difference(ToHost(device_, out_, inputs_.dout.size(), DtypeOf(problem_.shape)), want.out, unit) ==
          "");
    CHECK(Difference(ToHost(device_, lse_, states(), Dtype::kFp32), want.lse, 1e-5) == "");
  }

 private:
  static constexpr std::uint32_t kPass = 77;
  std::size_t states() const {
    return static_cast<std::size_t>(problem_.query.rows) * static_cast<std::size_t>(problem_.shape.heads);
  }
  void Copy(void* to, const void* from, std::size_t bytes) {
    Check(device_.rt(), device_.rt()->copy(device_.rt(), to, from, bytes, second_.get()));
    Check(device_.rt(), device_.rt()->stream_synchronize(device_.rt(), second_.get()));
  }

  const Device& device_;
  Stream second_;
  Problem problem_;
  Inputs inputs_;
  Buffer q_, k_, v_, others_k_, others_v_, out_, lse_, flags_;
  std::size_t pieces_ = 0;
  std::uint32_t* pass_ = nullptr;
  RingControl* control_ = nullptr;
  std::unique_ptr<BlockPlan> plan_;
};

// Whether the device's kernels take keys so.
bool Takes(const Device& device, const KernelShape& shape) {
  KernelRequest request;
  request.shape = shape;
  request.training = false;
  return device.family().capabilities(request).arriving_piece_bytes > 0;
}

}  // namespace

TEST_CASE("a kernel waits for each piece of the keys that it needs, and for no other") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  for (const Dims dims : kDims) {
    const KernelShape shape = Shape(dims, Dtype::kBf16, 6, 3);
    if (!Takes(device, shape)) continue;
    for (const QkvFormat format : {QkvFormat::kBshd, QkvFormat::kSbhd}) {
      for (const int heads_per_piece : {1, 2, 3}) {
        for (int rank = 0; rank < kRanks; ++rank) {
          CAPTURE(dims.qk, dims.v, static_cast<int>(format), heads_per_piece, rank);
          Arriving pass(device, shape, format, rank, heads_per_piece);
          CHECK(pass.Awaited() > 0);
          pass.Bring();
          // Every rank of a causal ring sees something of every other block: the last flag is waited for.
          const std::size_t last = static_cast<std::size_t>(rank) % pass.pieces();
          for (std::size_t piece = 0; piece < pass.pieces(); ++piece)
            if (piece != last) pass.Raise(piece);
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
          CHECK(pass.Awaited() == last + 1);
          pass.Raise(last);
          pass.ExpectResults();
          CHECK(pass.control().late == 0);
        }
      }
    }
  }
}

TEST_CASE("a kernel that waits for keys ends soon after an abort") {
  if (!HaveDevice()) return;
  const Device device(EachFamily());
  const KernelShape shape = Shape({128, 128}, Dtype::kBf16, 6, 3);
  if (!Takes(device, shape)) return;
  Arriving pass(device, shape, QkvFormat::kBshd, 0, 1);
  CHECK(pass.Awaited() > 0);
  const auto begin = std::chrono::steady_clock::now();
  std::atomic_ref(pass.control().aborted).store(1);
  device.Wait();
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

}  // namespace cppool::kernels::test
