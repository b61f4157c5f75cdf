// Tests of the division of the oracle's calls among ranks.
#include "kernels/attention/checks/oracle_shares.h"

#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "tests/catch.h"
#include "tests/kernels/runtime/host/world.h"

namespace cppool::kernels::test {
namespace {

constexpr std::size_t kValues = 3;

double* At(const Buffer& buffer) { return buffer.get<double>(); }

// On the ranks' threads, where the test's own assertions may not be used.
void Expect(bool holds, const char* what) {
  if (!holds) throw RuntimeError(CPPOOL_INTERNAL, what);
}

}  // namespace

TEST_CASE("one rank runs each call of the oracle, and every rank has its results") {
  for (const int size : {1, 2, 3, 4}) {
    cppool::test::World world(size);
    const auto most = static_cast<std::size_t>(size);
    for (std::size_t pairs = 1; pairs <= most; ++pairs) {
      for (const bool together : {false, true}) {
        std::vector<std::array<std::atomic<int>, 2>> runs(pairs);
        std::vector<int> calls(most);  // of each rank
        const auto errors = world.CaseErrors([&](cppool_runtime* rt) {
          const OracleShares shares(rt, true);
          Expect(shares.most() == most, "a round has as many pairs as ranks");
          const Buffer exact(rt, kValues * sizeof(double), rt->stream), plain(rt, exact.bytes(), rt->stream),
              others_exact(rt, exact.bytes(), rt->stream), others_plain(rt, exact.bytes(), rt->stream);
          const Buffer none;
          Check(rt, rt->stream_synchronize(rt, rt->stream));  // memory is there for this thread
          for (std::size_t pair = 0; pair < pairs; ++pair) {
            for (const bool of_plain : {false, true}) {
              if (!shares.Runs(pair, pairs, of_plain, together)) continue;
              ++runs[pair][of_plain];
              ++calls[static_cast<std::size_t>(rt->rank)];
              if (together) Expect(shares.Runs(pair, pairs, !of_plain, together), "calls belong together");
              const Buffer& to = of_plain ? plain : exact;
              for (std::size_t i = 0; i < kValues; ++i) At(to)[i] = 100.0 * pair + 10.0 * of_plain + i;
            }
          }
          for (std::size_t pair = 0; pair < pairs; ++pair) {
            shares.Exchange({{&exact, &others_exact, exact.bytes(), false},
                             {&plain, &others_plain, plain.bytes(), true},
                             {&none, &none, exact.bytes(), false},
                             {&exact, &others_exact, 0, false}},
                            pair, pairs, together);
            Check(rt, rt->stream_synchronize(rt, rt->stream));
            for (const bool of_plain : {false, true}) {
              const bool own = shares.Runs(pair, pairs, of_plain, together);
              const Buffer& from = of_plain ? (own ? plain : others_plain) : (own ? exact : others_exact);
              for (std::size_t i = 0; i < kValues; ++i)
                Expect(At(from)[i] == 100.0 * pair + 10.0 * of_plain + i, "a result of another call");
            }
          }
        });
        CAPTURE(size, pairs, together);
        for (const std::string& error : errors) CHECK(error == "");
        for (const auto& of_pair : runs) {
          CHECK(of_pair[0] == 1);
          CHECK(of_pair[1] == 1);
        }
        // Where ranks are enough none has two calls, but for those that belong together.
        for (const int count : calls) CHECK(count <= (together || 2 * pairs > most ? 2 : 1));
      }
    }
  }
}

TEST_CASE(
    "what the oracle's calls add to is reduced over all ranks, or left alone where each runs them all") {
  constexpr int kRanks = 3;
  cppool::test::World world(kRanks);
  for (const bool divided : {true, false}) {
    const auto errors = world.CaseErrors([&](cppool_runtime* rt) {
      const OracleShares shares(rt, divided);
      Expect(shares.divided() == divided, "divided");
      const Buffer sum(rt, 2 * sizeof(double), rt->stream), most(rt, sum.bytes(), rt->stream);
      Check(rt, rt->stream_synchronize(rt, rt->stream));
      for (const Buffer* each : {&sum, &most}) {
        At(*each)[0] = rt->rank + 0.5;
        At(*each)[1] = -rt->rank;
      }
      shares.Reduce(sum, CPPOOL_SUM);
      shares.Reduce(most, CPPOOL_MAX);
      shares.Reduce(Buffer(), CPPOOL_SUM);
      Check(rt, rt->stream_synchronize(rt, rt->stream));
      Expect(At(sum)[0] == (divided ? 4.5 : rt->rank + 0.5), "the sum");
      Expect(At(sum)[1] == (divided ? -3 : -rt->rank), "the sum of negative values");
      Expect(At(most)[0] == (divided ? 2.5 : rt->rank + 0.5), "the maximum");
      Expect(At(most)[1] == (divided ? 0 : -rt->rank), "the maximum of negative values");
      Expect(shares.Runs(0, 1, true, false) == (!divided || rt->rank == 1), "who runs the plain call");
    });
    for (const std::string& error : errors) CHECK(error == "");
  }
}

}  // namespace cppool::kernels::test
