// The cases of a daemon: the built-in ones and those of `--case` files.
#pragma once

#include <cppool/case.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "protocol/parameters.h"

namespace cppool::daemon {

struct RegisteredCase {
  const cppool_case* definition = nullptr;
  std::string name;
  std::string doc;
  std::vector<protocol::ParameterSpec> schema;
  std::string source;          // "built in", or the file
  std::uint32_t features = 0;  // CPPOOL_CASE_DUMPS, ...
};

class CaseRegistry {
 public:
  // Checks the ABI, the name, its being new, and the parameters (each default must be what the schema itself allows).
  // `source` is for messages. Throws StartError. The definition must outlive the registry.
  void Add(const cppool_case* definition, const std::string& source);

  // Opens a shared library and adds what its `cppool_cases` lists. It stays open for good: its threads and handlers may. Throws StartError.
  void LoadFile(const std::string& path);

  const RegisteredCase* Find(const std::string& name) const;  // null: there is none
  std::vector<std::string> Names() const;
  const std::map<std::string, RegisteredCase>& all() const { return cases_; }

 private:
  std::map<std::string, RegisteredCase> cases_;
};

// Throws StartError naming the parameter.
protocol::ParameterSpec ToParameterSpec(const cppool_parameter& parameter);

}  // namespace cppool::daemon
