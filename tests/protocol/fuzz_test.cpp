// Random damage with a fixed seed: damaged input gives a value or the one expected type of exception, with a text that fits into a
// response.
#include <random>

#include "protocol/framing.h"
#include "protocol/response.h"
#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using test::IsUtf8;

const std::vector<std::string> kSeeds = {
    R"({"op":"hello","id":1})",
    R"({"id":[1,{"a":null}],"op":"run","case":"attention","params":{"dtype":"bf16","window_size":[-1,0],"x":1e-3},
        "deadline_ms":1000,"warmup":2,"repeat":5,"checks":false})",
    R"json({"op":"run","kwargs":{"dtype":"bf16","is_training":"True","window_size":"(-1, 0)","f16_O":"True"}})json",
    R"({"id":"\ud83d\ude00\n","op":"stats"})",
    R"({"op":"validate","params":{"cu_seqlens_q":[0,1,9]},"perturb":77,"dump":"/tmp/d","inputs":"i"})",
};

std::string Damage(std::string text, std::mt19937& random) {
  static const std::string nul(1, '\0');
  // clang-format off
  static const std::vector<std::string> pieces = {
      "{", "}", "[", "]", "\"", ",", ":", "\\", "\\u", "\\ud800", "-", ".", "e", "1e400", "99999999999999999999", "null",
      "true", nul, "\xff", "\xc3", "\xed\xa0\x80", "\xf0\x9f", "\"op\":", "\"id\":", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
      " ", "\r", "None", "(", ")"};
  // clang-format on
  for (unsigned steps = 1 + random() % 4; steps > 0; --steps) {
    const std::size_t at = random() % (text.size() + 1);
    switch (random() % 5) {
      case 0:
        text.insert(at, pieces[random() % pieces.size()]);
        break;
      case 1:
        text.erase(at, random() % 8);
        break;
      case 2:
        if (at < text.size()) text[at] = static_cast<char>(random());
        break;
      case 3:
        text.insert(at, text.substr(random() % (text.size() + 1), random() % 40));
        break;
      case 4:
        text.resize(at);
        break;
    }
  }
  return text;
}

void CheckErrorText(const std::string& what) {
  REQUIRE_FALSE(what.empty());
  REQUIRE(what.size() < 1500);
  REQUIRE(IsUtf8(what));
}

TEST_CASE("damaged requests are read or refused") {
  std::mt19937 random(20240611);
  int read = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::string line = Damage(kSeeds[random() % kSeeds.size()], random);
    CAPTURE(line);
    try {
      const Request request = ParseRequest(line);
      const std::string once = SerializeRequest(request);
      REQUIRE(SerializeRequest(ParseRequest(once)) == once);
      ++read;
    } catch (const RequestError& error) {
      CheckErrorText(error.what());
      const Failure failure{FailureKind::kInvalidRequest, std::nullopt, "", error.what()};
      const std::string response = SerializeResponse(ErrorResponse(failure, error.id), "");
      REQUIRE(RunResultFromJson(ParseJson(response)).error == error.what());
      ++refused;
    }
  }
  CHECK(read > 100);  // the damage is neither total nor absent
  CHECK(refused > 10000);
}

TEST_CASE("damaged kwargs are typed or refused") {
  std::vector<ParameterSpec> schema(5);
  schema[0].name = "n";
  schema[1].name = "x";
  schema[1].type = ParameterType::kNumber;
  schema[2].name = "flag";
  schema[2].type = ParameterType::kBoolean;
  schema[3].name = "dtype";
  schema[3].type = ParameterType::kString;
  schema[3].allowed = {{"bf16", "fp16"}};
  schema[4].name = "list";
  schema[4].type = ParameterType::kIntegerList;
  for (ParameterSpec& spec : schema) spec.default_value = Json();
  const std::vector<std::string> texts = {"4096",  "-1",    "True", "None", "(-1, 0)",
                                          "[512]", "0.125", "bf16", "1e-3"};
  std::mt19937 random(99);
  int valid = 0;
  for (int round = 0; round < 20000; ++round) {
    Json kwargs = Json::object();
    const std::string name = schema[random() % schema.size()].name;
    std::string text = texts[random() % texts.size()];
    if (random() % 2 == 0) text = Damage(text, random);
    kwargs[random() % 20 == 0 ? Damage(name, random) : name] = text;
    try {
      const Json parameters = ValidateParameters(ParametersFromKwargs(kwargs, schema), schema);
      REQUIRE(parameters.size() == schema.size());
      ++valid;
    } catch (const InvalidRequest& error) {
      CheckErrorText(error.what());
    }
  }
  CHECK(valid > 1000);
}

TEST_CASE("damaged responses are read or refused") {
  RunResult result;
  result.status = Status::kFailed;
  result.error = "off";
  result.failure = Failure{FailureKind::kMismatch, 1, "forward", "out"};
  result.ranks.resize(2);
  result.ranks[0].gpu_ms = {{"forward", 1.5}};
  result.checks.resize(1);
  result.seed = 5;
  const std::string seed = ToJson(result, Json(4)).dump();
  std::mt19937 random(5);
  for (int round = 0; round < 10000; ++round) {
    const std::string text = Damage(seed, random);
    CAPTURE(text);
    try {
      const RunResult read = RunResultFromJson(ParseJson(text));
      const Json json = ToJson(read, std::nullopt);
      REQUIRE(ToJson(RunResultFromJson(json), std::nullopt) == json);
    } catch (const std::runtime_error& error) {  // InvalidRequest is one
      CheckErrorText(error.what());
    }
  }
}

}  // namespace
}  // namespace cppool::protocol
