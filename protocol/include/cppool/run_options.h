// What a call of Pool::Run may ask for beside the parameters of its case. The members are those of the
// protocol's `run` (protocol/README.md).
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cppool {

// When the daemon stops timing a case, in place of a fixed number of iterations. It decides for all ranks at
// once: protocol/README.md says when.
struct Sampling {
  // 0.0001 to 1: half the width of the 95 % confidence interval of each stage's median, over the median.
  double precision = 0.01;
  std::chrono::milliseconds limit{10000};  // 1 ms to 24 h, of all timed iterations
  std::int64_t most = 10000;               // iterations
};

// A fault of one rank, for tests. The daemon must have been started with `--allow-faults`
// (PoolOptions::arguments).
struct Fault {
  std::string kind;  // "throw", "stall", ...: listed in daemon/failures.md
  int rank = 0;
  std::string stage{};     // a mark's name or its beginning; empty: any mark of the case's iterations
  std::int64_t count = 1;  // at which of those marks, from 1
};

struct RunOptions {
  std::string case_name = "attention";
  std::chrono::milliseconds deadline{90000};  // for the case; 1 ms to 24 h
  std::int64_t warmup = 0;                    // untimed iterations at first
  std::int64_t repeat = 1;                    // timed iterations; the result has medians
  std::optional<Sampling> sampling;  // in place of `repeat`; for a daemon with the feature "sampling"
  bool checks = true;
  std::optional<std::uint64_t> perturb;  // seed of random delays at every mark; below 2^63
  std::string dump;                      // folder for the case's tensors as .npy; empty: none
  std::string inputs;                    // folder with q.npy, k.npy, ... to run on; empty: generated
  // Whose attention kernels: "cppool", "cudnn", or a library with kernels of cppool/attention.h: its path, or
  // "path,name". Empty: the daemon's default, which is "cppool" unless it was started with --kernels.
  std::string kernels;
  std::optional<Fault> fault;
  std::vector<std::string> load;  // libraries with cases for this call; of sources: cppool/compile.h
  bool waits = false;    // stages for what the main stream waits for; for a daemon with the feature "waits"
  bool profile = false;  // the timed iterations are the range of a profiler; for one with "profile"
  bool progress =
      false;  // lines on how far it has come, as JSON, for PoolOptions::log; for one with "progress"
  // File for a timeline of the run, as Chrome's JSON, which ui.perfetto.dev opens; empty: none. For a daemon
  // with the feature "trace", which writes it: whole or not at all, and not when the ranks did not start, or
  // one has not returned.
  std::string trace{};
  // By file of `load` and `kernels`: the digest, as an answer has it, of the content that is meant, when the
  // file has another one by now. For a daemon with the feature "digests". Others: the content that the file
  // has.
  std::map<std::string, std::string> digests{};
  // A case in Python, in place of `case_name` and the parameters, as the text of a JSON object: a function
  // and its `kwargs`, a script and its `argv`, or an item of pytest (protocol/README.md). For a daemon whose
  // ranks are processes (PoolOptions::python). Empty: none.
  std::string python{};
  bool fresh = false;      // on ranks that have run no case
  bool own_group = false;  // the case makes its process group: none is lent
  bool verdict = true;     // a case that fails on used ranks is run once more on fresh ones
};

}  // namespace cppool
