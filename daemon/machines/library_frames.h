// Libraries that requests name, from the head to agents: by content, so that the nodes need no common file
// system.
#pragma once

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file_cache.h"
#include "daemon/library.h"
#include "daemon/library_store.h"
#include "daemon/machines/agents.h"

namespace cppool::daemon {

// At the head. For one thread.
class LibrarySender {
 public:
  // Sees to it that every agent has the libraries, and returns the digests to ask for. `digests`: those that
  // the request wants, by file; others are the files' of now. Throws Refusal and RanksLost.
  std::map<std::string, std::string> Send(const std::vector<std::string>& files,
                                          std::map<std::string, std::string> digests, const Agents& agents,
                                          std::chrono::steady_clock::time_point until);

 private:
  base::FileDigests digests_{LibraryDigest};
  std::set<std::pair<const AgentLink*, std::string>> sent_;  // digests
};

// At an agent: the answer to a frame `library`. It keeps parts until it has the whole.
class LibraryReceiver {
 public:
  protocol::Json Take(const protocol::Json& frame, LibraryStore& store);

 private:
  std::string bytes_;
};

// RFC 4648. FromBase64 throws std::runtime_error for what is none.
std::string ToBase64(std::string_view bytes);
std::string FromBase64(std::string_view text);

}  // namespace cppool::daemon
