#include "base/visible_devices.h"

#include <algorithm>
#include <charconv>

namespace cppool::base {
namespace {

constexpr std::string_view kBlanks = " \t\n\v\f\r";
constexpr std::string_view kDigits = "0123456789";
constexpr std::size_t kUuidLength = 40;  // "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"

// An index as strtoul takes it: blanks and a sign before it, anything after it. In its shortest form, or
// nothing when it is negative or no number.
std::optional<std::string> ReadIndex(std::string_view entry) {
  entry.remove_prefix(std::min(entry.find_first_not_of(kBlanks), entry.size()));
  const bool negative = !entry.empty() && entry[0] == '-';
  if (negative || (!entry.empty() && entry[0] == '+')) entry.remove_prefix(1);
  const std::string_view digits = entry.substr(0, entry.find_first_not_of(kDigits));
  if (digits.empty()) return std::nullopt;
  const std::string_view shortest = digits.substr(std::min(digits.find_first_not_of('0'), digits.size() - 1));
  if (negative && shortest != "0") return std::nullopt;
  return std::string(shortest);
}

bool Begins(std::string_view text, std::string_view beginning) {
  return text.substr(0, beginning.size()) == beginning;
}

}  // namespace

VisibleDevices ReadVisibleDevices(std::string_view list) {
  VisibleDevices devices;
  std::string_view prefix;
  for (const std::string_view kind : {"GPU-", "MIG-"})
    if (Begins(list, kind)) prefix = kind;
  for (std::size_t at = 0; at <= list.size();) {
    const std::string_view entry = list.substr(at, list.find(',', at) - at);
    at += entry.size() + 1;
    std::optional<std::string> name;
    if (prefix.empty()) {
      name = ReadIndex(entry);
    } else if (Begins(entry, prefix) && entry.size() > prefix.size()) {
      // What follows a whole UUID does not count.
      name = std::string(prefix == "GPU-" ? entry.substr(0, kUuidLength) : entry);
    }
    if (!name) {
      devices.stopped_at = std::string(entry);
      break;
    }
    for (const std::string& other : devices.names) {
      // The longer one of two beginnings of one UUID names the same device.
      const bool same = prefix.empty() ? *name == other : Begins(*name, other) || Begins(other, *name);
      devices.repeated = devices.repeated || same;
    }
    devices.names.push_back(std::move(*name));
  }
  return devices;
}

std::vector<int> FindVisibleDevices(const VisibleDevices& devices, const std::vector<std::string>& uuids) {
  std::vector<int> found;
  const int count = static_cast<int>(uuids.size());
  for (const std::string& name : devices.names) {
    int index = -1;
    if (Begins(name, "GPU-")) {
      for (int i = 0; i < count; ++i) {
        if (!Begins(uuids[i], name)) continue;
        index = index < 0 ? i : count;  // a beginning that fits several names none
      }
    } else if (std::from_chars(name.data(), name.data() + name.size(), index).ptr !=
               name.data() + name.size()) {
      index = -1;
    }
    if (index < 0 || index >= count) return found;
    if (std::ranges::find(found, index) != found.end()) return {};
    found.push_back(index);
  }
  return found;
}

std::string ExplainVisibleDevices(std::string_view list) {
  if (list.empty()) return "it is empty, so that CUDA sees none";
  const VisibleDevices devices = ReadVisibleDevices(list);
  if (devices.repeated) return "it names a device twice, with which CUDA sees none";
  if (devices.stopped_at) return "CUDA stops at '" + *devices.stopped_at + "'";
  return "";
}

}  // namespace cppool::base
