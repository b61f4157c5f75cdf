// What a compiled library is kept by: every file and setting that decides over it, also while they change,
// under any name.
#include <cppool/compile.h>

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "tests/catch.h"
#include "tests/child.h"
#include "tests/client/compile_support.h"

namespace cppool::test {
namespace {

// A compiler whose library has the bytes of the source and of $HEADER. It names $HEADER among the
// dependencies, keeps its arguments in a file, and then runs $MEANWHILE.
constexpr const char* kCopier = R"(if [ "$1" = --version ]; then echo fake; exit 0; fi
echo "$@" > "$(dirname "$0")/arguments"
while [ $# -gt 0 ]; do
  case "$1" in -o) library=$2;; -MF) list=$2;; *-copy.*) copy=$1;; esac
  shift
done
cat "$copy" "$HEADER" > "$library"
echo "x: $copy $HEADER" > "$list"
eval "$MEANWHILE"
)";

struct Copied : Sources {
  std::string source = folder.File("mine.cpp"), header = folder.File("header.h");
  Environment dependency{"HEADER", header};
  Environment compiler{"CXX", folder.File("copier")};
  Copied() {
    WriteProgram(folder / "copier", kCopier);
    Write(header, "header 1");
  }
  // The text of the library; "cached " in front when the compiler was not run.
  std::string Library(const CompileOptions& options = {}) const {
    const Compiled compiled = Compile(source, options);
    return (compiled.cached ? "cached " : "") + ReadFile(compiled.library);
  }
};

bool Compiles(const std::string& source) { return !Compile(source).cached; }

}  // namespace

TEST_CASE("an included FIFO is refused, since its content would not be known again") {
  const Copied copied;
  const std::string fifo = copied.folder.File("fifo");
  REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
  const Environment header("HEADER", fifo);
  std::thread writer([&] { Write(fifo, "header 1"); });  // it waits for the copier, which reads once
  const std::string refusal = Refusal([&] { Compile(copied.source); });
  writer.join();
  CHECK(refusal == fifo + ": is included and no regular file: write what it gives to one");
}

TEST_CASE("an included device has no content") {
  const Sources sources;
  const Environment flags("CXXFLAGS", "-include /dev/null");
  const std::string source = sources.folder.File("mine.cpp");
  CHECK(Compiles(source));
  CHECK_FALSE(Compiles(source));
  const Copied copied;
  const Environment missing("HEADER", copied.folder.File("missing.h"));
  CHECK(Has(Refusal([&] { Compile(copied.source); }), "missing.h"));
}

TEST_CASE(
    "a header that is saved while the compiler runs: it is compiled again, and nothing of before is kept") {
  for (const char* text :
       {"#include \"header.h\"", "#include HEADER"}) {  // known before, and only when it was read
    INFO(text);
    const Copied copied;
    Write(copied.source, text);
    {
      const Environment once(
          "MEANWHILE", "[ -e \"$HEADER.once\" ] || { : > \"$HEADER.once\"; echo header 2 > \"$HEADER\"; }");
      CHECK(Has(copied.Library(), "header 2"));
    }
    const Environment nothing("MEANWHILE", "");
    Write(copied.header, "header 1");
    const std::string before = copied.Library();
    CHECK(Has(before, "header 1"));
    CHECK_FALSE(Has(before, "cached"));
    const Environment always("MEANWHILE", "echo >> \"$HEADER\"");
    Write(copied.header, "header 3");
    CHECK(Has(Refusal([&] { copied.Library(); }),
              copied.source + ": " + copied.header +
                  " changed each of the 3 times that it was compiled: try again"));
    Write(copied.header, "header 3\n");
    const Environment nothing_again("MEANWHILE", "");
    CHECK_FALSE(Has(copied.Library(), "cached"));
  }
}

TEST_CASE("a source that is saved before the compiler reads it: what is kept is of the text that names it") {
  const Copied copied;
  Write(copied.source, "source 1");
  CompileOptions options;
  options.on_command = [&](std::string_view) { Write(copied.source, "source 2"); };
  copied.Library(options);
  CHECK(Has(copied.Library(), "source 2"));
  Write(copied.source, "source 1");
  CHECK(Has(copied.Library(), "source 1"));
}

TEST_CASE("a library is kept by its flags, the variables of compilers and the files that flags name") {
  const Copied copied;
  const TemporaryFolder& folder = copied.folder;
  Write(folder / "words", "-L" + folder.path().string() + " -lown -DFROM_FILE");
  Write(folder / "libown.a", "own 1");
  Write(folder / "map", "map 1");
  const Environment own(
      "LDFLAGS", "@" + folder.File("words") + " -Wl,--version-script=" + folder.File("map") + " -lmine");
  const Environment libraries("LIBRARY_PATH", folder.path().string());
  CHECK(Compiles(copied.source));
  CHECK(Has(ReadFile(folder.File("arguments")),
            "/mine-copy.cpp @" + folder.File("words")));  // $LDFLAGS after the source
  CHECK_FALSE(Compiles(copied.source));
  for (const auto& [file, text] : {std::pair("words", "-L. -DOTHER"), std::pair("libown.a", "own 2"),
                                   std::pair("map", "map 2"), std::pair("libmine.a", "mine 1")}) {
    INFO(file);
    if (std::string(file) == "words") {
      const std::string words = ReadFile(folder.File(file));
      Write(folder / file, text);
      CHECK(Compiles(copied.source));
      Write(folder / file, words);
    } else {
      Write(folder / file, text);
      CHECK(Compiles(copied.source));
    }
    CHECK_FALSE(Compiles(copied.source));
  }
  for (const char* name : {"CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH",
                           "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS", "NVCC_CCBIN"}) {
    INFO(name);
    const Environment set(name, "/other");
    CHECK(Compiles(copied.source));
  }
}

