// The cases of a daemon: the built-in ones, those of `--case` files, and those of the libraries that a
// request names.
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
  std::string source;          // "built in", "--case FILE" or a file, for messages
  std::string library;         // the file that it is from; empty: built in
  std::uint32_t features = 0;  // CPPOOL_CASE_DUMPS, ...
};

class CaseRegistry {
 public:
  // Checks the ABI, the name, that it is not taken, and the parameters: the schema must allow each default.
  // Throws StartError. The definition must outlive the registry.
  void Add(const cppool_case* definition, const std::string& source, const std::string& library = "");

  // Adds the cases that `cppool_cases` of a library lists, which was opened from `path` or from a copy of it.
  // Throws LibraryError when there is no such function, and StartError for what Add refuses.
  void AddLibrary(void* library, const std::string& path, const std::string& source);

  // These cases and those of `others`. Where both have a name, this registry's case counts; a built-in case
  // cannot be replaced: throws StartError.
  CaseRegistry With(const CaseRegistry& others) const;

  const RegisteredCase* Find(const std::string& name) const;  // null: not found
  std::vector<std::string> Names() const;
  const std::map<std::string, RegisteredCase>& all() const { return cases_; }

 private:
  std::map<std::string, RegisteredCase> cases_;
};

// Converts a case's parameter. Throws StartError naming it.
protocol::ParameterSpec ToParameterSpec(const cppool_parameter& parameter);

}  // namespace cppool::daemon
