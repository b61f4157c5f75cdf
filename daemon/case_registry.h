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
  std::string source;          // "built in" or "--case FILE", for messages
  std::uint32_t features = 0;  // CPPOOL_CASE_DUMPS, ...
};

class CaseRegistry {
 public:
  // Checks the ABI, the name, that it is not taken, and the parameters: the schema must allow each default. Throws StartError.
  // The definition must outlive the registry.
  void Add(const cppool_case* definition, const std::string& source);

  // Opens a shared library and adds the cases that its `cppool_cases` lists. The library is never closed, since it may have started
  // threads or installed handlers. Throws StartError.
  void LoadFile(const std::string& path);

  const RegisteredCase* Find(const std::string& name) const;  // null: not found
  std::vector<std::string> Names() const;
  const std::map<std::string, RegisteredCase>& all() const { return cases_; }

 private:
  std::map<std::string, RegisteredCase> cases_;
};

// Throws StartError naming the parameter.
protocol::ParameterSpec ToParameterSpec(const cppool_parameter& parameter);

}  // namespace cppool::daemon
