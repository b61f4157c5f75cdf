#include "protocol/run_record.h"

#include <algorithm>
#include <regex>
#include <set>
#include <tuple>
#include <type_traits>

#include "protocol/features.h"
#include "protocol/json_text.h"
#include "protocol/request.h"
#include "tests/catch.h"
#include "tests/files.h"
#include "tests/protocol/records.h"

namespace cppool::protocol {
namespace {

std::string SourceText(const std::string& name) {
  return cppool::test::ReadFile(CPPOOL_SOURCE_FOLDER "/" + name);
}

Json RunSchema() {
  return ParseJson(SourceText("protocol/schema/request.schema.json"))
      .at("definitions")
      .at("run")
      .at("properties");
}

using Names = std::set<std::string>;

Names KeysOf(const Json& object) {
  Names keys;
  for (const auto& [key, value] : object.items()) keys.insert(key);
  return keys;
}

template <typename Table>
Names SetOf(const Table& table, Names others = {}) {
  for (const std::string& name : NamesOf(table)) others.insert(name);
  return others;
}

// Whether the schema of a member has the range, and the default, of the table.
template <typename Values>
void CheckSchema(const Json&, const Values&) {}
void CheckSchema(const Json& schema, const Integers& range) {
  CHECK(schema.at("type") == "integer");
  CHECK(schema.at("minimum") == range.minimum);
  CHECK(schema.at("maximum") == range.maximum);
}
void CheckSchema(const Json& schema, const Numbers& range) {
  CHECK(schema.at("type") == "number");
  CHECK(schema.at("minimum") == range.minimum);
  CHECK(schema.at("maximum") == range.maximum);
}
void CheckSchema(const Json& schema, Any) { CHECK(schema.at("type") == "boolean"); }

// `record`: with its defaults. `sent`: the same as it is written.
template <typename Table, typename Record>
void CompareWithSchema(const Json& properties, const Table& table, const Record& record, const Json& sent) {
  CHECK(KeysOf(properties) == SetOf(table));
  ForEach(table, [&](const auto& member) {
    CAPTURE(member.name);
    const Json& schema = properties.at(member.name);
    CheckSchema(schema, member.values);
    if (!schema.contains("default")) return;
    const auto& value = record.*member.value;
    if (sent.contains(member.name))
      CHECK(schema.at("default") == sent.at(member.name));
    else if constexpr (std::is_constructible_v<Json, decltype(value)>)
      CHECK(schema.at("default") == Json(value));
    else
      FAIL_CHECK("no default of this type is known");
  });
}

TEST_CASE("a run's record: the table has every member of the structs, once") {
  const auto count = [](const auto& table, const auto& members) {
    std::set<const void*> places;
    ForEach(table, [&](const auto& member) { places.insert(&(std::get<0>(members).*member.value)); });
    return places.size();
  };
  const Sampling sampling;
  const Fault fault;
  const RunOptions run;
  CHECK(count(kSamplingMembers, std::tie(sampling)) + 1 ==
        std::tuple_size_v<decltype(MembersOf(sampling))>);  // `most` is the request's `repeat`
  CHECK(count(kFaultMembers, std::tie(fault)) == std::tuple_size_v<decltype(MembersOf(fault))>);
  CHECK(count(kRunMembers, std::tie(run)) == std::tuple_size_v<decltype(MembersOf(run))>);
}

TEST_CASE("a run's record: the schema has the names, ranges and defaults of the table") {
  RunRequest defaults;
  const Json plain = ParseJson(SerializeRequest({std::nullopt, defaults}));
  defaults.sampling.emplace();
  defaults.fault.emplace();
  const Json sent = ParseJson(SerializeRequest({std::nullopt, defaults}));
  Json run = RunSchema();
  CompareWithSchema(run.at("sampling").at("properties"), kSamplingMembers, Sampling(), sent.at("sampling"));
  CompareWithSchema(run.at("fault").at("properties"), kFaultMembers, Fault(), sent.at("fault"));
  for (const char* name : {"op", "id", "params", "kwargs"}) CHECK(run.erase(name) == 1);
  CompareWithSchema(run, kRunMembers, RunOptions(), plain);
}

TEST_CASE("a run's record: the protocol's README has a row for each member, and names the features") {
  const std::string readme = SourceText("protocol/README.md");
  const auto check = [&](const auto& member) {
    CAPTURE(member.name);
    CHECK(readme.find("| `" + std::string(member.name) + "` | ") != std::string::npos);
  };
  ForEach(kRunMembers, check);
  ForEach(kSamplingMembers, check);
  const std::size_t fault = readme.find("\n`fault` has ");
  REQUIRE(fault != std::string::npos);
  const std::string members = readme.substr(fault, readme.find("\n\n", fault) - fault);
  ForEach(kFaultMembers, [&](const auto& member) {
    CAPTURE(member.name);
    CHECK(members.find("`" + std::string(member.name) + "` (") != std::string::npos);
  });
  const std::size_t begin = readme.find("\n#### Features\n");
  REQUIRE(begin != std::string::npos);
  const std::string features = readme.substr(begin, readme.find("\n#", begin + 1) - begin);
  const auto check_feature = [&](std::string_view name) {
    CAPTURE(name);
    CHECK(std::regex_search(features, std::regex("\\n\\| [^|]*`" + std::string(name) + "`[^|]*\\| ")));
  };
  for (const std::string_view name : kFeatures) check_feature(name);
  ForEach(kRunMembers, [&](const auto& member) {
    if (member.sent == Sent::kUnlessDefault) check_feature(member.name);
  });
}

// The names of the keyword arguments of Pool.run.
Names PythonKeywords() {
  const std::string text = SourceText("client/python/cppool/_pool.py");
  const std::size_t begin = text.find("    def run(self, ");
  REQUIRE(begin != std::string::npos);
  const std::string signature = text.substr(begin, text.find(") -> Result:", begin) - begin);
  const std::regex keyword(R"((\w+): )");
  Names names;
  for (std::sregex_iterator at(signature.begin(), signature.end(), keyword), end; at != end; ++at)
    names.insert((*at)[1]);
  return names;
}

TEST_CASE("a run's record: Python's keywords are members of the table") {
  const Names known = SetOf(kRunMembers, {"params", "kwargs", "more", "deadline"});  // the last in seconds
  const Names keywords = PythonKeywords();
  CHECK(keywords.count("perturb") == 1);
  CHECK(std::includes(known.begin(), known.end(), keywords.begin(), keywords.end()));
}

}  // namespace
}  // namespace cppool::protocol
