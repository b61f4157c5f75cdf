// Parameters by name and type, as cases read them through the C interface. A wrong name or type is a bug of
// the case, kept in misuse().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "protocol/parameters.h"

namespace cppool::daemon {

class ParameterReader {
 public:
  // Both must outlive the reader. The texts that it returns live as long as `params`.
  ParameterReader(const protocol::Json& params, const std::vector<protocol::ParameterSpec>& schema);

  std::int64_t Integer(const char* name);  // a number above 2^63 - 1 keeps its bits
  double Number(const char* name);
  bool Boolean(const char* name);
  const char* String(const char* name);  // null for a null parameter

  const std::string& misuse() const { return misuse_; }  // empty: none

 private:
  const protocol::Json* Find(const char* name, protocol::ParameterType type);

  const protocol::Json& params_;
  const std::vector<protocol::ParameterSpec>& schema_;
  std::string misuse_;
};

}  // namespace cppool::daemon
