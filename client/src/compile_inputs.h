// The files that a compiler reads beside the source: known before it runs as far as flags and text tell, and
// named by it afterwards.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_cache.h"

namespace cppool::client {

using Words = std::vector<std::string>;

Words Split(const std::string& text);  // at white space

// Which content files had when they were looked at first, before anything read them; that they were not there
// counts, too.
class Snapshot {
 public:
  bool Take(const std::string& file);  // false: it was taken before
  // Returns the first that is not as it was, or that is not among them and was changed at `since` or later
  // (base::FileClock). Empty: none.
  std::string Changed(const Words& files, std::int64_t since) const;
  Words Files() const;

 private:
  std::map<std::string, std::optional<base::FileIdentity>> files_;
};

struct FlagInputs {
  Words files;  // named by flags, by response files among them, and libraries of -l in the folders of -L
  Words include_folders;  // those that -I, -isystem and -iquote name
};
FlagInputs InputsOf(const Words& flags, const Words& library_folders);

// Takes the files into the snapshot that a source with this text includes, directly or not, and of those that
// are not there every place where one would be found: in the folder of the file that includes it, and in
// `folders`. Conditions and macros are not looked at.
void TakeIncludes(const std::string& source, std::string_view text, const Words& folders, Snapshot* snapshot);

// Returns the files of a rule of make, "target: a b\ c \<newline> d"; sorted.
Words ReadDependencies(const std::string& text);

// Digests `key` and the files' names and bytes. Nothing when one of them cannot be read.
std::optional<std::string> DigestWith(std::string key, const Words& files);

}  // namespace cppool::client
