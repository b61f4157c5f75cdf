// The model tables.
#include "protocol/models.h"

#include <map>
#include <string>

#include "tests/catch.h"

namespace cppool::protocol::test {

TEST_CASE("the model tables: 12 rows of FlashAttention, 24 of FusedAttention, each complete") {
  std::map<std::string, std::size_t> sizes;
  for (const ModelTable& table : ModelTables()) {
    sizes[table.name + " " + table.kernel_backend] = table.rows.size();
    for (const auto& [name, row] : table.rows.items()) {
      INFO(name);
      CHECK(row.size() == 13);
    }
  }
  CHECK(sizes ==
        std::map<std::string, std::size_t>{{"flash FlashAttention", 12}, {"fused FusedAttention", 24}});
  // A value of one row, a value that all rows have in common, and a row that overrides such a value.
  CHECK(ModelTables().at(0).rows.at("cp_2_1").at("num_gqa_groups") == 2);
  CHECK(ModelTables().at(0).rows.at("cp_2_1").at("max_seqlen_q") == 4096);
  CHECK(ModelTables().at(1).rows.at("cp_5_1").at("max_seqlen_q") == 1024);
}

}  // namespace cppool::protocol::test
