#include "protocol/response.h"

#include <cmath>
#include <limits>

#include "protocol/framing.h"
#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using test::CheckText;
using test::IsUtf8;
using test::Thrown;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

RunResult Sample() {
  RunResult result;
  result.status = Status::kFailed;
  result.error = "dq of rank 1 is off";
  result.failure = Failure{FailureKind::kMismatch, 1, "backward/attend 1", "dq"};
  Rank rank;
  rank.ok = true;
  rank.gpu_ms = {{"backward", 2.5}, {"forward", 1.25}};
  rank.samples = {{"forward", {1.5, 1.25, kNan}}};
  rank.extra = {{"bandwidth", 12.5}};
  result.ranks.push_back(rank);
  rank = {};
  rank.rank = 1;
  rank.error = "broken";
  result.ranks.push_back(rank);
  result.checks = {{"out", "no_cp", 0, 1e-3, 2e-4, 2.5e-2, true, std::nullopt},
                   {"dq", "oracle", 1, kNan, kInfinity, 0.5, false, 2.5,
                    Worst{{{"head", 3}, {"token", 17}}, kNan, 1.5}, 64, "head 3"}};
  result.tflops = {{"forward", 350.5}};
  result.wall_ms = 12.5;
  result.seed = std::numeric_limits<std::uint64_t>::max();
  result.stopped = "precision";
  result.kernels = {{"name", "cppool"}, {"version", "1.2"}, {"family", "host"}};
  return result;
}

TEST_CASE("statuses and kinds of failure are converted to words and back") {
  for (const Status status : {Status::kPassed, Status::kFailed, Status::kSkipped, Status::kError}) {
    CHECK(ParseStatus(ToString(status)) == status);
  }
  CHECK(ToString(Status::kSkipped) == "skipped");
  CHECK_FALSE(ParseStatus("Passed"));
  for (const char* word : {"invalid_request", "inapplicable", "unsupported", "mismatch", "out_of_memory",
                           "cuda", "nccl", "timeout", "cancelled", "internal"}) {
    const auto kind = ParseFailureKind(word);
    REQUIRE(kind);
    CHECK(ToString(*kind) == word);
  }
  CHECK_FALSE(ParseFailureKind(""));
  CHECK(ToJson(Failure{FailureKind::kCuda, std::nullopt, "", "x"}) ==
        Json::parse(R"({"kind":"cuda","rank":null,"stage":null,"detail":"x"})"));
}

TEST_CASE("a result is written with the protocol's members") {
  CHECK(ToJson(Sample(), Json("id")) == Json::parse(R"({
    "ok": false, "id": "id", "status": "failed", "error": "dq of rank 1 is off",
    "failure": {"kind": "mismatch", "rank": 1, "stage": "backward/attend 1", "detail": "dq"},
    "ranks": [{"rank": 0, "ok": true, "error": null, "gpu_ms": {"backward": 2.5, "forward": 1.25}, "bandwidth": 12.5,
               "samples": {"forward": [1.5, 1.25, null]}},
              {"rank": 1, "ok": false, "error": "broken", "gpu_ms": {}}],
    "checks": [{"tensor": "out", "against": "no_cp", "rank": 0, "max_abs_err": 1e-3, "rel_err": 2e-4, "tolerance": 2.5e-2, "ok": true},
               {"tensor": "dq", "against": "oracle", "rank": 1, "max_abs_err": null, "rel_err": null, "tolerance": 0.5, "ok": false,
                "ratio": 2.5, "worst": {"index": {"head": 3, "token": 17}, "got": null, "wanted": 1.5}, "bad": 64, "where": "head 3"}],
    "tflops": {"forward": 350.5}, "wall_ms": 12.5, "seed": 18446744073709551615, "stopped": "precision",
    "kernels": {"name": "cppool", "version": "1.2", "family": "host"}})"));
  RunResult passed;
  passed.status = Status::kPassed;
  const Json json = ToJson(passed, std::nullopt);
  CHECK(json["ok"] == true);
  for (const char* absent : {"id", "error", "failure", "fatal", "seed", "kernels"})
    CHECK_FALSE(json.contains(absent));
  RunResult fatal = Sample();
  fatal.fatal = true;
  CHECK(ToJson(fatal, Json())["fatal"] == true);
  CHECK(ToJson(fatal, Json())["id"].is_null());
  RunResult clash = Sample();
  clash.ranks[0].extra = {{"rank", 7}, {"ok", false}};
  CHECK(ToJson(clash, std::nullopt)["ranks"][0]["rank"] ==
        0);  // a case cannot overwrite members of the daemon
  CHECK(ToJson(clash, std::nullopt)["ranks"][0]["ok"] == true);
}

