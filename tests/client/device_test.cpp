// Devices: the client loads no CUDA, runs nvidia-smi, and reads lists of devices as CUDA does.
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "tests/child.h"
#include "tests/client/command_support.h"
#include "tests/client/elf.h"
#include "tests/environment.h"

using namespace cppool::test;
using cppool::Json;
using cppool::Pool;
using cppool::test::Environment;

namespace {

std::vector<std::string> CudaIn(const std::string& maps) {
  std::vector<std::string> found;
  for (const std::string& line : Lines(ReadFile(maps)))
    for (const char* library : {"libcuda", "libnccl", "libnvidia", "/dev/nvidia"})
      if (line.find(library) != std::string::npos) found.push_back(line);
  return found;
}

FILE* StartHarness(int rounds, const std::string& devices, const std::string& world_sizes) {
  return StartChild(std::string("'") + CPPOOL_HARNESS + "' '" + CPPOOL_REAL_DAEMON + "' " +
                    std::to_string(rounds) + " " + devices + " " + world_sizes);
}

}  // namespace

#if !defined(CPPOOL_TEST_ASAN) && !defined(CPPOOL_TEST_TSAN)  // a sanitizer's runtime needs libdl

TEST_CASE("the command and a harness with the library do not link CUDA and cannot load it") {
  for (const char* program : {CPPOOL_COMMAND, CPPOOL_HARNESS}) {
    INFO(program);
    const Imports imports = ReadImports(program);
    CHECK(imports.symbols.count("posix_spawn") == 1);  // the imports were read
    for (const char* symbol : {"dlopen", "dlmopen", "dlsym", "dlvsym"})
      CHECK(imports.symbols.count(symbol) == 0);
    for (const std::string& library : imports.libraries) {
      INFO(library);
      const std::vector<std::string> plain = {"libstdc++.", "libm.",    "libgcc_s.",
                                              "libc.",      "ld-linux", "libpthread."};
      CHECK(std::any_of(plain.begin(), plain.end(),
                        [&](const std::string& name) { return library.rfind(name, 0) == 0; }));
    }
    const std::string bytes = ReadFile(program);
    for (const char* library : {"libcuda", "libcudart", "libnccl", "libnvidia"})
      CHECK_FALSE(Has(bytes, library));
  }
  CHECK(ReadImports(CPPOOL_REAL_DAEMON).symbols.count("dlopen") == 1);  // a program that does import dlopen
}

#endif

TEST_CASE("a daemon loads the CUDA driver, its harness does not") {
  cppool::PoolOptions options;
  options.daemon = CPPOOL_REAL_DAEMON;
  options.world_size = 1;
  options.environment = {{"LD_LIBRARY_PATH", CPPOOL_FAKE_DRIVER_DIR}, {"FAKE_CU_COUNT", "0"}};
  Pool pool(options);
  const Json hello = pool.Hello();
  CHECK(hello["backend"] == "host");  // the fake driver has no device
  CHECK(pool.Run({{"max_seqlen_q", 64}, {"max_seqlen_kv", 64}}).ok());
  CHECK_FALSE(CudaIn("/proc/" + hello["pid"].dump() + "/maps").empty());
  CHECK(CudaIn("/proc/self/maps").empty());
}

