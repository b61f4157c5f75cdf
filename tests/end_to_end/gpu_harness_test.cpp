// Harnesses that use the GPUs themselves beside their pools: forks, contexts, shared and full devices. And
// which devices CUDA sees.
#include <cstdio>
#include <string>
#include <vector>

#include "base/visible_devices.h"
#include "tests/catch.h"
#include "tests/child.h"
#include "tests/environment.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

FILE* Start(const std::string& words) { return StartChild("'" CPPOOL_GPU_HARNESS "' " + words); }

// The UUIDs of the devices that CUDA sees, from a separate process, so that this one does not load CUDA.
std::vector<std::string> Seen() { return Lines(FinishChild(Start("devices")).output); }

std::vector<std::string> SeenWith(const std::string& list) {
  const Environment visible("CUDA_VISIBLE_DEVICES", list);
  return Seen();
}

// Whether there are fewer devices than a test needs; warns that it is skipped.
bool Lacks(std::size_t devices) {
  const std::size_t there = Seen().size();
  if (there < devices) WARN("skipped: it needs " << devices << " devices, and there are " << there);
  return there < devices;
}

// Runs the harness in one of its modes, where there are so many devices.
void CheckMode(const std::string& mode, std::size_t devices) {
  if (Lacks(devices)) return;
  const Child harness = FinishChild(Start(mode));
  INFO(harness.output);
  CHECK(harness.exit_code == 0);
}

std::string Join(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ",") + name;
  return list;
}

}  // namespace

TEST_CASE("a harness lists devices, runs cases and forks, and its child uses CUDA and its own Pool") {
  CheckMode("fork", 2);
}

TEST_CASE("a Pool works in a harness with its own CUDA context") { CheckMode("context", 2); }

TEST_CASE(
    "a case that does not fit beside the harness's memory is answered out_of_memory, and the daemon goes "
    "on") {
  CheckMode("memory", 1);
}

TEST_CASE("a daemon that exits when it is idle frees the device's memory") { CheckMode("idle", 1); }

TEST_CASE("two harnesses run at once, on different devices and on the same device") {
  const std::vector<std::string> devices = Seen();
  if (devices.empty()) {
    WARN("skipped: there are no devices");
    return;
  }
  auto both = [](const std::string& one, const std::string& other, int world_size) {
    const std::string more = " " + std::to_string(world_size) + " 20";
    FILE* const first = Start("run " + one + more);
    FILE* const second = Start("run " + other + more);
    for (const auto& [harness, list] : {std::pair(first, one), std::pair(second, other)}) {
      const Child output = FinishChild(harness);
      INFO(list << "\n" << output.output);
      CHECK(output.exit_code == 0);
      const std::vector<std::string> uuids = Lines(output.output);
      CHECK(uuids.size() == static_cast<std::size_t>(world_size));
      for (const std::string& uuid : uuids) CHECK(Has(list, uuid));
    }
  };
  both(devices[0], devices[0], 1);
  both(devices[0], devices[0], 2);  // four ranks of two worlds on one device
  if (devices.size() < 2) {
    WARN("the part on different devices is skipped: there is one device");
    return;
  }
  both(devices[0], devices[1], 1);
  both(devices[0] + "," + devices[1], devices[1] + "," + devices[0], 2);
  if (devices.size() >= 4) both(devices[0] + "," + devices[1], devices[2] + "," + devices[3], 2);
}

TEST_CASE("CUDA_VISIBLE_DEVICES is read as CUDA reads it") {
  // All devices of the machine in the order of CUDA's indices, whatever CUDA_VISIBLE_DEVICES the caller has
  // set.
  std::string all_indices;
  for (int i = 0; i < 64; ++i) all_indices += (i ? "," : "") + std::to_string(i);
  const std::vector<std::string> uuids = SeenWith(all_indices);
  if (uuids.empty()) {
    WARN("skipped: there are no devices");
    return;
  }
  const std::string first = uuids.front(), last = uuids.back();
  const std::string count = std::to_string(uuids.size());
  const std::vector<std::string> lists = {"0",
                                          "",
                                          "-1",
                                          "-1,0",
                                          "0,-1",
                                          count,
                                          "0," + count + ",1",
                                          "0,,1",
                                          ",0",
                                          "0,",
                                          "nonsense",
                                          "0,nonsense",
                                          "0,0",
                                          "0,1,0",
                                          "1,0",
                                          "0,2,-1,1",
                                          " 0",
                                          "0 ,1",
                                          "+0",
                                          "00",
                                          "0x",
                                          first,
                                          last + "," + first,
                                          first.substr(0, 12),
                                          "GPU-",
                                          "GPU-0000000000",
                                          first + "," + first,
                                          first + "," + first.substr(0, 12),
                                          first.substr(0, 12) + "," + first,
                                          first + ",0",
                                          "0," + first,
                                          first + "0",
                                          "MIG-0",
                                          Join(uuids),
                                          "99999999999999999999"};
  for (const std::string& list : lists) {
    std::vector<std::string> expected;
    for (int index : base::FindVisibleDevices(base::ReadVisibleDevices(list), uuids))
      expected.push_back(uuids[static_cast<std::size_t>(index)]);
    INFO("'" << list << "' of " << uuids.size() << " devices");
    CHECK(Join(SeenWith(list)) == Join(expected));
  }
}

}  // namespace cppool::test