TEST_CASE("where a check does not hold is said in a line") {
  Check check = Sample().checks.at(1);
  CHECK(DescribeWorst(check) ==
        "worst at head 3, token 17: got nan, wanted 1.5; 64 elements are out: head 3");
  check.worst->index = {17, 5};
  check.where.clear();
  check.bad = 1;
  CHECK(DescribeWorst(check) == "worst at [17,5]: got nan, wanted 1.5; 1 element is out");
  check.bad = 0;
  CHECK(DescribeWorst(check) == "worst at [17,5]: got nan, wanted 1.5; no element alone is out");
  check.worst.reset();
  check.bad.reset();
  CHECK(DescribeWorst(check).empty());
  for (const char* wrong : {R"([1.5])", R"({"head": "3"})", "3", R"([[3]])"}) {
    Json sent = ToJson(Sample(), Json(1));
    sent["checks"][1]["worst"]["index"] = Json::parse(wrong);
    CHECK_THROWS_WITH(RunResultFromJson(sent), Catch::Contains("a list or an object of integers"));
  }
  Json sent = ToJson(Sample(), Json(1));
  sent["checks"][1]["bad"] = -1;
  CHECK_THROWS_WITH(RunResultFromJson(sent), Catch::Contains("an integer from 0 on"));
}

TEST_CASE("a result that is written as a line is read back unchanged") {
  std::vector<RunResult> results(2, Sample());
  results[1].status = Status::kPassed;
  results[1].error.clear();
  results[1].failure.reset();
  results[1].seed.reset();
  results[1].ranks.at(1).ok = true;
  results[1].checks.at(1) = {"dq", "oracle", 1, 0.25, 0.125, kInfinity, true, kNan};
  for (const RunResult& result : results) {
    const Json sent = ToJson(result, Json(1));
    const std::string line = SerializeResponse(sent, kDefaultSentinel);
    REQUIRE(line.back() == '\n');
    const auto text = StripSentinel(std::string_view(line).substr(0, line.size() - 1), kDefaultSentinel);
    REQUIRE(text);
    const RunResult back = RunResultFromJson(ParseJson(*text));
    CHECK(ToJson(back, Json(1)) == sent);
    CHECK(back.ranks.at(0).extra == Json{{"bandwidth", 12.5}});
    CHECK(back.ranks.at(0).gpu_ms == result.ranks.at(0).gpu_ms);
    REQUIRE(back.ranks.at(0).samples.size() == 1);
    CHECK(back.ranks.at(0).samples[0].second.at(1) == 1.25);
    CHECK(std::isnan(back.ranks.at(0).samples[0].second.at(2)));
    CHECK(back.stopped == result.stopped);
    CHECK(std::isnan(back.checks.at(1).max_abs_err) == !back.checks.at(1).ok);
    CHECK(back.failure.has_value() == result.failure.has_value());
    CHECK(back.seed == result.seed);
    CHECK(back.kernels == result.kernels);
  }
}