TEST_CASE("doctor runs nvidia-smi, and prints which of its devices CUDA sees") {
  TemporaryFolder folder;
  const std::string smi = folder.File("nvidia-smi");
  std::ofstream(smi)
      << "#!/bin/sh\n[ \"$*\" = -L ] || exit 9\n"
         "echo 'GPU 0: NVIDIA H200 (UUID: GPU-8932f937-d72c-4106-c12f-20bd9faed9f6)'\n"
         "echo 'GPU 1: NVIDIA H200 (UUID: GPU-8932a000-d72c-4106-c12f-20bd9faed9f6)'\n"
         "echo '  MIG 1g.18gb     Device  0: (UUID: MIG-11111111-d72c-4106-c12f-20bd9faed9f6)'\n"
         "echo 'GPU 2: NVIDIA H200 (UUID: GPU-22222222-d72c-4106-c12f-20bd9faed9f6)'\n";
  chmod(smi.c_str(), 0755);
  const Environment path("PATH", smi.substr(0, smi.rfind('/')) + ":" + getenv("PATH"));
  struct Form {
    std::string list, seen, shown;
  };
  const std::vector<Form> forms = {
      {"0,1", "of these CUDA sees 0, 1\n", "'0,1'\n"},
      {"2, 0", "of these CUDA sees 2, 0\n", "'2, 0'\n"},
      {"0,2,-1,1", "of these CUDA sees 0, 2\n", "'0,2,-1,1': CUDA stops at '-1'\n"},
      {"GPU-2,GPU-8932f", "of these CUDA sees 2, 0\n", "'GPU-2,GPU-8932f'\n"},
      {"GPU-8932", "of these CUDA sees none\n", "'GPU-8932'\n"},
      {"1,3,0", "of these CUDA sees 1\n", "'1,3,0'\n"},
      {"1,1", "of these CUDA sees none\n", "'1,1': it names a device twice, with which CUDA sees none\n"},
      {"-1", "of these CUDA sees none\n", "'-1': CUDA stops at '-1'\n"},
      {"all", "of these CUDA sees none\n", "'all': CUDA stops at 'all'\n"},
      {"", "of these CUDA sees none\n", "'': it is empty, so that CUDA sees none\n"},
      {"MIG-1", "GPU 2: NVIDIA H200", "'MIG-1'\n"},
  };
  for (const Form& form : forms) {
    INFO(form.list);
    Ran ran = Cppool({"doctor", "--devices", form.list});
    INFO(ran.out);
    CHECK(ran.Prints("CUDA_VISIBLE_DEVICES: " + form.shown));
    CHECK(ran.Prints(form.seen));
    const Environment visible("CUDA_VISIBLE_DEVICES", form.list);
    CHECK(Cppool({"doctor"}).Prints("CUDA_VISIBLE_DEVICES: " + form.shown));
  }
  CHECK_FALSE(Cppool({"doctor", "--devices", "MIG-1"}).Prints("of these"));
  std::ofstream(smi) << "#!/bin/sh\nexit 9\n";
  CHECK(Cppool({"doctor"}).Prints("nvidia-smi exited with code 9"));
  CHECK(CudaIn("/proc/self/maps").empty());
}

TEST_CASE("doctor asks the daemon for its CUDA module, also one that a script starts") {
  TemporaryFolder folder;
  const std::string script = folder.File("cppoold"), real = CPPOOL_REAL_DAEMON;
  std::ofstream(script) << "#!/bin/sh\nexec '" << real << "' \"$@\"\n";
  chmod(script.c_str(), 0755);
  const std::string module = real.substr(0, real.rfind('/')) + "/../lib/libcppool_cuda.so";
  const bool built = access(module.c_str(), R_OK) == 0;
  CHECK(Cppool({"doctor", "--backend", "host"}, script)
            .Prints("CUDA module: " + (built ? module + "\n" : "the CUDA module was not found (searched: ")));
  const Environment named("CPPOOL_CUDA_MODULE", "/nowhere/module.so");
  CHECK(Cppool({"doctor", "--backend", "host"}, script)
            .Prints("CUDA module: the CUDA module was not found (searched: /nowhere/module.so)"));
}

TEST_CASE("a list of devices is passed to the daemon unchanged") {
  for (const char* list : {"1,0", "GPU-2,GPU-8932f", "-1", "", "nonsense"}) {
    INFO(list);
    Ran ran = Cppool({"run", "--devices", list, "--param", "do=echo", "--json"});
    CHECK(ran.code == 0);
    CHECK(ran.Prints("\"CUDA_VISIBLE_DEVICES\":\"" + std::string(list) + "\""));
  }
  CHECK(Cppool({"run", "--devices", "", "--param", "do=fail"}).Prints("--devices ''"));
}

TEST_CASE("two harnesses run at once with their own pools, and killing a third does not affect them") {
  FILE* const killed = StartHarness(1000000, "-", "1 2");
  int pid = 0;
  REQUIRE(fscanf(killed, "%d world size 1: passed", &pid) == 1);
  FILE* const first = StartHarness(6, "-", "1 2");
  FILE* const second = StartHarness(6, "-", "2 4");
  CHECK(kill(pid, SIGKILL) == 0);
  for (FILE* harness : {first, second}) {
    const Child output = FinishChild(harness);
    INFO(output.output);
    CHECK(output.exit_code == 0);
    CHECK(Has(output.output, "world size 2: passed"));
  }
  CHECK(FinishChild(killed).exit_code != 0);
}
