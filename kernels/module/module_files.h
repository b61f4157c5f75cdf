// Where the modules that come with cppool are looked for.
#pragma once

#include <string>
#include <vector>

namespace cppool::kernels {

// The places of a module such as "libcppool_cuda.so", the preferred one first: beside the program, in
// `../lib` from there, and the plain name, for the dynamic linker's path. `variable`: an environment variable
// that names the one file instead.
std::vector<std::string> ModuleFiles(const char* file, const char* variable);

}  // namespace cppool::kernels