TEST_CASE("OkResponse and ErrorResponse have the protocol's members") {
  CHECK(OkResponse({{"pid", 7}}, Json(2)) == Json::parse(R"({"ok":true,"id":2,"pid":7})"));
  CHECK(OkResponse(Json::object(), std::nullopt) == Json::parse(R"({"ok":true})"));
  const Failure failure{FailureKind::kInvalidRequest, std::nullopt, "", "no such op"};
  const Json error = ErrorResponse(failure, Json(nullptr));
  CHECK(error == Json::parse(R"({"ok":false,"id":null,"status":"error","error":"no such op",
      "failure":{"kind":"invalid_request","rank":null,"stage":null,"detail":"no such op"}})"));
  CHECK(ErrorResponse(failure, std::nullopt, true)["fatal"] == true);
  CHECK_FALSE(ErrorResponse(failure, std::nullopt).contains("id"));
  const RunResult read = RunResultFromJson(error);
  CHECK(read.status == Status::kError);
  CHECK(read.failure->kind == FailureKind::kInvalidRequest);
  CHECK_FALSE(read.failure->rank);
  CHECK(read.ranks.empty());
}

TEST_CASE("an invalid response is refused with the member's name") {
  struct Row {
    const char* patch;  // JSON merge patch of the sample: null removes
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      {R"({"ok":null})", {"no \"ok\""}},
      {R"({"ok":1})", {"\"ok\" must be true or false, not 1"}},
      {R"({"ok":true})", {"\"ok\"", "\"status\"", "contradict"}},
      {R"({"ok":true,"status":"passed"})", {"is passed, and a rank or a check is not ok"}},
      {R"({"ok":true,"status":"passed","checks":[]})", {"is passed, and a rank or a check is not ok"}},
      {R"({"ok":true,"status":"passed","ranks":[]})", {"is passed, and a rank or a check is not ok"}},
      {R"({"status":null})", {"no \"status\""}},
      {R"({"status":3})", {"\"status\" must be a string, not 3"}},
      {R"({"status":"fine"})", {"\"status\" must be passed, failed, skipped or error, not \"fine\""}},
      {R"({"error":null})", {"no \"error\""}},
      {R"({"failure":null})", {"no \"failure\""}},
      {R"({"failure":"x"})", {"\"failure\" must be an object"}},
      {R"({"failure":{"kind":null}})", {"no \"failure.kind\""}},
      {R"({"failure":{"kind":7}})", {"\"failure.kind\" must be a string, not 7"}},
      {R"({"failure":{"kind":""}})", {"\"failure.kind\" must be a kind of failure"}},
      {R"({"failure":{"detail":null}})", {"no \"failure.detail\""}},
      {R"({"failure":{"rank":1.5}})", {"\"failure.rank\" must be an integer, not 1.5"}},
      {R"({"failure":{"rank":99999999999}})", {"\"failure.rank\" must be an integer"}},
      {R"({"fatal":"yes"})", {"\"fatal\" must be true or false"}},
      {R"({"ranks":{}})", {"\"ranks\" must be a list"}},
      {R"({"ranks":[3]})", {"\"ranks[0]\" must be an object, not 3"}},
      {R"({"ranks":[{"rank":0}]})", {"no \"ranks[0].ok\""}},
      {R"({"ranks":[{"rank":0,"ok":true,"error":null,"gpu_ms":{"forward":"1"}}]})",
       {"\"ranks[0].gpu_ms.forward\" must be a number"}},
      {R"({"ranks":[{"rank":0,"ok":true,"error":null,"gpu_ms":{},"samples":{"forward":1}}]})",
       {"\"ranks[0].samples.forward\" must be a list"}},
      {R"({"stopped":1})", {"\"stopped\" must be a string"}},
      {R"({"checks":[{"tensor":"dq"}]})", {"no \"checks[0].against\""}},
      {R"({"checks":[{"tensor":"out","against":"no_cp","rank":0,"max_abs_err":null,"rel_err":0,"tolerance":1,"ok":true}]})",
       {"\"checks[0].ok\" is true, and the error is not finite"}},
      {R"({"tflops":[]})", {"\"tflops\" must be an object"}},
      {R"({"wall_ms":"1"})", {"\"wall_ms\" must be a number"}},
      {R"({"seed":-1})", {"\"seed\" must be an integer from 0, not -1"}},
      {R"({"seed":1.5})", {"\"seed\" must be an integer"}},
      {R"({"warnings":"a"})", {"\"warnings\" must be a list"}},
      {R"({"warnings":[1]})", {"\"warnings\" must be a list of strings"}},
      {R"({"leaks":1})", {"\"leaks\" must be an object"}},
      {R"({"leaks":{"fds":-1}})", {"\"leaks.fds\" must be an integer from 0"}},
      {R"({"kernels":"cppool"})", {"\"kernels\" must be an object"}},
      {R"({"kernels":{"file":"k.so","digest":"0123"}})",
       {"\"kernels.digest\" must be 16 of the characters 0-9a-f, not \"0123\""}},
      {R"({"libraries":{}})", {"\"libraries\" must be a list"}},
      {R"({"libraries":[{"digest":"0123456789abcdef"},{"digest":"0123456789ABCDEF"}]})",
       {"\"libraries[1].digest\" must be 16 of the characters"}},
      {R"({"libraries":[{"digest":7}]})", {"\"libraries[0].digest\" must be 16 of the characters"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.patch);
    Json json = ToJson(Sample(), std::nullopt);
    json.merge_patch(Json::parse(row.patch));
    CheckText(Thrown<std::runtime_error>([&] { RunResultFromJson(json); }), row.parts);
  }
  for (const char* text : {"[]", "null", "3", "\"passed\""}) {
    CAPTURE(text);
    CheckText(Thrown<std::runtime_error>([&] { RunResultFromJson(Json::parse(text)); }),
              {"must be an object"});
  }
}

TEST_CASE("a kind of failure that only a newer daemon has is kept as its word") {
  Json json = ToJson(Sample(), std::nullopt);
  json["failure"]["kind"] = "cancelled";
  const RunResult result = RunResultFromJson(json);
  REQUIRE(result.failure);
  CHECK(KindOf(*result.failure) == "cancelled");
  CHECK(result.failure->detail == "dq");
  CHECK(ToJson(result, std::nullopt) == json);
}

TEST_CASE("leaks are read and written") {
  RunResult result;
  result.status = Status::kPassed;
  CHECK_FALSE(ToJson(result, std::nullopt).contains("leaks"));
  result.leaks = {
      .allocations = 2, .device_bytes = 1, .host_bytes = 0, .threads = 3, .fds = 4, .processes = 5};
  const Json json = ToJson(result, std::nullopt);
  CHECK(json.at("leaks") ==
        Json{{"allocations", 2}, {"device_bytes", 1}, {"threads", 3}, {"fds", 4}, {"processes", 5}});
  CHECK(ToJson(RunResultFromJson(json), std::nullopt) == json);
  CHECK(result.leaks.any());
  CHECK_FALSE(RunResult().leaks.any());
}

TEST_CASE("warnings are read and written") {
  Json json = ToJson(Sample(), std::nullopt);
  CHECK_FALSE(json.contains("warnings"));
  json["warnings"] = {"one", "two"};
  const RunResult result = RunResultFromJson(json);
  CHECK(result.warnings == std::vector<std::string>{"one", "two"});
  CHECK(ToJson(result, std::nullopt) == json);
}

TEST_CASE("an answer is always one line of JSON") {
  const Json response = {
      {"error", "bytes \xff\xc3( and \n\r"}, {"nan", kNan}, {"inf", -kInfinity}, {"\xfe", 1}};
  const std::string line = SerializeResponse(response, "");
  CHECK(IsUtf8(line));
  CHECK(line.find('\n') == line.size() - 1);
  const Json back = ParseJson(line);
  CHECK(back["nan"].is_null());
  CHECK(back["inf"].is_null());
  CHECK(back["error"] == "bytes \xef\xbf\xbd\xef\xbf\xbd( and \n\r");
  CHECK(SerializeResponse(Json::object(), kDefaultSentinel) == "[CP_POOL_RESP] {}\n");
}

}  // namespace
}  // namespace cppool::protocol
