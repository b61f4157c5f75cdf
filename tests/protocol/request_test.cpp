#include "protocol/request.h"

#include <limits>

#include "protocol/framing.h"
#include "protocol/run_record.h"
#include "tests/protocol/records.h"
#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using namespace std::chrono_literals;
using test::CheckText;
using test::IsUtf8;
using test::Repeat;
using test::Thrown;

// The RunRequest of `run` or `validate`; null for other operations.
const RunRequest* RunOf(const Request& request) {
  if (const auto* validate = std::get_if<ValidateRequest>(&request.operation)) return &validate->run;
  return std::get_if<RunRequest>(&request.operation);
}

TEST_CASE("each operation is read") {
  CHECK(std::holds_alternative<HelloRequest>(ParseRequest(R"({"op":"hello"})").operation));
  CHECK(std::holds_alternative<ListRequest>(ParseRequest(R"({"op":"list"})").operation));
  CHECK(std::holds_alternative<StatsRequest>(ParseRequest(R"({"op":"stats"})").operation));
  CHECK(std::holds_alternative<ShutdownRequest>(ParseRequest(R"({"op":"shutdown"})").operation));
  CHECK(std::holds_alternative<ShutdownRequest>(ParseRequest(" {\"op\" : \"shutdown\"} \r").operation));

  CHECK(std::holds_alternative<StatusRequest>(ParseRequest(R"({"op":"status"})").operation));
  CHECK(std::get<CancelRequest>(ParseRequest(R"({"op":"cancel","cancels":[7]})").operation).cancels ==
        Json{7});
  CHECK(std::get<CancelRequest>(ParseRequest(R"({"op":"cancel","cancels":null})").operation).cancels ==
        Json());

  const Request bare = ParseRequest(R"({"op":"run"})");
  CHECK_FALSE(bare.id);
  const auto& defaults = std::get<RunRequest>(bare.operation);
  CHECK(defaults.case_name == "attention");
  CHECK(defaults.params == Json::object());
  CHECK_FALSE(defaults.from_kwargs);
  CHECK(defaults.deadline == 90s);
  CHECK(defaults.warmup == 0);
  CHECK(defaults.repeat == 1);
  CHECK(defaults.checks);
  CHECK_FALSE(defaults.perturb);
  CHECK(defaults.dump.empty());
  CHECK(defaults.inputs.empty());
  CHECK_FALSE(defaults.fault);
  CHECK(defaults.load.empty());
  CHECK_FALSE(defaults.sampling);
  CHECK_FALSE((defaults.waits || defaults.profile || defaults.progress));
  CHECK(defaults.trace.empty());
  const auto sampled = [](const std::string& members) {
    return std::get<RunRequest>(ParseRequest("{\"op\":\"run\"," + members + "}").operation);
  };
  CHECK(sampled(R"("sampling":{})").sampling == Sampling{0.01, 10s});
  CHECK(sampled(R"("sampling":{})").sampling->most == 10000);
  CHECK(sampled(R"("sampling":{"precision":1,"max_ms":86400000},"repeat":7)").sampling->most == 7);
  CHECK(sampled(R"("sampling":{"precision":0.0001})").sampling->precision == 0.0001);
  CHECK(sampled(R"("waits":true)").waits);
  CHECK(sampled(R"("profile":true)").profile);
  CHECK(sampled(R"("progress":true,"id":null)").progress);
  CHECK_FALSE(sampled(R"("progress":false)").progress);
  CHECK(sampled(R"("trace":"t.json")").trace == "t.json");

  const Request full = ParseRequest(
      R"({"id":{"a":[1]},"op":"run","case":"all_reduce","params":{"n":[1,2]},"deadline_ms":86400000,"warmup":1000,"repeat":10000,"checks":false})");
  CHECK(full.id == Json::parse(R"({"a":[1]})"));
  const auto& run = std::get<RunRequest>(full.operation);
  CHECK(run.case_name == "all_reduce");
  CHECK(run.params == Json::parse(R"({"n":[1,2]})"));
  CHECK(run.deadline == 24h);
  CHECK(run.warmup == 1000);
  CHECK(run.repeat == 10000);
  CHECK_FALSE(run.checks);

  const auto files = std::get<RunRequest>(
      ParseRequest(R"({"op":"run","perturb":0,"dump":"/tmp/d","inputs":"in \u00e9"})").operation);
  CHECK(files.perturb == 0U);
  CHECK(files.dump == "/tmp/d");
  CHECK(files.inputs == "in \xc3\xa9");
  CHECK_FALSE(files.choice.named());
  CHECK(std::get<RunRequest>(ParseRequest(R"({"op":"run","kernels":"/my.so,fast"})").operation)
            .choice.Words() == "/my.so,fast");
  const auto loads = [](const std::string& line) {
    const Request request = ParseRequest(line);
    if (const auto* list = std::get_if<ListRequest>(&request.operation)) return list->load;
    return RunOf(request)->load;
  };
  using Files = std::vector<std::string>;
  CHECK(loads(R"({"op":"run","load":"a.so"})") == Files{"a.so"});
  CHECK(loads(R"({"op":"validate","load":["a.so","/b.so"]})") == Files{"a.so", "/b.so"});
  CHECK(loads(R"({"op":"list","load":[]})").empty());
  CHECK(loads(SerializeRequest({std::nullopt, ListRequest{{"a.so"}}})) == Files{"a.so"});
  RunRequest loading;
  loading.load = {"a.so", "b.so"};
  CHECK(loads(SerializeRequest({std::nullopt, loading})) == loading.load);

  const auto fault_of = [](const std::string& text) {
    return std::get<RunRequest>(ParseRequest("{\"op\":\"run\",\"fault\":" + text + "}").operation).fault;
  };
  CHECK(fault_of(R"({"kind":"stall"})") == Fault{"stall", 0, "", 1});
  CHECK(fault_of(R"({"kind":"x","rank":3,"stage":"forward/p2p","count":1000000})") ==
        Fault{"x", 3, "forward/p2p", 1'000'000});

  const Request validate = ParseRequest(R"({"op":"validate","params":{"n":1},"repeat":3,"dump":"d","id":5})");
  CHECK(validate.id == 5);
  const RunRequest& validated = std::get<ValidateRequest>(validate.operation).run;
  CHECK(validated.params == Json{{"n", 1}});
  CHECK(validated.repeat == 3);
  CHECK(validated.dump == "d");

  const Request strings = ParseRequest(R"({"op":"run","kwargs":{"dtype":"bf16","is_training":"True"}})");
  const auto& kwargs = std::get<RunRequest>(strings.operation);
  CHECK(kwargs.case_name == "attention");
  CHECK(kwargs.from_kwargs);
  CHECK(kwargs.params == Json{{"dtype", "bf16"}, {"is_training", "True"}});
  CHECK(std::get<RunRequest>(ParseRequest(R"({"op":"run","case":"attention","kwargs":{}})").operation)
            .from_kwargs);
}

