// The libraries that a program or library needs from the dynamic linker, and the symbols that it imports.
#pragma once

#include <elf.h>

#include <cstring>
#include <set>
#include <string>

#include "tests/files.h"

namespace cppool::test {

struct Imports {
  std::set<std::string> libraries, symbols;
};

// Reads the section headers of a 64-bit ELF file for this machine; empty for any other file.
inline Imports ReadImports(const std::string& name) {
  const std::string bytes = ReadFile(name);
  Imports imports;
  auto read = [&](std::size_t at, auto* value) {
    if (at + sizeof *value > bytes.size()) return false;
    std::memcpy(value, bytes.data() + at, sizeof *value);
    return true;
  };
  auto text = [&](std::size_t at) { return at < bytes.size() ? std::string(bytes.c_str() + at) : ""; };
  Elf64_Ehdr header;
  if (!read(0, &header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return imports;
  for (unsigned i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section, strings;
    if (!read(header.e_shoff + i * sizeof section, &section)) return imports;
    if (section.sh_type != SHT_DYNAMIC && section.sh_type != SHT_DYNSYM) continue;
    if (!read(header.e_shoff + section.sh_link * sizeof strings, &strings)) return imports;
    for (std::size_t at = section.sh_offset; at < section.sh_offset + section.sh_size;
         at += section.sh_entsize) {
      Elf64_Dyn entry;
      Elf64_Sym symbol;
      if (section.sh_type == SHT_DYNAMIC) {
        if (read(at, &entry) && entry.d_tag == DT_NEEDED)
          imports.libraries.insert(text(strings.sh_offset + entry.d_un.d_val));
      } else if (read(at, &symbol) && symbol.st_shndx == SHN_UNDEF) {
        imports.symbols.insert(text(strings.sh_offset + symbol.st_name));
      }
    }
  }
  return imports;
}

}  // namespace cppool::test
