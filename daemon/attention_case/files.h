// The folders of a request: `inputs`, tensors to run on, and `dump`, the tensors of a run.
#pragma once

#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "kernels/attention/run.h"
#include "kernels/attention/spec.h"
#include "daemon/attention_case/npy.h"

namespace cppool::attention_case {

// Both throw Refused naming the key, and the file where it is one.
// Every file that `spec` needs is there, of its shape and a type that can be read, and all values are numbers that its
// dtype can hold; and where a dump's index.json is beside them, its sequences are those of `spec`. Reads all of them.
void CheckInputs(const std::string& folder, const kernels::AttentionSpec& spec);
// The folder can be written to, or made, is not `inputs` (which may be NULL), and what `spec` puts there takes no place but
// a file's. Leaves no trace.
void CheckDump(const std::string& folder, const char* inputs, const kernels::AttentionSpec& spec);

// One per rank.
class InputFiles : public kernels::TensorSource {
 public:
  explicit InputFiles(std::string folder) : folder_(std::move(folder)) {}
  void ReadRow(const kernels::TensorInfo& tensor, std::int64_t row, double* to) override;

 private:
  std::string folder_;
  std::map<std::string, NpyReader> files_;
};

// One per rank; rank 0's makes the folder, the files and, when everything is written, index.json. A dump takes the place
// of the one before.
class DumpFiles : public kernels::TensorSink {
 public:
  // `about`: what index.json says beside the files. `reference`: there is a run without CP.
  DumpFiles(std::string folder, const kernels::AttentionSpec& spec, bool reference, nlohmann::json about)
      : folder_(std::move(folder)), spec_(spec), reference_(reference), about_(std::move(about)) {}
  void Begin() override;
  void WriteRow(const kernels::TensorInfo& tensor, bool reference, std::int64_t row,
                const void* elements) override;
  void End() override;

 private:
  std::string PathOf(const kernels::TensorInfo& tensor, bool reference) const;

  std::string folder_;
  const kernels::AttentionSpec& spec_;
  bool reference_;
  nlohmann::json about_;
  std::map<std::string, NpyWriter> files_;
};

}  // namespace cppool::attention_case
