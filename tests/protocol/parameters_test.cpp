#include "protocol/parameters.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using test::CheckText;
using test::Thrown;

std::vector<ParameterSpec> Schema() {
  std::vector<ParameterSpec> schema(8);
  schema[0].name = "num_heads";
  schema[0].default_value = 12;
  schema[0].minimum = 1;
  schema[0].maximum = 1024;
  schema[0].doc = "query heads";
  schema[1].name = "softmax_scale";
  schema[1].type = ParameterType::kNumber;
  schema[1].default_value = Json();
  schema[1].minimum = -2.5;
  schema[1].maximum = 1e6;
  schema[2].name = "is_training";
  schema[2].type = ParameterType::kBoolean;
  schema[2].default_value = true;
  schema[3].name = "dtype";
  schema[3].type = ParameterType::kString;
  schema[3].default_value = "bf16";
  schema[3].allowed = {{"bf16", "fp16"}};
  schema[4].name = "window_size";
  schema[4].type = ParameterType::kIntegerList;
  schema[4].default_value = Json::array({-1, -1});
  schema[4].minimum = -1;
  schema[4].list_length = 2;
  schema[5].name = "size";  // required
  schema[6].name = "world";
  schema[6].default_value = 2;
  schema[6].allowed = {{1, 2, 4}};
  schema[7].name = "lengths";
  schema[7].type = ParameterType::kIntegerList;
  schema[7].default_value = Json::array();
  return schema;
}

TEST_CASE("validated parameters have every parameter of the schema") {
  CHECK(ValidateParameters({{"size", 5}}, Schema()) ==
        Json::parse(
            R"({"num_heads":12,"softmax_scale":null,"is_training":true,"dtype":"bf16","window_size":[-1,-1],
                        "size":5,"world":2,"lengths":[]})"));
  const Json given = Json::parse(R"({"num_heads":1024,"softmax_scale":-2.5,"is_training":false,"dtype":"fp16",
      "window_size":[512,0],"size":-9223372036854775808,"world":4,"lengths":[1,2,3]})");
  CHECK(ValidateParameters(given, Schema()) == given);
  CHECK(ValidateParameters({{"size", 1}, {"softmax_scale", nullptr}}, Schema())["softmax_scale"].is_null());
  CHECK(ValidateParameters({{"size", 1}, {"softmax_scale", 3}}, Schema())["softmax_scale"].is_number_float());
  CHECK(ValidateParameters(Json::object(), {}) == Json::object());
}