TEST_CASE("an id may be any JSON value") {
  for (const char* id : {"null", "0", "-1", "1.5", "\"x\"", "true", "[]", "{\"op\":\"run\"}",
                         "18446744073709551615", "-9223372036854775808", "\"\\u0000\\n\"", "1e300"}) {
    CAPTURE(id);
    const Request request = ParseRequest(std::string("{\"op\":\"hello\",\"id\":") + id + "}");
    REQUIRE(request.id);
    CHECK(*request.id == Json::parse(id));
  }
  CHECK(ParseRequest("{\"op\":\"hello\",\"id\":" + Repeat("[", 63) + Repeat("]", 63) + "}").id);
}

TEST_CASE("the error for an invalid request says what is wrong and what is allowed") {
  struct Row {
    std::string line;
    std::optional<Json> id;
    std::vector<std::string> parts;
  };
  const std::string long_name(5000, 'z');
  const std::string deep = Repeat("[", 200'000);
  const std::vector<Row> rows = {
      // not a request at all: no id
      {"", std::nullopt, {"empty line"}},
      {"   \r", std::nullopt, {"empty line"}},
      {"run attention", std::nullopt, {"not JSON"}},
      {R"({"id":1,"op":"hello")", std::nullopt, {"not JSON"}},
      {R"({"id":1,"op":"hello"} trailing)", std::nullopt, {"not JSON"}},
      {R"({"id":1,"op":"hello"}{"op":"hello"})", std::nullopt, {"not JSON"}},
      {std::string("{\"op\":\"hello\"}\0", 15), std::nullopt, {"NUL"}},
      {"{\"id\":1,\"op\":\"\xff\"}", std::nullopt, {"not UTF-8 from byte 14"}},
      {"{\"id\":1,\"\xc3(\":1}", std::nullopt, {"not UTF-8"}},
      {"{\"op\":\"hello\"}\xfe", std::nullopt, {"not UTF-8"}},
      {R"({"id":1,"op":"\ud83d"})", std::nullopt, {"surrogate"}},
      {deep, std::nullopt, {"nested deeper than 64"}},
      {deep + Repeat("]", 200'000), std::nullopt, {"nested deeper than 64"}},
      {"{\"id\":1,\"op\":\"run\",\"params\":{\"a\":" + deep + Repeat("]", 200'000) + "}}",
       std::nullopt,
       {"nested deeper than 64"}},
      {"{\"op\":\"hello\",\"id\":" + Repeat("[", 64) + Repeat("]", 64) + "}",
       std::nullopt,
       {"nested deeper than 64"}},
      {"{\"op\":\"hello\",\"id\":\"" + std::string(10 << 20, 'x') + "\"}",
       std::nullopt,
       {"bytes", "1048576"}},
      {std::string(kMaxRequestBytes + 1, ' '), std::nullopt, {"1048577 bytes"}},
      // JSON, but not an object
      {"[]", std::nullopt, {"JSON object", "an array"}},
      {"null", std::nullopt, {"JSON object", "null"}},
      {"12", std::nullopt, {"JSON object", "a number", "12"}},
      {"\"" + long_name + "\"", std::nullopt, {"JSON object", "a string", "zzz...\""}},
      {"true", std::nullopt, {"JSON object", "a boolean"}},
      // numbers that are too large for a double, in otherwise valid requests
      {R"({"id":1,"op":"run","params":{"softmax_scale":1e400}})", 1, {"\"1e400\"", "too large"}},
      {R"({"op":"run","params":{"softmax_scale":-1e400,"a":[1e999]},"id":[1e5]})",
       Json::array({1e5}),
       {"\"-1e400\"", "too large"}},
      {R"({"id":"\u00e9","op":"run","params":{"a":)" + std::string(1000, '9') + "}}",
       "\u00e9",
       {"9999", "too large"}},
      {R"({"id":1,"op":"run","params":{"a":1e400})", std::nullopt, {"1e400", "too large"}},
      {R"({"id":1,"id":2,"op":1e400})", std::nullopt, {"given twice"}},
      {R"({"id":1e400,"op":"hello"})", std::nullopt, {"1e400", "too large"}},
      {R"({"id":{"a":[1e400]},"op":"hello"})", std::nullopt, {"1e400", "too large"}},
      {"{\"id\":1,\"op\":[0" + Repeat(",1e400", 100'000) + "]}", std::nullopt, {"1e400", "too large"}},
      // keys
      {R"({"id":7,"op":"hello","op":"list"})", 7, {"\"op\" is given twice"}},
      {R"({"id":7,"op":"run","params":{"a":{"dtype":1,"dtype":1}}})", 7, {"\"dtype\" is given twice"}},
      {R"({"id":7,"op":"hello","id":8})", std::nullopt, {"\"id\" is given twice"}},
      {R"({"id":1180591620717411303424,"op":"hello"})", std::nullopt, {"1180591620717411303424", "64 bits"}},
      {R"({"id":{"a":[-9223372036854775809]},"op":"hello"})",
       std::nullopt,
       {"-9223372036854775809", "64 bits"}},
      {R"({})", std::nullopt, {"no \"op\"", "hello, list, run, validate, stats, shutdown"}},
      {R"({"id":"x"})", "x", {"no \"op\""}},
      {R"({"id":"x","op":1})", "x", {"\"op\" must be a string, not 1", "hello, list"}},
      {R"({"id":null,"op":null})", Json(), {"\"op\" must be a string, not null"}},
      {R"({"id":[1],"op":"rnu"})",
       Json::array({1}),
       {"unknown op \"rnu\"", "did you mean \"run\"?", "hello, list, run"}},
      {R"({"id":1,"op":"Run"})", 1, {"unknown op \"Run\"", "did you mean \"run\"?"}},
      {R"({"id":1,"op":""})", 1, {"unknown op \"\"", "hello, list, run"}},
      {R"({"id":1,"op":"run\n\u0000"})", 1, {"unknown op \"run\\n\\x00\""}},
      {"{\"id\":1,\"op\":\"" + long_name + "\"}", 1, {"unknown op \"zzz", "zzz...\""}},
      {R"({"id":1,"op":"run","parms":{}})",
       1,
       {"unknown key \"parms\"", "did you mean \"params\"?", "deadline_ms", "checks"}},
      {R"({"id":1,"op":"run","":{}})", 1, {"unknown key \"\"", "deadline_ms"}},
      {R"({"id":1,"op":"hello","params":{}})",
       1,
       {"\"params\" is for op \"run\"", "not \"hello\"", "(known: op, id)"}},
      {R"({"id":1,"op":"stats","deadline_ms":5})", 1, {"\"deadline_ms\" is for op \"run\"", "not \"stats\""}},
      {R"({"id":1,"op":"cancel"})", 1, {"\"cancel\" has no \"cancels\""}},
      {R"({"id":1,"op":"cancel","cancel":2})", 1, {"unknown key \"cancel\"", "\"cancels\""}},
      {R"({"op":"run","progress":true})", std::nullopt, {"\"progress\" needs an \"id\""}},
      {R"({"id":1,"op":"run","progress":1})", 1, {"\"progress\" must be true or false, not 1"}},
      {R"({"id":1,"op":"shutdown","force":true})", 1, {"unknown key \"force\"", "(known: op, id)"}},
      {"{\"id\":1,\"op\":\"run\",\"" + long_name + "\":0}", 1, {"unknown key \"zzz", "zzz...\""}},
      // run
      {R"({"id":1,"op":"run","params":[]})", 1, {"\"params\" must be an object, not []"}},
      {R"({"id":1,"op":"run","params":null})", 1, {"\"params\" must be an object, not null"}},
      {R"({"id":1,"op":"run","kwargs":"x"})", 1, {"\"kwargs\" must be an object of strings, not \"x\""}},
      {R"({"id":1,"op":"run","kwargs":{"dtype":"bf16","is_training":true}})",
       1,
       {"\"is_training\" must be a string", "not true"}},
      {R"({"id":1,"op":"run","kwargs":{"scaling_mode":null}})",
       1,
       {"\"scaling_mode\" must be a string", "not null"}},
      {R"({"id":1,"op":"run","kwargs":{},"params":{}})", 1, {"\"params\" and \"kwargs\""}},
      {R"({"id":1,"op":"run","kwargs":{},"case":"mine"})", 1, {"\"kwargs\"", "\"attention\"", "\"mine\""}},
      {R"({"id":1,"op":"run","case":1})", 1, {"\"case\"", "not 1"}},
      {R"({"id":1,"op":"run","case":""})", 1, {"\"case\"", "not \"\""}},
      {R"({"id":1,"op":"run","case":null})", 1, {"\"case\"", "not null"}},
      {R"({"id":1,"op":"hello","dump":"x"})", 1, {"\"dump\" is for op \"run\"", "(known: op, id)"}},
      {R"({"id":1,"op":"validate","parms":{}})", 1, {"unknown key \"parms\"", "did you mean \"params\"?"}},
      {R"({"id":1,"op":"validat"})", 1, {"did you mean \"validate\"?"}},
      {R"({"id":1,"op":"run","input":"x"})", 1, {"unknown key \"input\"", "did you mean \"inputs\"?"}},
      {R"({"id":1,"op":"run","dump":""})", 1, {"\"dump\" must be a folder's path, not \"\""}},
      {R"({"id":1,"op":"run","dump":null})", 1, {"\"dump\" must be a folder's path, not null"}},
      {R"({"id":1,"op":"validate","inputs":["x"]})", 1, {"\"inputs\" must be a folder's path, not [\"x\"]"}},
      {R"({"id":1,"op":"run","inputs":"a\u0000b"})", 1, {"\"inputs\"", "NUL"}},
      {R"({"id":1,"op":"run","kernels":["x"]})",
       1,
       {"\"kernels\" must be \"cppool\", \"cudnn\"", "not [\"x\"]"}},
      {R"({"id":1,"op":"run","kernels":""})", 1, {"\"kernels\" must be", "not \"\""}},
      {R"({"id":1,"op":"run","kernels":",fast"})", 1, {"\"kernels\" must be", "not \",fast\""}},
      {R"({"id":1,"op":"run","kernels":"a\u0000b"})", 1, {"\"kernels\"", "NUL"}},
      {R"({"id":1,"op":"stats","kernels":"x"})", 1, {"\"kernels\" is for op \"run\""}},
      {R"({"id":1,"op":"run","load":""})",
       1,
       {"\"load\" must be the path of a shared library, or a list of such paths, not \"\""}},
      {R"({"id":1,"op":"run","load":["a.so",3]})", 1, {"\"load\" must be", "not [\"a.so\",3]"}},
      {R"({"id":1,"op":"validate","load":"a\u0000b"})", 1, {"\"load\" must be"}},
      {R"({"id":1,"op":"list","load":{}})", 1, {"\"load\" must be", "not {}"}},
      {R"({"id":1,"op":"run","load":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]})",
       1,
       {"\"load\" names 17 libraries, more than 16"}},
      {R"({"id":1,"op":"stats","load":"a.so"})", 1, {"\"load\" is for op \"run\""}},
      {R"({"id":1,"op":"run","fault":"throw"})", 1, {"\"fault\" must be an object, not \"throw\""}},
      {R"({"id":1,"op":"run","fault":{}})", 1, {"\"fault\" has no \"kind\""}},
      {R"({"id":1,"op":"run","fault":{"kind":3}})", 1, {"\"kind\" of \"fault\" must be a string, not 3"}},
      {R"({"id":1,"op":"run","fault":{"kind":""}})", 1, {"the \"kind\" of \"fault\" must not be empty"}},
      {R"({"id":1,"op":"run","fault":{"kind":"throw","rnak":0}})",
       1,
       {"\"rnak\" in \"fault\"", "did you mean \"rank\"", "kind, rank, stage, count"}},
      {R"({"id":1,"op":"run","fault":{"kind":"throw","rank":-1}})",
       1,
       {"the \"rank\" of \"fault\" must be", "not -1"}},
      {R"({"id":1,"op":"run","fault":{"kind":"throw","count":0}})",
       1,
       {"the \"count\" of \"fault\" must be", "from 1", "not 0"}},
      {R"({"id":1,"op":"run","fault":{"kind":"throw","stage":""}})",
       1,
       {"\"stage\" of \"fault\"", "not \"\""}},
      {R"({"id":1,"op":"run","fault":{"kind":"throw","stage":null}})",
       1,
       {"\"stage\" of \"fault\"", "not null"}},
      {R"({"id":1,"op":"hello","fault":{"kind":"throw"}})", 1, {"\"fault\" is for op \"run\""}},
      {R"({"id":1,"op":"run","perturb":-1})", 1, {"\"perturb\"", "from 0 to 9223372036854775807, not -1"}},
      {R"({"id":1,"op":"run","perturb":9223372036854775808})", 1, {"\"perturb\"", "not 9223372036854775808"}},
      {R"({"id":1,"op":"run","perturb":1.5})", 1, {"\"perturb\" must be an integer", "not 1.5"}},
      {R"({"id":1,"op":"run","perturb":true})", 1, {"\"perturb\" must be an integer", "not true"}},
      {R"({"id":1,"op":"run","sampling":true})", 1, {"\"sampling\" must be an object, not true"}},
      {R"({"id":1,"op":"run","sampling":{"precison":1}})",
       1,
       {"unknown key \"precison\"", "in \"sampling\"", "did you mean \"precision\"?"}},
      {R"({"id":1,"op":"run","sampling":{"precision":0}})",
       1,
       {"\"precision\" of \"sampling\" must be a number from 0.0001 to 1, not 0"}},
      {R"({"id":1,"op":"run","sampling":{"precision":"1"}})", 1, {"from 0.0001 to 1, not \"1\""}},
      {R"({"id":1,"op":"run","sampling":{"max_ms":0}})",
       1,
       {"the \"max_ms\" of \"sampling\" must be an integer from 1 to"}},
      {R"({"id":1,"op":"run","waits":1})", 1, {"\"waits\" must be true or false, not 1"}},
      {R"({"id":1,"op":"run","profile":null})", 1, {"\"profile\" must be true or false, not null"}},
      {R"({"id":1,"op":"run","trace":""})", 1, {"\"trace\" must be a file's path, not \"\""}},
      {R"({"id":1,"op":"validate","trace":true})", 1, {"\"trace\" must be a file's path, not true"}},
      {R"({"id":1,"op":"list","trace":"t"})", 1, {"the key \"trace\" is for op \"run\", not \"list\""}},
      {R"({"id":1,"op":"run","checks":1})", 1, {"\"checks\" must be true or false, not 1"}},
      {R"({"id":1,"op":"run","checks":"true"})", 1, {"\"checks\" must be true or false, not \"true\""}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.line.substr(0, 80));
    try {
      ParseRequest(row.line);
      FAIL("no error");
    } catch (const RequestError& error) {
      CheckText(error.what(), row.parts);
      CHECK(error.id == row.id);
      CHECK(IsUtf8(error.what()));
      CHECK(std::string(error.what()).size() < 500);
    }
  }
}

TEST_CASE("deadline_ms, warmup and repeat are integers in their range") {
  struct Row {
    const char *key, *lowest, *highest;
  };
  for (const Row& row :
       {Row{"deadline_ms", "1", "86400000"}, Row{"warmup", "0", "1000"}, Row{"repeat", "1", "10000"}}) {
    CAPTURE(row.key);
    const auto line = [&](const std::string& value) {
      return "{\"op\":\"run\",\"" + std::string(row.key) + "\":" + value + "}";
    };
    const auto error = [&](const std::string& value) {
      return Thrown<RequestError>([&] { ParseRequest(line(value)); });
    };
    CHECK(error(row.lowest).empty());
    CHECK(error(row.highest).empty());
    const std::string range = std::string("from ") + row.lowest + " to " + row.highest;
    for (const std::string& value :
         {std::to_string(std::stoll(row.lowest) - 1), std::to_string(std::stoll(row.highest) + 1),
          std::string("-5"), std::string("-9223372036854775808"), std::string("9223372036854775807"),
          std::string("9223372036854775808"), std::string("18446744073709551615"), std::string("1.5"),
          std::string("true"), std::string("\"5\""), std::string("null"), std::string("[5]"),
          std::string("{}"), std::string("1e300")}) {
      CAPTURE(value);
      CheckText(error(value), {row.key, "must be an integer", range});
    }
    CheckText(error("5.0"), {range, "not 5.0", "without fraction"});
    CheckText(error("1e2"), {range, "without fraction or exponent"});
    CheckText(error("1180591620717411303424"), {range, "1.1805916207174113e+21"});
  }
}

TEST_CASE("a request that is written as a line is read back unchanged") {
  std::vector<Request> requests;
  requests.push_back({std::nullopt, HelloRequest{}});
  requests.push_back({Json(), ListRequest{}});
  requests.push_back({Json("id \n \xc3\xa9"), StatsRequest{}});
  requests.push_back({Json(3), ShutdownRequest{}});
  requests.push_back({Json(5), StatusRequest{}});
  requests.push_back({Json(6), CancelRequest{Json::array({1, "x"})}});
  RunRequest run;
  run.case_name = "my\"case\\";
  run.params = Json::parse(R"({"n":12,"x":0.1,"l":[-1,0],"s":"\n\u0000","b":true,"z":null})");
  run.deadline = 1ms;
  run.warmup = 2;
  run.checks = false;
  run.perturb = 9223372036854775807U;
  run.dump = "d \xc3\xa9\\";
  run.inputs = "/in";
  run.kernels = "/k\xc3\xa9.so,n";
  run.load = {"/x/mine.so", "b"};
  run.sampling = Sampling{0.015625, 77ms, 3};
  run.waits = run.profile = run.progress = true;
  run.trace = "/t\xc3\xa9.json";
  run.fault = Fault{"flip_bit", 3, "back\xc3\xa9", 7};
  requests.push_back({Json::array({1, "a"}), run});
  requests.push_back({Json(2), ValidateRequest{run}});
  run.perturb = 0;
  run.sampling.reset();
  run.repeat = 3;
  requests.push_back({Json(4), run});
  RunRequest kwargs;
  kwargs.params = {{"dtype", "bf16"}};
  kwargs.from_kwargs = true;
  requests.push_back({Json(1), kwargs});
  for (const Request& request : requests) {
    const std::string line = SerializeRequest(request);
    CAPTURE(line);
    CHECK(line.find('\n') == std::string::npos);
    const Request back = ParseRequest(line);
    CHECK(back.id == request.id);
    REQUIRE(back.operation.index() == request.operation.index());
    if (const RunRequest* sent = RunOf(request)) {
      const RunRequest& read = *RunOf(back);
      CHECK(read.params == sent->params);
      CHECK(read.from_kwargs == sent->from_kwargs);
      ForEach(kRunMembers, [&](const auto& member) {
        CAPTURE(member.name);
        CHECK(read.*member.value == sent->*member.value);
      });
    }
  }
}

TEST_CASE("values that JSON cannot represent are refused") {
  RunRequest run;
  const auto error = [&] { return Thrown<InvalidRequest>([&] { SerializeRequest({std::nullopt, run}); }); };
  run.params = {{"softmax_scale", std::numeric_limits<double>::quiet_NaN()}};
  CheckText(error(), {"NaN"});
  run.params = {{"list", Json::array({1, -std::numeric_limits<double>::infinity()})}};
  CheckText(error(), {"infinity"});
  run.params = {{"model", "\xff"}};
  CheckText(error(), {"UTF-8", "\\xff"});
  run.params = Json::object();
  run.dump = "\xff";
  CheckText(error(), {"UTF-8", "\\xff"});
  run.dump.clear();
  run.params = {{"\xc3(", 1}};
  CheckText(error(), {"UTF-8"});
  run.params = Json::object();
  CHECK(error().empty());
}

}  // namespace
}  // namespace cppool::protocol
