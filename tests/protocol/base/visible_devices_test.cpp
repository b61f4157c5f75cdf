#include "base/visible_devices.h"

#include <string>
#include <vector>

#include "tests/catch.h"

namespace cppool::base {
namespace {

const std::vector<std::string> kUuids = {
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8932a000-0000-4106-c12f-20bd9faed9f6",
    "GPU-11111111-d72c-4106-c12f-20bd9faed9f6", "GPU-22222222-d72c-4106-c12f-20bd9faed9f6"};

std::vector<int> Find(const std::string& list) {
  return FindVisibleDevices(ReadVisibleDevices(list), kUuids);
}

using Indices = std::vector<int>;

}  // namespace

TEST_CASE("visible devices by index, up to the first invalid entry") {
  CHECK(Find("0,1,2,3") == Indices{0, 1, 2, 3});
  CHECK(Find("2,1") == Indices{2, 1});
  CHECK(Find("3") == Indices{3});
  CHECK(Find("0,2,-1,1") == Indices{0, 2});
  CHECK(Find("-1") == Indices{});
  CHECK(Find("-1,0") == Indices{});
  CHECK(Find("1,4,0") == Indices{1});
  CHECK(Find("0,1,2,3,4,5") == Indices{0, 1, 2, 3});
  CHECK(Find("4") == Indices{});
  CHECK(Find("99999999999999999999") == Indices{});
  CHECK(Find("1,99999999999999999999,0") == Indices{1});
  CHECK(Find("0,,1") == Indices{0});
  CHECK(Find(",0") == Indices{});
  CHECK(Find("0,") == Indices{0});
  CHECK(Find(" 1 ,\t0") == Indices{1, 0});
  CHECK(Find("+1,002") == Indices{1, 2});
  CHECK(Find("1gpu,2x") == Indices{1, 2});
}

TEST_CASE("visible devices by a prefix of their UUID that is unambiguous") {
  CHECK(Find(kUuids[2] + "," + kUuids[0]) == Indices{2, 0});
  CHECK(Find("GPU-8932f937") == Indices{0});
  CHECK(Find("GPU-8932f,GPU-1,GPU-8932a") == Indices{0, 2, 1});
  CHECK(Find("GPU-8932") == Indices{});  // a prefix of two UUIDs
  CHECK(Find("GPU-") == Indices{});
  CHECK(ReadVisibleDevices("GPU-").stopped_at == "GPU-");  // even if only one device has this prefix
  CHECK(Find("GPU-11111111-d72c-4106-c12f-20bd9faed9f60") == Indices{2});
  CHECK(Find("GPU-2,GPU-8932,GPU-1") == Indices{3});
  CHECK(Find("GPU-33,GPU-1") == Indices{});
}

TEST_CASE("the first entry decides whether a list has indices or UUIDs") {
  CHECK(Find("1,GPU-2") == Indices{1});
  CHECK(Find("GPU-2,1") == Indices{3});
  CHECK(Find("GPU-2,MIG-1") == Indices{3});
  CHECK(Find("nonsense") == Indices{});
  CHECK(Find("gpu-2") == Indices{});
  CHECK(Find("") == Indices{});
}

TEST_CASE("a device that is listed twice hides all devices") {
  for (const char* list :
       {"0,0", "0,1,0", "1,01", "1,2,1,-1", "GPU-2,GPU-2", "GPU-2,GPU-22", "GPU-22,GPU-1,GPU-2"}) {
    INFO(list);
    CHECK(Find(list) == Indices{});
    CHECK(ReadVisibleDevices(list).repeated);
  }
  CHECK(Find("0,1,-1,0") == Indices{0, 1});  // the list is read up to -1
  CHECK_FALSE(ReadVisibleDevices("0,1,-1,0").repeated);
}

TEST_CASE("MIG devices are entries that begin with MIG-") {
  const VisibleDevices devices =
      ReadVisibleDevices("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2,MIG-3,0");
  CHECK(devices.names ==
        std::vector<std::string>{"MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2", "MIG-3"});
  CHECK(devices.stopped_at == "0");
  CHECK(devices.of_mig());
  CHECK_FALSE(ReadVisibleDevices("GPU-1").of_mig());
  CHECK_FALSE(ReadVisibleDevices("").of_mig());
}

TEST_CASE("ExplainVisibleDevices says what is unusual about a list") {
  CHECK(ExplainVisibleDevices("0,2") == "");
  CHECK(ExplainVisibleDevices("GPU-8932f937") == "");
  CHECK(ExplainVisibleDevices("") == "it is empty, so that CUDA sees none");
  CHECK(ExplainVisibleDevices("0,2,-1,1") == "CUDA stops at '-1'");
  CHECK(ExplainVisibleDevices("all") == "CUDA stops at 'all'");
  CHECK(ExplainVisibleDevices("1,0,1") == "it names a device twice, with which CUDA sees none");
}

}  // namespace cppool::base