TEST_CASE("a static library of LDFLAGS is linked, and a header of -isystem counts") {
  const Sources sources("mine.c");
  const TemporaryFolder& folder = sources.folder;
  const std::string source = folder.File("mine.c");
  fs::create_directory(folder / "system");
  const auto make = [&](const std::string& header, const std::string& own) {
    Write(folder / "system/system.h", "#define SYSTEM \"" + header + "\"\n");
    Write(folder / "own.c", "const char* Own(void) { return \"" + own + "\"; }\n");
    const Child made =
        RunChild("cd '" + folder.path().string() + "' && cc -c -fPIC own.c && ar rcs libown.a own.o");
    INFO(made.output);
    REQUIRE(made.exit_code == 0);
  };
  Write(source,
        "#include <system.h>\nconst char* Own(void);\nconst char* Mine(void) { return *Own() ? SYSTEM : 0; "
        "}\n");
  const Environment flags("CFLAGS", "-isystem " + folder.File("system"));
  const Environment link("LDFLAGS", "-L" + folder.path().string() + " -lown");
  const auto library = [&] {
    const Compiled compiled = Compile(source);
    return (compiled.cached ? "cached " : "") + ReadFile(compiled.library);
  };
  for (const auto& [header, own] :
       {std::pair("system 1", "own 1"), std::pair("system 2", "own 1"), std::pair("system 2", "own 2")}) {
    make(header, own);
    const std::string made = library();
    CHECK_FALSE(made.starts_with("cached"));
    CHECK(Has(made, header));
    CHECK(Has(made, own));
    CHECK(library().starts_with("cached"));
  }
}

namespace {

// A source whose name and folder mean something to a shell, to make, to C or to nvcc, with a header beside it
// that only it finds.
std::string OddSource(const TemporaryFolder& folder, const std::string& ending, const std::string& name) {
  const fs::path odd = folder / "a,b \t\n$(touch pwned)\"'\\\xe5\xad\x97";
  fs::create_directory(odd);
  Write(odd / "own.h", "#define OWN \"of own.h\"\n");
  Write(odd / "string.h", "#error found in place of the system's\n");
  const std::string source = (odd / (name + ending)).string();
  Write(source,
        "#include \"own.h\"\n#include <string.h>\nextern\n#ifdef __cplusplus\n\"C\"\n#endif\nconst char* "
        "Mine(void);\n"
        "const char* Mine(void) { return OWN __FILE__; }\n");
  return source;
}

void CheckOddSource(const std::string& source) {
  const Compiled compiled = Compile(source);
  INFO(compiled.command << "\n" << compiled.output);
  CHECK(Has(ReadFile(compiled.library), "of own.h" + source));
  const std::string header = (fs::path(source).parent_path() / "own.h").string();
  CHECK(std::count(compiled.included.begin(), compiled.included.end(), header) == 1);
  CHECK(std::count(compiled.included.begin(), compiled.included.end(), source) == 0);
  CHECK(fs::path(compiled.library)
            .filename()
            .string()
            .find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-") ==
        std::string::npos);
  CHECK(Compile(source).cached);
  CHECK_FALSE(fs::exists("pwned"));
}

std::string LongName() {
  std::string name;
  while (name.size() < 240) name += "\xe9\x95\xb7";
  return name;
}

}  // namespace

TEST_CASE("a source may have any name, and so may its folder") {
  const Sources sources;
  for (const std::string& name :
       {std::string("$(touch pwned)"), std::string("a,b\t\n\"'\\ \xe5\xad\x97"), LongName()}) {
    INFO(name);
    const TemporaryFolder folder;
    CheckOddSource(OddSource(folder, ".c", name));
  }
  const TemporaryFolder folder;
  const std::string source = OddSource(folder, ".c", "a b");
  Write(source, "\n#error here\n");
  const std::string refusal = Refusal([&] { Compile(source); });
  INFO(refusal);
  CHECK(Has(refusal, "a b.c:2:2: error: #error here"));
}

TEST_CASE("nvcc compiles a source with any name") {
  const Sources sources;
  const TemporaryFolder folder;
  const std::string source = OddSource(folder, ".cu", "$(touch pwned)" + LongName().substr(0, 210));
  try {
    CheckOddSource(source);
  } catch (const CompileError& error) {
    if (!Has(error.what(), "there is no compiler")) throw;
    WARN("not tested here: " << error.what());
  }
}

}  // namespace cppool::test
