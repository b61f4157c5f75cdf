#include "daemon/symbols.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

namespace cppool::daemon {
namespace {

constexpr std::size_t kLongestName = 160;

template <typename T>
bool ReadAt(std::ifstream& file, std::uint64_t offset, T* items, std::size_t count) {
  file.seekg(static_cast<std::streamoff>(offset));
  return static_cast<bool>(
      file.read(reinterpret_cast<char*>(items), static_cast<std::streamsize>(count * sizeof(T))));
}

// Makes "a::f" of "a::f(int) const".
std::string WithoutParameters(std::string name) {
  if (const auto clone = name.find(" [clone"); clone != std::string::npos) name.resize(clone);
  if (name.ends_with(" const")) name.resize(name.size() - 6);
  if (!name.ends_with(')')) return name;
  int depth = 0;
  for (std::size_t i = name.size(); i-- > 0;) {
    depth += name[i] == ')' ? 1 : name[i] == '(' ? -1 : 0;
    if (depth == 0) return i > 0 ? name.substr(0, i) : name;
  }
  return name;
}

std::string Readable(const char* symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> demangled(
      abi::__cxa_demangle(symbol, nullptr, nullptr, &status), &std::free);
  std::string name = status == 0 && demangled ? WithoutParameters(demangled.get()) : symbol;
  if (name.size() > kLongestName) name = name.substr(0, kLongestName) + "...";
  return name;
}

}  // namespace

SymbolLookup::File SymbolLookup::Read(const std::string& path, const void* loaded_at) {
  File result;
  std::ifstream file(path, std::ios::binary);
  ElfW(Ehdr) header;
  // A file that has been replaced since has other functions at these addresses.
  if (!file || !ReadAt(file, 0, &header, 1) || std::memcmp(&header, loaded_at, sizeof(header)) != 0)
    return result;
  std::vector<ElfW(Shdr)> sections(header.e_shnum);
  if (header.e_shentsize != sizeof(ElfW(Shdr)) ||
      !ReadAt(file, header.e_shoff, sections.data(), sections.size()))
    return result;
  for (const ElfW(Word) type : {SHT_SYMTAB, SHT_DYNSYM}) {  // a stripped file has only the second
    for (const auto& section : sections) {
      if (section.sh_type != type || section.sh_link >= sections.size()) continue;
      const auto& strings = sections[section.sh_link];
      std::vector<ElfW(Sym)> symbols(section.sh_size / sizeof(ElfW(Sym)));
      result.names.resize(strings.sh_size + 1);
      if (!ReadAt(file, section.sh_offset, symbols.data(), symbols.size()) ||
          !ReadAt(file, strings.sh_offset, result.names.data(), strings.sh_size))
        return {};
      for (const auto& symbol : symbols) {
        if ((symbol.st_info & 0xf) != STT_FUNC || symbol.st_shndx == SHN_UNDEF ||
            symbol.st_name >= strings.sh_size)
          continue;
        result.functions.push_back({symbol.st_value, symbol.st_value + symbol.st_size, symbol.st_name});
      }
    }
    if (!result.functions.empty()) break;
  }
  std::ranges::sort(result.functions, [](const Function& a, const Function& b) { return a.begin < b.begin; });
  return result;
}

std::string SymbolLookup::Describe(std::uintptr_t address) {
  Dl_info info{};
  link_map* map = nullptr;
  char hex[32];
  std::snprintf(hex, sizeof(hex), "0x%llx", static_cast<unsigned long long>(address));
  if (!dladdr1(reinterpret_cast<void*>(address), &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) ||
      !map)
    return hex;
  const bool program = !map->l_name || !*map->l_name;
  const auto known = files_.find(info.dli_fbase);
  const File& file = known != files_.end() ? known->second
                                           : files_[info.dli_fbase] = Read(
                                                 program ? "/proc/self/exe" : map->l_name, info.dli_fbase);
  const std::string path = program ? program_invocation_short_name : map->l_name;
  const std::string module = path.substr(path.rfind('/') + 1);
  const std::uintptr_t at = address - map->l_addr;
  auto after = std::upper_bound(file.functions.begin(), file.functions.end(), at,
                                [](std::uintptr_t value, const Function& f) { return value < f.begin; });
  if (after != file.functions.begin() && at < std::prev(after)->end)
    return Readable(file.names.data() + std::prev(after)->name) + (program ? "" : " [" + module + "]");
  std::snprintf(hex, sizeof(hex), "+0x%llx", static_cast<unsigned long long>(at));
  return module + hex;
}

}  // namespace cppool::daemon
