#include "protocol/kernel_choice.h"

#include "protocol/text.h"

namespace cppool::protocol {

using From = KernelChoice::From;

KernelChoice ParseKernels(const std::string& words) {
  const auto refuse = [&](const char* what) {
    throw InvalidRequest(std::string("must be ") + kKernelWordsAllowed + ", " + what + Quoted(words));
  };
  if (words.find('\0') != std::string::npos) refuse("without a NUL character: ");  // a path would end there
  if (words == "cppool") return {From::kCppool, "", ""};
  if (words == "cudnn") return {From::kCudnn, "", ""};
  const auto comma = words.rfind(',');
  KernelChoice choice{From::kLibrary, words.substr(0, comma), ""};
  if (comma != std::string::npos) choice.name = words.substr(comma + 1);
  if (choice.path.empty()) refuse("not ");
  return choice;
}

std::string KernelChoice::Words() const {
  if (from == From::kLibrary) return path + (name.empty() ? "" : "," + name);
  return from == From::kCppool ? "cppool" : from == From::kCudnn ? "cudnn" : "";
}

}  // namespace cppool::protocol
