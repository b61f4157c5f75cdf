#include "kernels/wait_stages.h"

namespace cppool::kernels {

// The other functions are the runtime's own: they find it in `self`, whichever table they are called through.
WaitStages::WaitStages(cppool_runtime* runtime) : inner_(runtime), table_{{*runtime}, this} {
  table_.mark = [](cppool_runtime* rt, cppool_stream stream, const char* stage) {
    return Of(rt).Mark(stream, stage);
  };
  table_.stream_wait = [](cppool_runtime* rt, cppool_stream stream, cppool_event event) {
    return Of(rt).Wait(stream, event);
  };
}

cppool_status WaitStages::Mark(cppool_stream stream, const char* stage) {
  if (stream == inner_->stream) stage_ = stage ? stage : "";
  return inner_->mark(inner_, stream, stage);
}

cppool_status WaitStages::Wait(cppool_stream stream, cppool_event event) {
  if (stream != inner_->stream || stage_.empty()) return inner_->stream_wait(inner_, stream, event);
  cppool_status status = inner_->mark(inner_, stream, (stage_ + "/" + kWaitingStage).c_str());
  if (status == CPPOOL_OK) status = inner_->stream_wait(inner_, stream, event);
  if (status == CPPOOL_OK) status = inner_->mark(inner_, stream, stage_.c_str());
  return status;
}

}  // namespace cppool::kernels
