// Lines from stdin, as many bytes at a time as the pipe holds. What is not yet read waits in the pipe: that bounds memory.
#pragma once

#include <optional>

#include "daemon/unique_fd.h"
#include "protocol/framing.h"

namespace cppool::daemon {

class RequestReader {
 public:
  // `stop_fd` becomes readable when no further request is wanted (SIGTERM); -1: never. Not owned.
  RequestReader(UniqueFd input, int stop_fd);

  // Waits for the next line: for as long as it takes, since a daemon's life is waiting for requests. Nothing at the end of input
  // or when stopped.
  std::optional<protocol::LineReader::Line> Next();

 private:
  enum class Filled { kBytes, kEnd, kStopped };
  Filled Fill();

  UniqueFd input_;
  int stop_fd_;
  protocol::LineReader lines_;
  bool ended_ = false;
};

}  // namespace cppool::daemon
