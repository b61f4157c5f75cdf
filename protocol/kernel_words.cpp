#include "protocol/kernel_words.h"

namespace cppool::protocol {

KernelWords ParseKernels(const std::string& words) {
  if (words == "cppool" || words == "cudnn") return {"", words};
  const auto comma = words.rfind(',');
  if (comma == std::string::npos) return {words, ""};
  return {words.substr(0, comma), words.substr(comma + 1)};
}

bool NameKernels(const std::string& words) {
  const KernelWords parsed = ParseKernels(words);
  return !parsed.path.empty() || (!words.empty() && words == parsed.name);
}

}  // namespace cppool::protocol
