// Tests of the loader of the CUDA module: which module it accepts, and its errors.
#include <cppool/runtime.h>

#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "kernels/build_id.h"
#include "tests/catch.h"
#include "tests/child.h"

namespace {

using cppool::kernels::SeamId;

// The paths come from CMake; the probe prints "status N: text" for a RuntimeError.
std::string Count(const std::string& environment) {
  return cppool::test::RunChild("LD_LIBRARY_PATH=" CPPOOL_FAKE_DRIVER_DIR " " + environment +
                                " " CPPOOL_LOADER_PROBE " count")
      .output;
}

std::string Create(const std::string& module, const std::string& commit = "") {
  return cppool::test::RunChild("CPPOOL_CUDA_MODULE=" + module + " " CPPOOL_LOADER_PROBE " create " + commit)
      .output;
}

// Runs a script of cmake/ for the sources in `root` and returns the string that the generated function
// returns.
std::string Returned(const std::string& root, const std::string& script) {
  cppool::test::RunChild(CPPOOL_CMAKE " -DROOT=" + root + " -DOUTPUT=" + root +
                         "/id.cpp -P " CPPOOL_SOURCE_DIR "/cmake/" + script + ".cmake");
  std::ifstream file(root + "/id.cpp");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto begin = text.find("return \"") + 8;
  return text.substr(begin, text.find('"', begin) - begin);
}

// The build id of a copy of the sources.
std::string IdOf(const std::string& root) { return Returned(root, "seam_id"); }

// A temporary folder, removed at the end.
struct Folder {
  Folder() : path(cppool::test::RunChild("mktemp -d").output) { path.resize(path.find('\n')); }
  ~Folder() { cppool::test::RunChild("rm -rf '" + path + "'"); }
  std::string path;
};

void AddLine(const std::string& file) { std::ofstream(file, std::ios::app) << "// another line\n"; }

std::string Status(cppool_status status) { return "status " + std::to_string(status) + ": "; }

}  // namespace

TEST_CASE("CUDA devices: the driver's count is returned, and 0 without a device") {
  CHECK(Count("FAKE_CU_COUNT=3") == "3\n");
  CHECK(Count("FAKE_CU_COUNT=0") == "0\n");
  CHECK(Count("FAKE_CU_INIT=100 FAKE_CU_COUNT=3") == "0\n");  // CUDA_ERROR_NO_DEVICE
  CHECK(Count("FAKE_CU_INIT=34 FAKE_CU_COUNT=3") == "0\n");   // CUDA_ERROR_STUB_LIBRARY
  CHECK(Count("FAKE_CU_COUNT_RESULT=100 FAKE_CU_COUNT=3") == "0\n");
}