TEST_CASE("the error for an invalid parameter names it and its allowed values") {
  struct Row {
    std::string given;  // beside "size": 1
    std::vector<std::string> parts;
  };
  const std::string heads = "\"num_heads\" must be an integer from 1 to 1024, not ";
  const std::string scale = "\"softmax_scale\" must be a number from -2.5 to 1000000.0 or null, not ";
  const std::string window = "\"window_size\" must be a list of 2 integers of at least -1, not ";
  const std::vector<Row> rows = {
      {R"("num_head":1)",
       {"unknown parameter \"num_head\"", "did you mean \"num_heads\"?", "known: num_heads, softmax_scale",
        "lengths"}},
      {R"("zebra":1)", {"unknown parameter \"zebra\" (known: num_heads"}},
      {R"("":1)", {"unknown parameter \"\""}},
      {"\"" + std::string(5000, 'q') + "\":1", {"unknown parameter \"qqq", "qqq...\""}},
      {R"("num_heads":0)", {heads + "0"}},
      {R"("num_heads":-3)", {heads + "-3"}},
      {R"("num_heads":1025)", {heads + "1025"}},
      {R"("num_heads":9223372036854775807)", {heads + "9223372036854775807"}},
      {R"("num_heads":18446744073709551615)", {heads + "18446744073709551615"}},
      {R"("num_heads":1180591620717411303424)", {heads}},
      {R"("num_heads":12.0)", {heads + "12.0", "without fraction"}},
      {R"("num_heads":1.5)", {heads + "1.5"}},
      {R"("num_heads":"12")", {heads + "\"12\""}},
      {R"("num_heads":true)", {heads + "true"}},
      {R"("num_heads":null)", {heads + "null"}},
      {R"("num_heads":[12])", {heads + "[12]"}},
      {R"("num_heads":{"a":1})", {heads + "{\"a\":1}"}},
      {"\"num_heads\":\"" + std::string(5000, 'q') + "\"", {heads + "\"qqq", "qqq...\""}},
      {R"("size":18446744073709551615)",
       {"\"size\" must be an integer, not 18446744073709551615", "64 bits"}},
      {R"("softmax_scale":"0.1")", {scale + "\"0.1\""}},
      {R"("softmax_scale":true)", {scale + "true"}},
      {R"("softmax_scale":-2.6)", {scale + "-2.6"}},
      {R"("softmax_scale":1e300)", {scale + "1e+300"}},
      {R"("is_training":1)", {"\"is_training\" must be true or false, not 1"}},
      {R"("is_training":"True")", {"\"is_training\" must be true or false, not \"True\""}},
      {R"("dtype":"bf61")",
       {"\"dtype\" must be one of \"bf16\", \"fp16\", not \"bf61\"; did you mean \"bf16\"?"}},
      {R"("dtype":"float64")", {"\"dtype\" must be one of \"bf16\", \"fp16\", not \"float64\""}},
      {R"("dtype":16)", {"\"dtype\" must be a string, not 16"}},
      {R"("dtype":null)", {"\"dtype\" must be a string, not null"}},
      {R"("window_size":[1])", {window + "[1]", "(1 elements)"}},
      {R"("window_size":[1,2,3])", {window + "[1,2,3]", "(3 elements)"}},
      {R"("window_size":[])", {window + "[]"}},
      {R"("window_size":[-2,0])", {window + "[-2,0]"}},
      {R"("window_size":[1.0,0])", {window + "[1.0,0]", "without fraction"}},
      {R"("window_size":[true,0])", {window + "[true,0]"}},
      {R"("window_size":["1",0])", {window + "[\"1\",0]"}},
      {R"("window_size":[18446744073709551615,0])", {window, "64 bits"}},
      {R"("window_size":5)", {window + "5"}},
      {R"json("window_size":"(1, 0)")json", {window + "\"(1, 0)\""}},
      {R"("world":3)", {"\"world\" must be one of 1, 2, 4, not 3"}},
      {R"("lengths":[1,null])", {"\"lengths\" must be a list of integers, not [1,null]"}},
      // the most basic error first: names, then types, then values
      {R"("num_heads":0,"is_training":3,"zebra":1)", {"unknown parameter \"zebra\""}},
      {R"("num_heads":0,"is_training":3)", {"\"is_training\" must be"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.given.substr(0, 80));
    const std::string size = row.given.find("\"size\"") == 0 ? "" : "\"size\":1,";
    const Json given = ParseJson("{" + size + row.given + "}");
    CheckText(Thrown<InvalidRequest>([&] { ValidateParameters(given, Schema()); }), row.parts);
  }
  CheckText(Thrown<InvalidRequest>([] { ValidateParameters(Json::object(), Schema()); }),
            {"\"size\" is missing", "an integer"});
  CheckText(Thrown<InvalidRequest>([] { ValidateParameters(Json::array(), Schema()); }),
            {"must be an object, not []"});
  CheckText(Thrown<InvalidRequest>([] {
              ValidateParameters({{"x", 1}}, {});
            }),
            {"unknown parameter \"x\"", "there are none"});
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    CheckText(Thrown<InvalidRequest>([&] {
                ValidateParameters({{"size", 1}, {"softmax_scale", value}}, Schema());
              }),
              {scale});
  }
}

TEST_CASE("ToJson writes a parameter's schema with its range") {
  const auto schema = Schema();
  CHECK(
      ToJson(schema[0]) ==
      Json::parse(
          R"({"name":"num_heads","type":"integer","default":12,"minimum":1,"maximum":1024,"doc":"query heads"})"));
  CHECK(ToJson(schema[0])["minimum"].is_number_integer());
  CHECK(
      ToJson(schema[1]) ==
      Json::parse(
          R"({"name":"softmax_scale","type":"number","default":null,"minimum":-2.5,"maximum":1e6,"doc":""})"));
  CHECK(ToJson(schema[2])["type"] == "boolean");
  CHECK(
      ToJson(schema[3]) ==
      Json::parse(R"({"name":"dtype","type":"string","default":"bf16","allowed":["bf16","fp16"],"doc":""})"));
  CHECK(
      ToJson(schema[4]) ==
      Json::parse(
          R"({"name":"window_size","type":"integer_list","default":[-1,-1],"minimum":-1,"length":2,"doc":""})"));
  CHECK(ToJson(schema[5]) == Json::parse(R"({"name":"size","type":"integer","required":true,"doc":""})"));
  ParameterSpec wide = schema[0];
  wide.minimum = -0x1p63;
  wide.maximum = 0x1p63;
  CHECK(ToJson(wide)["minimum"] == INT64_MIN);
  CHECK(ToJson(wide)["maximum"] == INT64_MAX);
}

}  // namespace
}  // namespace cppool::protocol
