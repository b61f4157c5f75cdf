#include "base/nccl_settings.h"

#include <unistd.h>

#include <string_view>

namespace cppool::base {

std::map<std::string, std::string> NcclSettings() {
  std::map<std::string, std::string> settings;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view text = *entry;
    const std::size_t end = text.find('=');
    if (text.starts_with("NCCL_") && end != std::string_view::npos)
      settings.emplace(text.substr(0, end), text.substr(end + 1));
  }
  return settings;
}

}  // namespace cppool::base
