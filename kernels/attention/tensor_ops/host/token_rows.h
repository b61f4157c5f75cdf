// Rows with tokens, as the host's tensor operations go through them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/problem/row_tiles.h"
#include "kernels/attention/tensor_ops.h"
#include "kernels/error.h"
#include "kernels/runtime.h"

namespace cppool::kernels::host {

[[noreturn]] inline void Misused(const std::string& detail) {
  throw RuntimeError(CPPOOL_INTERNAL, "tensor operations: " + detail);
}

// The table is freed in stream order, because a failed case destroys it while enqueued work still reads it.
class HostTokenRows : public TokenRows {
 public:
  struct Table {
    std::vector<RowTile> tiles;
    std::int64_t step;
  };
  HostTokenRows(cppool_runtime* runtime, cppool_stream stream, std::vector<RowTile> tiles, std::int64_t step)
      : runtime_(runtime),
        stream_(stream),
        table_(std::make_shared<const Table>(Table{std::move(tiles), step})) {}
  ~HostTokenRows() override {
    try {
      Enqueue(runtime_, stream_, [table = std::move(table_)] {});
    } catch (...) {  // the stream and its work no longer exist
    }
  }
  const Table& table() const { return *table_; }

 private:
  cppool_runtime* runtime_;
  cppool_stream stream_;
  std::shared_ptr<const Table> table_;
};

inline const HostTokenRows::Table& TableOf(const TokenRows& rows) {
  const auto* host = dynamic_cast<const HostTokenRows*>(&rows);
  if (!host) Misused("the TokenRows belong to another backend");
  return host->table();
}

template <typename Function>
void ForEachRow(const HostTokenRows::Table& table, Function&& function) {
  for (const RowTile& tile : table.tiles) {
    for (std::int64_t i = 0; i < tile.length; ++i) function(tile.row + i * table.step);
  }
}

}  // namespace cppool::kernels::host
