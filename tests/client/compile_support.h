// Sources with a case, compilers that are not, and what is asked of both.
#pragma once

#include <cppool/compile.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>

#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {

namespace fs = std::filesystem;

// A case that passes, with the doc line "version N".
inline constexpr const char* kCase =
    "#include <cppool/case.h>\n#include \"version.h\"\n"
    R"(static cppool_status Run(cppool_case_context* c) {
  cppool_check check = {"sum", "closed form", 0, 0, 0, 1, 0};
  c->check(c, &check);
  return CPPOOL_OK;
}
static const cppool_case kMine = {CPPOOL_CASE_ABI, sizeof(cppool_case), "mine", VERSION, NULL, 0, NULL, Run, 0};
extern
#ifdef __cplusplus
"C"
#endif
const cppool_case* const* cppool_cases(void) {
  static const cppool_case* const cases[] = {&kMine, NULL};
  return cases;
}
)";

inline void Write(const fs::path& path, const std::string& text) { WriteFile(path.string(), text); }

inline void WriteProgram(const fs::path& path, const std::string& text) {
  Write(path, "#!/bin/sh\n" + text);
  fs::permissions(path, fs::perms::owner_all);
}

inline std::string Refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const CompileError& error) {
    return error.what();
  }
  return "";
}

// A folder with a case, a header of it, and a cache; the environment names no compiler and no flags.
struct Sources {
  TemporaryFolder folder;
  Environment cache{"CPPOOL_CACHE", folder.File("cache")};
  Environment daemon{"CPPOOL_DAEMON", CPPOOL_TEST_DAEMON};
  Environment cxx{"CXX", ""}, cc{"CC", ""}, cudacxx{"CUDACXX", ""};
  Environment flags{"CXXFLAGS", ""}, c_flags{"CFLAGS", ""}, cuda_flags{"CUDAFLAGS", ""},
      link_flags{"LDFLAGS", ""};

  explicit Sources(const std::string& name = "mine.cpp") {
    Write(folder / name, kCase);
    SetVersion("version 1");
  }
  void SetVersion(const std::string& text) const {
    Write(folder / "version.h", "#define VERSION \"" + text + "\"\n");
  }
};

// The library that `first` becomes, which `next` replaces when the function that begins with `function` is
// called first, as a build does that ends while a run is under way.
inline std::string Rebuilt(const Sources& sources, const std::string& first, const std::string& function,
                           const std::string& next) {
  const std::string file = sources.folder.File("rebuilt.so");
  Write(sources.folder / "first.c",
        "#include <stdio.h>\n" +
            Replaced(first, function, function + "\n  rename(\"" + file + ".next\", \"" + file + "\");"));
  Write(sources.folder / "next.c", next);
  for (const auto& [source, library] : {std::pair("first.c", file), std::pair("next.c", file + ".next")})
    fs::copy_file(Compile(sources.folder.File(source)).library, library,
                  fs::copy_options::overwrite_existing);
  return file;
}

inline constexpr const char* kRun = "Run(cppool_case_context* c) {";

// The case with a stage and a parameter `n`; 2 ends the daemon.
inline std::string CaseWithStage() {
  const std::string with_parameter =
      Replaced(kCase, "VERSION, NULL, 0,",
               "VERSION, (cppool_parameter[]){{\"n\", CPPOOL_TYPE_INTEGER, \"1\", NULL, 0, 0, 0, \"\"}}, 1,");
  return "#include <stdlib.h>\n" +
         Replaced(with_parameter, "  cppool_check check",
                  "  if (c->integer(c, \"n\") == 2) abort();\n"
                  "  while (c->next_iteration(c))\n"
                  "    c->runtime->mark(c->runtime, c->runtime->stream, \"work\");\n"
                  "  cppool_check check");
}

inline std::string Failing(const std::string& text) {
  return Replaced(text, "0, 0, 0, 1, 0};", "0, 0, 0, 0, 0};");
}

}  // namespace cppool::test
