#include "protocol/parameters.h"
#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using test::CheckText;
using test::Thrown;

ParameterSpec Spec(const char* name, ParameterType type, Json default_value) {
  ParameterSpec spec;
  spec.name = name;
  spec.type = type;
  spec.default_value = std::move(default_value);
  return spec;
}

std::vector<ParameterSpec> Schema() {
  return {Spec("dtype", ParameterType::kString, "bf16"),
          Spec("model", ParameterType::kString, Json()),
          Spec("qkv_format", ParameterType::kString, "bshd"),
          Spec("kernel_backend", ParameterType::kString, Json()),
          Spec("cp_comm_type", ParameterType::kString, "p2p"),
          Spec("num_heads", ParameterType::kInteger, 12),
          Spec("is_training", ParameterType::kBoolean, true),
          Spec("deterministic", ParameterType::kBoolean, false),
          Spec("pad_between_seqs", ParameterType::kBoolean, false),
          Spec("window_size", ParameterType::kIntegerList, Json::array({-1, -1})),
          Spec("softmax_scale", ParameterType::kNumber, Json())};
}

TEST_CASE("the parameters that Transformer Engine's harness sends are read") {
  const Json fused = Json::parse(
      R"({"dtype":"bf16","model":"cp_2_0","qkv_format":"thd","kernel_backend":"FusedAttention","cp_comm_type":"a2a+p2p",
          "fp8_bwd":"False","fp8_dpa":"False","fp8_mha":"False","scaling_mode":"None","f16_O":"True",
          "is_training":"False","deterministic":"True","log_level":"WARNING"})");
  CHECK(ParametersFromKwargs(fused, Schema()) ==
        Json::parse(R"({"dtype":"bf16","model":"cp_2_0","qkv_format":"thd","kernel_backend":"FusedAttention",
                        "cp_comm_type":"a2a+p2p","is_training":false,"deterministic":true})"));
  const Json flash = Json::parse(
      R"({"dtype":"fp16","model":"cp_1_0","qkv_format":"bshd","kernel_backend":"FlashAttention","cp_comm_type":"p2p",
          "fa_pad_between_seqs":"True","log_level":"30"})");
  CHECK(ParametersFromKwargs(flash, Schema()) ==
        Json::parse(R"({"dtype":"fp16","model":"cp_1_0","qkv_format":"bshd","kernel_backend":"FlashAttention",
                        "cp_comm_type":"p2p","pad_between_seqs":true})"));
}

TEST_CASE("strings are converted to the types of the schema") {
  struct Row {
    const char *name, *text;
    Json value;
  };
  for (const Row& row : std::vector<Row>{{"num_heads", "4096", 4096},
                                         {"num_heads", "-1", -1},
                                         {"is_training", "True", true},
                                         {"is_training", "false", false},
                                         {"window_size", "(-1, 0)", {-1, 0}},
                                         {"window_size", "[512,512]", {512, 512}},
                                         {"window_size", "(3,)", Json::array({3})},
                                         {"window_size", "()", Json::array()},
                                         {"softmax_scale", "0.125", 0.125},
                                         {"softmax_scale", "1e-3", 1e-3},
                                         {"softmax_scale", "2", 2.0},
                                         {"model", "", ""},
                                         {"pad_between_seqs", "True", true}}) {
    CAPTURE(row.name, row.text);
    const Json parameters = ParametersFromKwargs({{row.name, row.text}}, Schema());
    CHECK(parameters == Json{{row.name, row.value}});
    CHECK(parameters[row.name].type() == row.value.type());
  }
  for (const char* name : {"num_heads", "softmax_scale", "model", "window_size", "is_training"}) {
    CHECK(ParametersFromKwargs({{name, "None"}}, Schema()) == Json::object());
  }
}

