// The model tables: named problems of attention, which a request can name (`model`, `kernel_backend`) and
// which the matrix runs. Their one source is protocol/models.json.
#pragma once

#include <string>
#include <vector>

#include "protocol/failure.h"

namespace cppool::protocol {

struct ModelTable {
  std::string name;            // "flash" or "fused"
  std::string kernel_backend;  // "FlashAttention" or "FusedAttention"
  Json rows;                   // by the row's name, "cp_1_0": its parameters
};

const std::vector<ModelTable>& ModelTables();

}  // namespace cppool::protocol
