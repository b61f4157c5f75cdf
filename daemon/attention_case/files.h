// The folders of a request: `inputs`, tensors to run on, and `dump`, the tensors of a run.
#pragma once

#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include "base/npy.h"
#include "base/unique_fd.h"
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
  std::map<std::string, base::NpyReader> files_;
};

// Each rank has one. That of rank 0 makes the folder, the files and, when all is written, index.json. A dump
// replaces an earlier one in the same folder, and nothing else. Only one at a time writes to a folder:
// Begin() throws while another one does.
class DumpFiles : public kernels::TensorSink {
 public:
  // `about`: further members of index.json, read when all is written. `checked`: the outputs without CP and
  // those of the oracle are dumped, too.
  DumpFiles(std::string folder, const kernels::AttentionSpec& spec, int world_size, bool checked,
            const nlohmann::json& about)
      : folder_(std::move(folder)), spec_(spec), world_size_(world_size), checked_(checked), about_(about) {}
  ~DumpFiles() override;
  DumpFiles(const DumpFiles&) = delete;
  DumpFiles& operator=(const DumpFiles&) = delete;
  void Begin() override;
  void WriteRow(const kernels::TensorInfo& tensor, bool reference, std::int64_t row,
                const void* elements) override;
  void WriteOracle(const kernels::TensorInfo& tensor, std::int64_t row, std::int64_t first,
                   const std::vector<double>& elements) override;
  void End() override;

 private:
  std::string PathOf(const std::string& file) const;
  void Write(const std::string& file, base::NpyType type, std::int64_t first, std::int64_t count,
             const void* elements);

  std::string folder_;
  const kernels::AttentionSpec& spec_;
  int world_size_;
  bool checked_;
  const nlohmann::json& about_;
  base::UniqueFd lock_;  // rank 0 locks the folder
  std::map<std::string, base::NpyWriter> files_;
};

}  // namespace cppool::attention_case
