// Requests for kernels that cannot be had: each is answered with what is wrong, and the daemon goes on.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/catch.h"
#include "tests/end_to_end/daemon_process.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

std::string Odd(const std::string& name) {
  return CPPOOL_ODD_KERNELS "/libcppool_test_kernel_" + name + ".so";
}

}  // namespace

TEST_CASE("kernels that cannot be had are an error that names the file and what to do") {
  namespace fs = std::filesystem;
  DaemonProcess daemon(Host(1));
  const auto error = [&](const std::string& kernels, const char* kind = "invalid_request") {
    const Json answer = daemon.Ask({{"op", "run"}, {"kernels", kernels}});
    INFO(answer);
    CHECK(answer.at("failure").at("kind") == kind);
    CHECK_FALSE(answer.contains("fatal"));
    return answer.at("error").get<std::string>();
  };
  CHECK_THAT(error("/nonexistent.so"),
             ContainsSubstring("/nonexistent.so: there is no such file: check the path"));
  CHECK_THAT(error("/"), ContainsSubstring("/: is a folder: name a file"));
  CHECK_THAT(error("/dev/zero"), ContainsSubstring("/dev/zero: is no regular file"));
  CHECK_THAT(error(Odd("none")),
             ContainsSubstring("it exports no function cppool_attention: declare it extern"));
  CHECK_THAT(error(Odd("abi")), ContainsSubstring("version 77 of cppool/attention.h"));
  CHECK_THAT(error(Odd("missing")), ContainsSubstring("kernel odd has no function forward"));
  CHECK_THAT(error(Odd("backend")), ContainsSubstring("must be \"cuda\" or \"host\", not \"tpu\""));
  CHECK_THAT(error(Odd("features")), ContainsSubstring("features that this cppool does not know"));
  CHECK_THAT(error(Odd("two")),
             ContainsSubstring("it has several kernels, odd, second: say which one, FILE,NAME"));
  CHECK_THAT(error(Odd("two") + ",third"),
             ContainsSubstring("no kernel 'third' for the backend host: there is odd (host), second (host)"));
  CHECK_THAT(error(Odd("two") + ",second", "unsupported"),
             ContainsSubstring("second: it has no backward pass"));

  // A name that is not UTF-8 is answered as such text is elsewhere.
  const Json bytes =
      daemon.Ask({{"op", "run"}, {"kernels", Odd("bytes")}, {"params", {{"is_training", false}}}});
  INFO(bytes);
  CHECK(bytes.at("kernels").at("name") == "odd\xEF\xBF\xBD");

  const TemporaryFolder folder;
  const std::string text = (folder.path() / "text.so").string();
  std::ofstream(text) << "not a library";
  CHECK_THAT(error(text), ContainsSubstring(text + ": is no shared library: link one with -shared"));
  if (geteuid() != 0) {
    fs::permissions(text, fs::perms::none);
    CHECK_THAT(error(text), ContainsSubstring("may not be read: check the permissions"));
  }
  const std::string changed = (folder.path() / "changed.so").string();
  fs::copy_file(Odd("two"), changed);
  CHECK_THAT(error(changed + ",odd", "unsupported"), ContainsSubstring("odd: "));
  fs::remove(changed);
  fs::copy_file(Odd("abi"), changed);
  CHECK_THAT(error(changed), ContainsSubstring("version 77 of cppool/attention.h"));

  CHECK_THAT(error("cudn"), ContainsSubstring("cudn: there is no such file: check the path (kernels are "
                                              "\"cppool\", \"cudnn\", a library's path"));
  for (const Json& kernels : {Json(""), Json(3), Json(",odd")})
    CHECK(daemon.Ask({{"op", "run"}, {"kernels", kernels}}).at("failure").at("kind") == "invalid_request");
  const Json own = daemon.Ask({{"op", "run"}, {"kernels", "cppool"}});
  CHECK(own.at("status") == "passed");
  CHECK(own.at("kernels").at("name") == "cppool");
  CHECK_FALSE(own.at("kernels").contains("file"));
  CHECK(daemon.Wait() == 0);
}

TEST_CASE("a kernel whose supports does not return is named when the deadline passes") {
  for (const char* op : {"run", "validate"}) {
    DaemonProcess daemon(Host(1));
    const Json answer = daemon.Ask(
        {{"op", op}, {"kernels", Odd("hangs")}, {"deadline_ms", 2000}, {"params", {{"is_training", false}}}});
    INFO(answer);
    CHECK(answer.at("failure").at("kind") == "timeout");
    CHECK(answer.at("fatal") == true);
    CHECK(answer.at("kernels").at("file") == Odd("hangs"));
    CHECK(answer.at("kernels").at("digest").get<std::string>().size() == 16);
    CHECK_THAT(
        answer.at("error").get<std::string>(),
        ContainsSubstring("supports of the kernels of " + Odd("hangs") + " may not have returned, in "));
    CHECK_THAT(answer.at("error").get<std::string>(),
               ContainsSubstring("Supports [libcppool_test_kernel_hangs-"));
    CHECK(daemon.Wait() == 3);
  }
}

TEST_CASE("a case that chooses no kernels and does not return is not blamed on the daemon's kernels") {
  DaemonProcess daemon(Host(1, {"--kernels", Odd("hangs"), "--case", CPPOOL_ODD_CASE}));
  const Json answer = daemon.Ask(
      {{"op", "run"}, {"case", "odd"}, {"deadline_ms", 500}, {"params", {{"action", "hang in validate"}}}});
  INFO(answer);
  CHECK(answer.at("failure").at("kind") == "timeout");
  CHECK_THAT(answer.at("error").get<std::string>(), !ContainsSubstring("kernels"));
  CHECK(daemon.Wait() == 3);
}

TEST_CASE("what a kernel does not take is skipped with its reason, by validate too") {
  DaemonProcess daemon(Host(2, {"--kernels", Odd("two") + ",odd"}));
  for (const char* op : {"validate", "run"}) {
    const Json answer = daemon.Ask({{"op", op}, {"params", {{"is_training", false}}}});
    INFO(answer);
    CHECK(answer.at("status") == "skipped");
    CHECK(answer.at("error") == "odd: nothing at all");
  }
  for (const char* op : {"validate", "run"}) {
    const Json failed =
        daemon.Ask({{"op", op}, {"kernels", Odd("fails")}, {"params", {{"is_training", false}}}});
    INFO(failed);
    CHECK(failed.at("status") == "error");
    CHECK(failed.at("failure").at("kind") == "internal");
    CHECK_THAT(failed.at("error").get<std::string>(),
               StartsWith("kernel odd, supports: out of luck (forward: batch "));
  }
  CHECK(daemon.Ask({{"op", "run"}, {"kernels", "cppool"}}).at("status") == "passed");
  CHECK(daemon.Wait() == 0);
}

}  // namespace cppool::test
