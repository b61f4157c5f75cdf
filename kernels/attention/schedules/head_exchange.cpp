#include "kernels/attention/schedules/head_exchange.h"

namespace cppool::kernels {

HeadPlan DealHeads(int heads, int kv_heads, int a2a_size) {
  HeadPlan plan;
  const int group = heads / kv_heads;
  const int count = heads / a2a_size;
  int total = 0;
  for (int rank = 0; rank < a2a_size; ++rank) {
    const int begin = rank * count;
    const int kv_begin = begin / group;
    const int kv_end = (begin + count - 1) / group + 1;
    plan.query.push_back({begin, count});
    plan.key.push_back({kv_begin, kv_end - kv_begin});
    total += kv_end - kv_begin;
  }
  plan.replicated = total > kv_heads;
  return plan;
}

std::int64_t HeadExchange::PackedElements(std::int64_t rows, int dim, const std::vector<HeadRange>& ranges) {
  std::int64_t heads = 0;
  for (const HeadRange& range : ranges) heads += range.count;
  return rows * heads * dim;
}

void HeadExchange::AllToAll(const std::byte* from, const std::vector<std::size_t>& sizes_out, std::byte* to,
                            const std::vector<std::size_t>& sizes_in) {
  packed_.Record(rt_->stream);
  packed_.Wait(comm_stream_);
  GroupedCalls calls(rt_);
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) {
      Check(rt_, rt_->copy(rt_, to, from, sizes_out[peer], comm_stream_));
    } else {
      Check(rt_, rt_->send(rt_, from, sizes_out[peer], peer, group_.comm, comm_stream_));
      Check(rt_, rt_->recv(rt_, to, sizes_in[peer], peer, group_.comm, comm_stream_));
    }
    from += sizes_out[peer];
    to += sizes_in[peer];
  }
  calls.End();
  arrived_.Record(comm_stream_);
  arrived_.Wait(rt_->stream);
}

void HeadExchange::ToHeads(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                           TensorRef from, void* scratch, void* to) {
  ops_.SplitHeads(rows, heads, dim, ranges, from, scratch, rt_->stream);
  const std::size_t row_bytes = static_cast<std::size_t>(rows) * dim * SizeOf(from.dtype);
  std::vector<std::size_t> out, in;
  for (const HeadRange& range : ranges) {
    out.push_back(row_bytes * range.count);
    in.push_back(row_bytes * ranges[group_.rank].count);
  }
  AllToAll(static_cast<const std::byte*>(scratch), out, static_cast<std::byte*>(to), in);
}

void HeadExchange::ToTokens(std::int64_t rows, int heads, int dim, const std::vector<HeadRange>& ranges,
                            TensorRef from, void* scratch, TensorOut to) {
  const std::size_t row_bytes = static_cast<std::size_t>(rows) * dim * SizeOf(from.dtype);
  std::vector<std::size_t> out, in;
  for (const HeadRange& range : ranges) {
    out.push_back(row_bytes * ranges[group_.rank].count);
    in.push_back(row_bytes * range.count);
  }
  AllToAll(static_cast<const std::byte*>(from.data), out, static_cast<std::byte*>(scratch), in);
  ops_.MergeHeads(rows, heads, dim, ranges, {scratch, from.dtype, from.scale}, to, rt_->stream);
}

}  // namespace cppool::kernels
