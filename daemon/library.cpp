#include "daemon/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/statvfs.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/digest.h"
#include "kernels/float_environment.h"

namespace cppool::daemon {
namespace {

std::string MachineName(unsigned machine) {
  switch (machine) {
    case EM_386:
      return "32-bit x86";
    case EM_X86_64:
      return "x86-64";
    case EM_AARCH64:
      return "aarch64";
    case EM_PPC64:
      return "ppc64";
    case EM_RISCV:
      return "RISC-V";
    default:
      return "machine " + std::to_string(machine);
  }
}

ElfW(Ehdr) OwnHeader() {
  ElfW(Ehdr) header{};
  std::ifstream("/proc/self/exe", std::ios::binary).read(reinterpret_cast<char*>(&header), sizeof(header));
  return header;
}

// Whether `count` entries of `size` bytes from `offset` on lie within the file.
bool Within(std::string_view bytes, std::uint64_t offset, std::uint64_t size, std::uint64_t count) {
  return offset <= bytes.size() && size * count <= bytes.size() - offset;
}

bool IsWhole(std::string_view bytes, const ElfW(Ehdr) & header) {
  if (!Within(bytes, header.e_phoff, header.e_phentsize, header.e_phnum)) return false;
  if (!Within(bytes, header.e_shoff, header.e_shentsize, header.e_shnum)) return false;
  if (header.e_phentsize != sizeof(ElfW(Phdr))) return true;  // dlopen says what is wrong with it
  for (unsigned i = 0; i < header.e_phnum; ++i) {
    ElfW(Phdr) segment;
    std::memcpy(&segment, bytes.data() + header.e_phoff + i * sizeof(segment), sizeof(segment));
    if (!Within(bytes, segment.p_offset, segment.p_filesz, 1)) return false;
  }
  return true;
}

// What is wrong with a file that is not in the format of libraries.
std::string NoElf(const std::string& path, std::string_view bytes) {
  const auto ends = [&](const char* end) { return path.ends_with(end); };
  if (ends(".cu") || ends(".cpp") || ends(".cc") || ends(".cxx") || ends(".c"))
    return "is a source, and a daemon takes libraries only: `cppool run` compiles sources of --kernels and "
           "--load";
  if (bytes.empty()) return "is empty: wait until it has been built, and try again";
  if (bytes.starts_with("!<arch>\n")) return "is a static library: link its objects with -shared";
  return "is no shared library: link one with -shared";
}

std::string Replaced(std::string text, const std::string& part, const std::string& by) {
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + by.size()))
    text.replace(at, part.size(), by);
  return text;
}

// What to do about an error of dlopen: of the library itself, or of one that it needs.
std::string Advice(const std::string& error, bool of_itself, bool is_copy) {
  const auto has = [&](const char* part) { return error.find(part) != std::string::npos; };
  if (has("undefined symbol")) return ": link the library that has it, or define it";
  if (has("not found (required by")) return ": build it on this machine, or for an older system";
  if (has("position-independent executable")) return ": link it with -shared";
  if (has("cannot open shared object file") && !of_itself)
    return is_copy ? ": it needs this library; install it, or link with an absolute -Wl,-rpath to its folder "
                     "($ORIGIN "
                     "is the folder of a copy)"
                   : ": it needs this library; install it, or add its folder to LD_LIBRARY_PATH";
  return "";
}

}  // namespace

void CheckElf(const std::string& path, std::string_view bytes) {
  const auto refuse = [&](const std::string& why) { throw LibraryError(path + ": " + why); };
  ElfW(Ehdr) header{};
  if (bytes.size() < SELFMAG || std::memcmp(bytes.data(), ELFMAG, SELFMAG) != 0) refuse(NoElf(path, bytes));
  const char* const cut = "is cut off: wait until it has been built, and try again";
  if (bytes.size() < sizeof(header)) refuse(cut);
  std::memcpy(&header, bytes.data(), sizeof(header));
  static const ElfW(Ehdr) own = OwnHeader();
  // A file for 32 bits has its class and machine at the same offsets.
  if (header.e_ident[EI_CLASS] != own.e_ident[EI_CLASS] || header.e_ident[EI_DATA] != own.e_ident[EI_DATA] ||
      header.e_machine != own.e_machine)
    refuse("is for " + MachineName(header.e_machine) + ", and this machine is " + MachineName(own.e_machine) +
           ": build it here");
  if (header.e_type == ET_REL) refuse("is an object file: link it with -shared");
  if (header.e_type != ET_DYN) refuse("is no shared library: link it with -shared");
  if (!IsWhole(bytes, header)) refuse(cut);
}

std::string LibraryDigest(const std::string& path, std::string_view bytes) {
  CheckElf(path, bytes);
  return base::Digest(bytes);
}

void* OpenLibrary(const std::string& file, const std::string& path) {
  // An absolute path: dlopen searches the system's folders for a plain name.
  std::error_code ignored;
  const std::string absolute = std::filesystem::absolute(file, ignored).string();
  const kernels::FloatEnvironment kept;
  if (void* library = dlopen(absolute.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  const char* reason = dlerror();
  const std::string error = Replaced(reason ? reason : "dlopen does not say why", absolute, path);
  struct statvfs system {};
  if (statvfs(absolute.c_str(), &system) == 0 && (system.f_flag & ST_NOEXEC) != 0)
    throw LibraryError(path + ": cannot be loaded from " + absolute +
                       ", which is on a file system mounted with noexec: set CPPOOL_CACHE to a folder on "
                       "another one");
  const auto prefix = path + ": ";
  const bool named = error.starts_with(prefix);
  // An error that begins with this file's name is its own; any other is that of a library that it needs.
  const std::string what = named ? error.substr(prefix.size()) : error;
  throw LibraryError(prefix + "cannot be loaded: " + what + Advice(what, named, file != path));
}

void* FindEntry(void* library, const std::string& path, const std::string& name, const std::string& header) {
  if (void* entry = dlsym(library, name.c_str())) return entry;
  throw LibraryError(path + ": exports no function " + name +
                     ": declare it extern \"C\" and with default visibility (see " + header + ")");
}

}  // namespace cppool::daemon
