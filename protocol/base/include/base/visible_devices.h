// CUDA_VISIBLE_DEVICES as CUDA reads it, without asking CUDA: the rules are in the CUDA Programming Guide,
// under "CUDA Environment Variables"; what it leaves open is as PyTorch's torch.cuda.device_count takes it,
// and tested against CUDA on machines with GPUs.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cppool::base {

// The first entry says what the list is made of: indices, UUIDs of GPUs, or of MIG devices. An entry that is
// none of these ends the list, and so does one that the machine does not have: what was named before it stays
// visible.
struct VisibleDevices {
  std::vector<std::string>
      names;  // "3", "GPU-8932f937" (the beginning of a UUID that no other GPU has), "MIG-..."
  std::optional<std::string> stopped_at;  // the entry that cannot be a name
  bool repeated = false;                  // a device is named twice: CUDA sees none at all

  bool of_mig() const { return !names.empty() && names[0].rfind("MIG-", 0) == 0; }
};
VisibleDevices ReadVisibleDevices(std::string_view list);

// The indices of the devices that CUDA sees on a machine with these GPUs (their UUIDs, "GPU-..."), in the
// order of CUDA's ordinals. MIG devices are not among them.
std::vector<int> FindVisibleDevices(const VisibleDevices& devices, const std::vector<std::string>& uuids);

// Says for people what is odd about a list: "CUDA stops at '-1'", "it is empty, so that CUDA sees none";
// empty for an ordinary one.
std::string ExplainVisibleDevices(std::string_view list);

}  // namespace cppool::base