TEST_CASE("a string that cannot be converted to its type is an error") {
  struct Row {
    const char* name;
    std::string text;
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      {"num_heads", "12.0", {"\"num_heads\" must read as an integer", "not \"12.0\""}},
      {"num_heads", "", {"an integer", "not \"\""}},
      {"num_heads", " 12", {"an integer"}},
      {"num_heads", "12x", {"an integer"}},
      {"num_heads", "+12", {"an integer"}},
      {"num_heads", "9223372036854775808", {"64 bits", "9223372036854775808"}},
      {"num_heads", "True", {"an integer"}},
      {"num_heads", std::string(5000, '1'), {"an integer", "111...\""}},
      {"num_heads", "1\xff", {"not \"1\\xff\""}},
      {"is_training", "1", {"\"is_training\" must read as True or False", "not \"1\""}},
      {"is_training", "TRUE", {"True or False"}},
      {"fa_pad_between_seqs", "yes", {"\"pad_between_seqs\"", "True or False"}},
      {"softmax_scale", "nan", {"\"softmax_scale\" must read as a finite number", "not \"nan\""}},
      {"softmax_scale", "inf", {"finite"}},
      {"softmax_scale", "1e400", {"finite"}},
      {"softmax_scale", "0x10", {"finite"}},
      {"softmax_scale", "1,5", {"finite"}},
      {"window_size", "-1, 0", {"\"window_size\" must read as a list of integers"}},
      {"window_size", "(-1, 0]", {"a list"}},
      {"window_size", "(", {"a list"}},
      {"window_size", "(-1 0)", {"a list"}},
      {"window_size", "(-1,,0)", {"a list"}},
      {"window_size", "(,)", {"a list"}},
      {"window_size", "(1,,)", {"a list"}},
      {"window_size", "(1.0, 2)", {"a list"}},
      {"window_size", "((1, 2))", {"a list"}},
      {"window_size", "(None, 0)", {"a list"}},
      {"num_head", "12", {"unknown parameter \"num_head\"", "did you mean \"num_heads\"?"}},
      {"fp8_bvd", "True", {"unknown parameter \"fp8_bvd\"", "did you mean \"fp8_bwd\"?", "fp8_bwd, "}},
      {"log_leve", "1", {"did you mean \"log_level\"?"}},
      {"fa_pad_between_seq", "1", {"did you mean \"fa_pad_between_seqs\"?"}},
      {"", "True", {"unknown parameter \"\""}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.name, row.text.substr(0, 40));
    CheckText(Thrown<InvalidRequest>([&] {
                ParametersFromKwargs({{row.name, row.text}}, Schema());
              }),
              row.parts);
  }
  const auto error = [](const Json& kwargs) {
    return Thrown<InvalidRequest>([&] { ParametersFromKwargs(kwargs, Schema()); });
  };
  CheckText(error({{"is_training", true}}), {"\"is_training\" must be a string", "not true"});
  CheckText(error({{"scaling_mode", nullptr}}), {"\"scaling_mode\" must be a string", "not null"});
  CheckText(error(Json::array()), {"an object of strings"});
  CHECK(Thrown<InvalidRequest>([] {
          ParametersFromKwargs({{"fa_pad_between_seqs", "True"}},
                               {Spec("dtype", ParameterType::kString, "bf16")});
        }).find("did you mean") == std::string::npos);
  CheckText(error({{"pad_between_seqs", "True"}, {"fa_pad_between_seqs", "True"}}),
            {"are the same parameter"});
  CheckText(error({{"is_training", "yes"}, {"zzz", "1"}}),
            {"unknown parameter \"zzz\""});  // names are checked first
}

TEST_CASE("fp8 flags are ignored unless dtype is fp8") {
  std::vector<ParameterSpec> schema = Schema();
  schema.push_back(Spec("fp8_dpa", ParameterType::kBoolean, false));
  const auto typed = [&](const char* dtype) {
    return ParametersFromKwargs({{"dtype", dtype}, {"fp8_dpa", "True"}, {"f16_O", "nonsense"}}, schema);
  };
  CHECK(typed("bf16") == Json{{"dtype", "bf16"}});
  CHECK(typed("fp8") == Json{{"dtype", "fp8"}, {"fp8_dpa", true}});  // the schema has no f16_O
  CHECK(ParametersFromKwargs({{"fp8_dpa", "nonsense"}}, schema) ==
        Json::object());  // the default dtype is not fp8
  CHECK(ParametersFromKwargs({{"dtype", "fp8"}, {"fp8_mha", "True"}}, Schema()) == Json{{"dtype", "fp8"}});
}

TEST_CASE("of dtype fp8, what Transformer Engine's worker ignores is dropped") {
  std::vector<ParameterSpec> schema = Schema();
  schema.push_back(Spec("scaling_mode", ParameterType::kString, Json()));
  for (const char* flag : {"fp8_dpa", "fp8_mha", "fp8_bwd", "f16_O"})
    schema.push_back(Spec(flag, ParameterType::kBoolean, false));
  struct Row {
    const char *mode, *dpa, *mha, *bwd, *f16;
    Json parameters;
  };
  for (const Row& row :
       std::vector<Row>{{"delayed",
                         "True",
                         "False",
                         "True",
                         "True",
                         {{"dtype", "fp8"},
                          {"scaling_mode", "delayed"},
                          {"fp8_dpa", true},
                          {"fp8_mha", false},
                          {"fp8_bwd", true}}},
                        {"None",
                         "True",
                         "True",
                         "False",
                         "True",
                         {{"dtype", "fp8"}, {"fp8_dpa", true}, {"fp8_mha", true}, {"fp8_bwd", false}}},
                        {"current",
                         "False",
                         "True",
                         "True",
                         "True",
                         {{"dtype", "fp8"},
                          {"scaling_mode", "current"},
                          {"fp8_dpa", false},
                          {"fp8_mha", true},
                          {"fp8_bwd", true},
                          {"f16_O", true}}},
                        {"mxfp8",
                         "True",
                         "True",
                         "True",
                         "False",
                         {{"dtype", "fp8"}, {"scaling_mode", "mxfp8"}, {"fp8_dpa", true}, {"fp8_bwd", true}}},
                        {"current", "False", "False", "True", "True", {{"dtype", "bf16"}}},
                        {"mxfp8", "False", "True", "True", "True", {{"dtype", "bf16"}}}}) {
    CAPTURE(row.mode, row.dpa, row.mha);
    std::vector<std::string> warnings;
    const Json kwargs{{"dtype", "fp8"},     {"scaling_mode", row.mode}, {"fp8_dpa", row.dpa},
                      {"fp8_mha", row.mha}, {"fp8_bwd", row.bwd},       {"f16_O", row.f16}};
    CHECK(ParametersFromKwargs(kwargs, schema, &warnings) == row.parameters);
    CHECK(warnings.size() == (row.parameters.at("dtype") == "bf16" ? 1 : 0));
  }
  CHECK(ParametersFromKwargs({{"dtype", "fp8"}}, schema) == Json{{"dtype", "bf16"}});
}

}  // namespace
}  // namespace cppool::protocol