TEST_CASE("CUDA devices: a broken driver is an error, not a count of 0") {
  const std::string not_ready = Count("FAKE_CU_INIT=802");
  CHECK_THAT(not_ready, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
  CHECK_THAT(not_ready,
             Catch::Matchers::ContainsSubstring("cuInit returned CUDA_ERROR_SYSTEM_NOT_READY (802)"));
  CHECK_THAT(not_ready, Catch::Matchers::ContainsSubstring("fabricmanager"));
  CHECK_THAT(Count("FAKE_CU_INIT=999"), Catch::Matchers::ContainsSubstring("cuInit returned error 999"));
  CHECK_THAT(Count("FAKE_CU_COUNT_RESULT=304"),
             Catch::Matchers::ContainsSubstring("cuDeviceGetCount returned error 304"));
}

TEST_CASE("CUDA module: a missing module, another library and a module of another build are errors") {
  const std::string missing = Create("/nowhere/libcppool_cuda.so");
  CHECK_THAT(missing, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
  CHECK_THAT(missing,
             Catch::Matchers::ContainsSubstring("was not found (searched: /nowhere/libcppool_cuda.so)"));
  CHECK_THAT(missing, Catch::Matchers::ContainsSubstring("CPPOOL_CUDA=ON"));
  CHECK_THAT(Create(CPPOOL_FAKE_DRIVER_DIR "/libcuda.so.1"),
             Catch::Matchers::ContainsSubstring("not cppool's CUDA module"));
  const std::string broken = Create("/proc/self/maps");
  CHECK_THAT(broken, Catch::Matchers::ContainsSubstring("/proc/self/maps does not load: "));
  CHECK_THAT(broken, Catch::Matchers::ContainsSubstring("invalid ELF header"));
  for (const auto& [file, id] : {std::pair(CPPOOL_FAKE_MODULE_OTHER, "0123456789abcdef"),
                                 std::pair(CPPOOL_FAKE_MODULE_OLD, "0.1.0")}) {
    const std::string other = Create(file);
    CHECK_THAT(other, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
    CHECK_THAT(other, Catch::Matchers::ContainsSubstring(std::string(file) + " has the build id " + id +
                                                         ", this program " + SeamId() + ":"));
    CHECK_THAT(other, Catch::Matchers::ContainsSubstring("--target cppool_programs"));
  }
}

TEST_CASE("CUDA module: a module of another commit is refused if both commits are known") {
  const std::string seam = SeamId();
  const std::string other = Create(CPPOOL_FAKE_MODULE, "6985ccd0a1b2");
  CHECK_THAT(other, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
  CHECK_THAT(other, Catch::Matchers::ContainsSubstring(" has the build id " + seam + "-fake, this program " +
                                                       seam + "-6985ccd0a1b2:"));
  CHECK_THAT(Create(CPPOOL_FAKE_MODULE, "fake"), Catch::Matchers::StartsWith("fake of 3, peer"));
}

#ifdef CPPOOL_REAL_MODULE
TEST_CASE("CUDA module: a driver that is too old is named, with what would do") {
  const std::string old =
      cppool::test::RunChild("LD_LIBRARY_PATH=" CPPOOL_FAKE_DRIVER_DIR
                             " FAKE_CU_VERSION=9020 FAKE_CU_COUNT=3 CPPOOL_CUDA_MODULE=" CPPOOL_REAL_MODULE
                             " " CPPOOL_LOADER_PROBE " create")
          .output;
  CHECK_THAT(old, Catch::Matchers::StartsWith(Status(CPPOOL_CUDA)));
  CHECK_THAT(old, Catch::Matchers::ContainsSubstring(
                      "the NVIDIA driver is for CUDA 9.2, and this CUDA module was built with CUDA "));
  CHECK_THAT(old, Catch::Matchers::ContainsSubstring(": install a driver for CUDA "));
}
#endif

TEST_CASE(
    "the build id depends only on the headers of the module interface and the headers that they include") {
  const Folder folder;
  const std::string& root = folder.path;
  cppool::test::RunChild("cp -r " CPPOOL_SOURCE_DIR "/kernels " + root + "/kernels");
  std::string id = IdOf(root);
  CHECK(id == SeamId());  // it does not depend on the path of the sources
  CHECK(id.size() == 16);
  CHECK(IdOf(root) == id);
  for (const char* other : {"/kernels/module/module_files.h", "/kernels/module/cuda_module.cpp"}) {
    AddLine(root + other);
    CHECK(IdOf(root) == id);
  }
  for (const char* header : {"/kernels/module/cuda_module.h", "/kernels/include/kernels/backend.h",
                             "/kernels/include/cppool/runtime.h"}) {
    AddLine(root + header);
    CHECK(IdOf(root) != id);
    id = IdOf(root);
  }
  // Another header is part of the id as soon as one of these headers includes it.
  std::ofstream(root + "/kernels/include/kernels/backend.h", std::ios::app)
      << "#include \"kernels/module/module_files.h\"\n";
  id = IdOf(root);
  AddLine(root + "/kernels/module/module_files.h");
  CHECK(IdOf(root) != id);
}

TEST_CASE("the commit is that of the project's own repository, and empty without one") {
  if (cppool::test::RunChild("git --version").exit_code != 0) return;
  const Folder folder;
  const std::string inner = folder.path + "/archive";
  const std::string git = "git -C " + folder.path + " -c user.name=x -c user.email=x ";
  cppool::test::RunChild("mkdir " + inner);
  CHECK(Returned(folder.path, "commit").empty());
  cppool::test::RunChild(git + "init");
  CHECK(Returned(folder.path, "commit").empty());  // the repository has no commit yet
  REQUIRE(cppool::test::RunChild(git + "commit --allow-empty -m x").exit_code == 0);
  const std::string commit = Returned(folder.path, "commit");
  CHECK(commit.size() == 12);
  CHECK(cppool::test::RunChild(git + "rev-parse HEAD").output.rfind(commit, 0) == 0);
  CHECK(Returned(inner, "commit").empty());  // the sources are inside another project's repository
}

TEST_CASE("CUDA module: a module of the same build provides the backend and its kernels") {
  CHECK(Create(CPPOOL_FAKE_MODULE) ==
        "fake of 3, peer\n" + Status(CPPOOL_UNSUPPORTED) + "fake rank\n" + Status(CPPOOL_UNSUPPORTED) +
            "fake families\n" + Status(CPPOOL_UNSUPPORTED) + "fake tensor operations\n" +
            Status(CPPOOL_UNSUPPORTED) + "fake checks\n" + Status(CPPOOL_INTERNAL) +
            "no kernels for the backend abacus\nthe host's own\n");
}
