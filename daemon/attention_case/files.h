// The folders of a request: `inputs`, tensors to run on, and `dump`, the tensors of a run.
#pragma once

#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "daemon/attention_case/npy.h"
#include "kernels/attention/run.h"
#include "kernels/attention/spec.h"

namespace cppool::attention_case {

// Both functions throw Refused with the key, and with the file where one is at fault.

// Checks that every file that `spec` needs exists with the right shape and a known type, that its dtype can
// hold all values, and that the sequences fit those of an index.json beside them. Reads all files.
void CheckInputs(const std::string& folder, const kernels::AttentionSpec& spec);
// Checks that the folder is not `inputs` (which may be NULL), that it can be made or written to, and that the
// dump of `spec` would replace an earlier dump only, and files only. Leaves no trace.
void CheckDump(const std::string& folder, const char* inputs, const kernels::AttentionSpec& spec,
               int world_size);

// Each rank has one.
class InputFiles : public kernels::TensorSource {
 public:
  explicit InputFiles(std::string folder) : folder_(std::move(folder)) {}
  void ReadRow(const kernels::TensorInfo& tensor, std::int64_t row, double* to) override;

 private:
  std::string folder_;
  std::map<std::string, NpyReader> files_;
};

// Each rank has one. That of rank 0 makes the folder, the files and, when all is written, index.json. A dump
// replaces an earlier one in the same folder, and nothing else. Only one at a time writes to a folder:
// Begin() throws while another one does.
class DumpFiles : public kernels::TensorSink {
 public:
  // `about`: further members of index.json. `reference`: the outputs without CP are dumped too.
  DumpFiles(std::string folder, const kernels::AttentionSpec& spec, int world_size, bool reference,
            nlohmann::json about)
      : folder_(std::move(folder)),
        spec_(spec),
        world_size_(world_size),
        reference_(reference),
        about_(std::move(about)) {}
  ~DumpFiles() override;
  DumpFiles(const DumpFiles&) = delete;
  DumpFiles& operator=(const DumpFiles&) = delete;
  void Begin() override;
  void WriteRow(const kernels::TensorInfo& tensor, bool reference, std::int64_t row,
                const void* elements) override;
  void End() override;

 private:
  std::string PathOf(const kernels::TensorInfo& tensor, bool reference) const;

  std::string folder_;
  const kernels::AttentionSpec& spec_;
  int world_size_;
  bool reference_;
  nlohmann::json about_;
  base::UniqueFd lock_;  // rank 0 locks the folder
  std::map<std::string, NpyWriter> files_;
};

}  // namespace cppool::attention_case
