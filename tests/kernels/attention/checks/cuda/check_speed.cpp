// Prints the time of generating inputs, comparing, and the oracle at 4096 x 4096 on this GPU. Not a test: the
// times are not checked.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <vector>

#include "kernels/attention/checks/oracle_workspace.h"
#include "tests/kernels/attention/checks/oracle_case.h"

namespace cppool::kernels::test {
namespace {

// The median of five runs, each measured from an idle stream until the stream is idle again. A first run,
// which may allocate, is not counted.
template <typename Work>
double Milliseconds(const CheckRank& rank, const Work& work) {
  std::vector<double> times;
  for (int i = 0; i < 6; ++i) {
    rank.Synchronize();
    const auto begin = std::chrono::steady_clock::now();
    work();
    rank.Synchronize();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(times.begin() + 1, times.end());
  return times[3];
}

void TimeOracle(const CheckRank& rank, const char* name, const OracleCase& c) {
  const OracleInputs inputs = MakeInputs(rank, c);
  const auto doubles = [&](std::int64_t count) {
    return rank.Poisoned(static_cast<std::size_t>(count) * sizeof(double));
  };
  const Buffer out = doubles(c.seqlen_q * c.group * c.dim_v);
  const Buffer lse = doubles(c.seqlen_q * c.group);
  const Buffer dq = doubles(c.seqlen_q * c.group * c.dim_qk);
  const Buffer dk = doubles(c.seqlen_kv * c.dim_qk);
  const Buffer dv = doubles(c.seqlen_kv * c.dim_v);
  OracleArgs args = MakeArgs(c, inputs);
  args.out = out.get<double>();
  args.lse = lse.get<double>();
  args.dq = dq.get<double>();
  args.dk = dk.get<double>();
  args.dv = dv.get<double>();
  double milliseconds[2];
  for (const bool rounded : {false, true}) {
    args.rounded = rounded;
    milliseconds[rounded] = Milliseconds(rank, [&] { rank.kernels().Oracle(args, rank.stream()); });
  }
  // Products over dim_qk: S, dq, dk; over dim_v: dP, out, dv.
  const double pairs = static_cast<double>(c.seqlen_q) * static_cast<double>(c.seqlen_kv) *
                       (c.mask == AttnMaskType::kNoMask ? 1 : 0.5);
  const double flops = 2.0 * c.group * pairs * 3 * (c.dim_qk + c.dim_v);
  std::printf("%-44s exact %7.2f ms (%5.1f TFLOP/s), rounded %7.2f ms, workspace %zu MiB\n", name,
              milliseconds[0], flops / milliseconds[0] * 1e-9, milliseconds[1],
              OracleWorkspace(ShapeOf(args)) >> 20);
}

void Run() {
  const CheckRank rank(CreateCudaBackend(1), &MakeCheckKernels);
  const OracleCase base{.seqlen_q = 4096,
                        .seqlen_kv = 4096,
                        .group = 8,
                        .dim_qk = 128,
                        .dim_v = 128,
                        .mask = AttnMaskType::kCausal};
  TimeOracle(rank, "oracle 4096, group 8, d 128, causal", base);
  OracleCase c = base;
  c.mask = AttnMaskType::kNoMask;
  TimeOracle(rank, "oracle 4096, group 8, d 128, no mask", c);
  c = base;
  c.group = 1;
  TimeOracle(rank, "oracle 4096, group 1, d 128, causal", c);
  c.dim_qk = c.dim_v = 64;
  TimeOracle(rank, "oracle 4096, group 1, d 64, causal", c);
  c = base;
  c.window_left = 512;
  TimeOracle(rank, "oracle 4096, group 8, d 128, causal, left 512", c);
  c = base;
  c.seqlen_q = c.seqlen_kv = 16384;
  c.group = 1;
  TimeOracle(rank, "oracle 16384, group 1, d 128, causal", c);

  const Layout layout = GlobalLayout(QkvFormat::kBshd, UniformSequences(2, 4096));
  const int heads = 128;
  const std::size_t count = static_cast<std::size_t>(layout.rows) * heads * 128;
  const Buffer a(rank.rt(), count * 2, rank.stream());
  const Buffer b(rank.rt(), count * 2, rank.stream());
  const auto generate = [&](const Buffer& to) {
    rank.kernels().Generate(InputTensor::kQ, 1, layout, heads, 128, Dtype::kBf16, to.get(), rank.stream());
  };
  generate(b);
  double milliseconds = Milliseconds(rank, [&] { generate(a); });
  std::printf("inputs of 2 x 4096 x 128 x 128, bf16            %7.3f ms (%.0f GB/s)\n", milliseconds,
              static_cast<double>(count) * 2 / milliseconds * 1e-6);
  const Buffer bias(rank.rt(), std::size_t{12} * 4096 * 4096 * 2, rank.stream());
  milliseconds = Milliseconds(rank, [&] {
    rank.kernels().GenerateBias(1, 1, 12, 4096, 4096, Dtype::kBf16, bias.get(), rank.stream());
  });
  std::printf("bias of 1 x 12 x 4096 x 4096, bf16              %7.3f ms (%.0f GB/s)\n", milliseconds,
              static_cast<double>(bias.bytes()) / milliseconds * 1e-6);
  void* digest = nullptr;
  Check(rank.rt(), rank.rt()->alloc_host(rank.rt(), sizeof(std::uint64_t), &digest));
  milliseconds = Milliseconds(rank, [&] {
    rank.kernels().Digest(bias.get(), bias.bytes(), static_cast<std::uint64_t*>(digest), rank.stream());
  });
  rank.rt()->free_host(rank.rt(), digest);
  std::printf("digest of 1 x 12 x 4096 x 4096, bf16            %7.3f ms (%.0f GB/s)\n", milliseconds,
              static_cast<double>(bias.bytes()) / milliseconds * 1e-6);
  CompareArgs args;
  args.a = {a.get(), Dtype::kBf16};
  args.b = {b.get(), Dtype::kBf16};
  args.rows = layout.rows;
  args.columns = args.a_stride = args.b_stride = heads * 128;
  CompareStats stats;
  milliseconds = Milliseconds(rank, [&] { stats = rank.Compare(args); });
  std::printf("comparison of 2 x 4096 x 128 x 128, bf16        %7.3f ms (%.0f GB/s)\n", milliseconds,
              static_cast<double>(count) * 4 / milliseconds * 1e-6);
  if (stats.max_abs_err != 0 || stats.count != count) std::printf("the comparison is wrong\n");
}

}  // namespace
}  // namespace cppool::kernels::test

int main() {
  try {
    cppool::kernels::test::Run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "check_speed: %s\n", error.what());
    return 1;
  }
}
