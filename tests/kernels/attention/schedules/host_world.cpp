#include "tests/kernels/attention/schedules/host_world.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "kernels/error.h"
#include "tests/catch.h"

namespace cppool::test {
namespace {

using namespace kernels;

class Report : public AttentionReport {
 public:
  Report(RankRuntime& rank, int iterations, std::function<void(const Finding&)> found)
      : rank_(rank), iterations_(iterations), found_(std::move(found)) {}
  bool NextIteration() override {
    if (++iteration_ == iterations_) rank_.EndIterations();
    if (iteration_ >= iterations_) return false;
    rank_.BeginIteration(iteration_);
    return true;
  }
  void Work(const std::string&, double flops) override {
    if (!(flops > 0)) throw RuntimeError(CPPOOL_INTERNAL, "no work");
  }
  void Check(CheckedTensor tensor, const std::string& against, const Verdict& verdict) override {
    found_({0, tensor, against, verdict});
  }

 private:
  RankRuntime& rank_;
  int iterations_;
  std::function<void(const Finding&)> found_;
  int iteration_ = -1;
};

std::string Describe(const Finding& f) {
  std::ostringstream text;
  text << "rank " << f.rank << " " << NameOf(f.tensor) << " against " << f.against << ": max_abs_err "
       << f.verdict.max_abs_err << ", rel_err " << f.verdict.rel_err << ", tolerance " << f.verdict.tolerance
       << ", mismatches " << f.verdict.mismatches;
  return text.str();
}

}  // namespace

HostWorld::HostWorld(int size)
    : family_(AttentionFamilies("host").front()),
      backend_(CreateHostBackend(size)),
      ranks_(static_cast<std::size_t>(size)) {
  OnEveryRank([&](int r) { ranks_[static_cast<std::size_t>(r)] = backend_->OpenRank(r); });
}

std::vector<Finding> HostWorld::Run(const AttentionSpec& asked, const Alter& alter, TensorSource* source) {
  AttentionSpec spec = asked;
  if (spec.queries.length.empty()) DrawSequences(spec, size());
  std::mutex mutex;
  findings_.clear();
  OnEveryRank([&](int r) {
    RankRuntime& rank = *ranks_[static_cast<std::size_t>(r)];
    Report report(rank, delays_ ? 1 : kIterations, [&](const Finding& f) {
      const std::lock_guard lock(mutex);
      findings_.push_back(f);
      findings_.back().rank = r;
    });
    rank.BeginCase();
    if (delays_) rank.Perturb(*delays_);
    cppool_runtime seam = *rank.seam();
    if (alter) alter(seam);
    RunAttention(&seam, *family_, spec, true, report, source);
    const StageTimes times = rank.EndCase();
    for (const char* stage : {"forward", "backward"}) {
      const bool timed =
          std::any_of(times.begin(), times.end(), [&](const auto& t) { return t.first == stage; });
      if (timed != (spec.training || stage[0] == 'f'))
        throw RuntimeError(CPPOOL_INTERNAL, std::string("wrong stages: ") + stage);
    }
    if (rank.Memory().live_allocations != 0)
      throw RuntimeError(CPPOOL_INTERNAL, "the case left memory behind");
  });
  return findings_;
}

void HostWorld::RequireAllHold(const AttentionSpec& asked) {
  INFO(test::Describe(asked) << " on " << size() << " ranks");
  AttentionSpec spec = asked;
  if (spec.queries.length.empty()) DrawSequences(spec, size());
  const std::vector<Finding> findings = Run(spec);
  const bool every_rank_has_tokens = !spec.queries.padded() && !spec.keys.padded();
  std::map<std::pair<CheckedTensor, std::string>, int> ranks;
  for (const Finding& f : findings) {
    ++ranks[{f.tensor, f.against}];
    INFO(Describe(f));
    CHECK(f.verdict.ok);
  }
  for (const TensorInfo& tensor : OutputTensors(spec)) {
    const CheckedTensor kind = std::get<CheckedTensor>(tensor.kind);
    INFO(NameOf(kind));
    CHECK(ranks[{kind, "no_cp"}] == size());
    CHECK(ranks[{kind, "rerun"}] == (spec.deterministic ? size() : 0));
    if (every_rank_has_tokens)
      CHECK(ranks[{kind, "oracle"}] == size());
    else
      CHECK(ranks[{kind, "oracle"}] >= 1);
  }
}

void HostWorld::OnEveryRank(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (int r = 0; r < backend_->place().world_size; ++r) {
    threads.emplace_back([&, r] {
      try {
        work(r);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
        backend_->Abort("rank " + std::to_string(r) + " failed");
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

bool Possible(CpCommType comm, int world) {
  return comm != CpCommType::kA2aP2p || (world >= 4 && world % 2 == 0);
}

AttentionSpec Small(int world, CpCommType comm) {
  AttentionSpec spec;
  spec.batch = 2;
  spec.seqlen_q = spec.seqlen_kv = 8 * world;
  spec.heads = 8;
  spec.kv_heads = 8;
  spec.dim_qk = spec.dim_v = 64;
  spec.comm = comm;
  spec.scale = 0.125;
  return spec;
}

std::string Describe(const AttentionSpec& spec) {
  constexpr const char* kCommNames[] = {"p2p", "all_gather", "a2a", "a2a+p2p"};
  constexpr const char* kFormats[] = {"bshd", "sbhd", "thd"};
  constexpr const char* kMasks[] = {"no_mask", "causal",         "causal_bottom_right",
                                    "padding", "padding_causal", "padding_causal_bottom_right"};
  constexpr const char* kBiases[] = {"no bias", "bias", "alibi"};
  constexpr const char* kSoftmaxes[] = {"vanilla", "off-by-one", "learnable"};
  std::ostringstream text;
  text << kCommNames[static_cast<int>(spec.comm)] << " " << kFormats[static_cast<int>(spec.format)]
       << (spec.pad_between_seqs ? " padded " : " ") << kMasks[static_cast<int>(spec.mask)] << " window "
       << spec.window_left << "," << spec.window_right << " " << kBiases[static_cast<int>(spec.bias)] << " "
       << (spec.bias_shape.batch ? "b" : "1") << (spec.bias_shape.heads ? "h" : "1")
       << (spec.bias_shape.queries ? "s" : "1") << "s " << kSoftmaxes[static_cast<int>(spec.softmax)]
       << (spec.max_logit ? " max_logit" : "") << (spec.deterministic ? " deterministic" : "") << ", "
       << spec.batch << "x" << spec.seqlen_q << "/" << spec.seqlen_kv << " heads " << spec.heads << "/"
       << spec.kv_heads << " dims " << spec.dim_qk << "/" << spec.dim_v << " " << NameOf(spec.dtypes.q)
       << (spec.training ? "" : " forward only");
  return text.str();
}

}  // namespace cppool::test
