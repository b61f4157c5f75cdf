// A shared library of a user: what is checked before it is opened, and how it is opened.
#pragma once

#include <string>
#include <string_view>

#include "kernels/attention/kernel_library.h"

namespace cppool::daemon {

using kernels::LibraryError;

// Throws LibraryError unless `bytes` are a whole shared library for this machine's processor. `path` is for
// the text.
void CheckElf(const std::string& path, std::string_view bytes);
std::string LibraryDigest(const std::string& path, std::string_view bytes);  // likewise

// Opens `file`, which is a copy of `path` or `path` itself, and never closes it: code that was registered
// with CUDA must stay, and the library may have started threads or installed handlers. Throws LibraryError.
void* OpenLibrary(const std::string& file, const std::string& path);

// The address of an exported function. Throws LibraryError when the library has none of this name; `header`
// says where it is declared.
void* FindEntry(void* library, const std::string& path, const std::string& name, const std::string& header);

}  // namespace cppool::daemon
