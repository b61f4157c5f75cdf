// Names of functions by address, also of static ones, from the symbol tables of this process's program and
// libraries.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace cppool::daemon {

class SymbolLookup {
 public:
  // "(anonymous namespace)::Run [libmy_cases.so]", without parameters; "libcuda.so.1+0x1234" where no name is
  // known. Its length is bounded. Reads files, and caches their tables.
  std::string Describe(std::uintptr_t address);

 private:
  struct Function {
    std::uintptr_t begin, end;
    std::uint32_t name;  // in `names`
  };
  struct File {
    std::vector<Function> functions;  // by address
    std::vector<char> names;
  };
  static File Read(const std::string& path, const void* loaded_at);
  std::map<const void*, File> files_;  // by where they are loaded
};

}  // namespace cppool::daemon
