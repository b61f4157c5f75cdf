// Shows what the main stream waits for: while it waits for an event, its stage "forward/step 2" is
// "forward/step 2/waiting". The sum of these stages is the communication that a schedule does not hide behind
// work. Written once for every runtime: it stands between the case and the rank's table. Each wait costs two
// more marks.
//
// Threads: everything is for the rank's thread.
#pragma once

#include <cppool/runtime.h>

#include <string>

namespace cppool::kernels {

inline constexpr char kWaitingStage[] = "waiting";  // the last part of such a stage's name

class WaitStages {
 public:
  explicit WaitStages(cppool_runtime* runtime);  // which must outlive it
  WaitStages(const WaitStages&) = delete;
  WaitStages& operator=(const WaitStages&) = delete;

  // The rank's table. Its handles and errors are those of the runtime's own table.
  cppool_runtime* seam() { return &table_; }

 private:
  struct Table : cppool_runtime {
    WaitStages* owner;
  };
  static WaitStages& Of(cppool_runtime* rt) { return *static_cast<Table*>(rt)->owner; }
  cppool_status Mark(cppool_stream stream, const char* stage);
  cppool_status Wait(cppool_stream stream, cppool_event event);

  cppool_runtime* const inner_;
  Table table_;
  std::string stage_;  // of the main stream; empty: none
};

}  // namespace cppool::kernels
