#include <cstddef>
#include <functional>
#include <string>

#include "daemon/case_registry.h"
#include "daemon/start_error.h"
#include "tests/daemon/fake_case.h"
#include "tests/files.h"

namespace cppool::test {
namespace {

std::string Refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const daemon::StartError& error) {
    return error.what();
  }
  return "";
}

std::string RefusalOf(const cppool_case& definition) {
  return Refusal([&] {
    daemon::CaseRegistry registry;
    registry.Add(&definition, "FILE.so");
  });
}

std::string RefusalOf(const cppool_parameter& parameter) {
  cppool_case definition = *FakeCase();
  definition.parameters = &parameter;
  definition.parameter_count = 1;
  return RefusalOf(definition);
}

}  // namespace

TEST_CASE("a case is found by its name, with its schema") {
  daemon::CaseRegistry registry;
  registry.Add(FakeCase(), "a test");
  CHECK_FALSE(registry.Find("fak"));
  const auto* found = registry.Find("fake");
  REQUIRE(found);
  CHECK(found->definition == FakeCase());
  REQUIRE(found->schema.size() == 7);
  CHECK(found->schema[1].minimum == 0);
  CHECK(found->schema[1].maximum == 63);
  CHECK_FALSE(found->schema[3].minimum);
  CHECK(found->schema[4].default_value->is_null());
  CHECK(Has(Refusal([&] { registry.Add(FakeCase(), "FILE.so"); }), "'fake' is taken (a test)"));
}

TEST_CASE("a case with another ABI, or with an invalid definition, is refused with the reason") {
  cppool_case definition = *FakeCase();
  CHECK(RefusalOf(definition).empty());
  definition.abi = 7;
  CHECK(Has(RefusalOf(definition), "rebuild it"));
  definition = *FakeCase();
  definition.struct_size = 8;
  CHECK(Has(RefusalOf(definition), "8 bytes"));
  definition.struct_size = offsetof(cppool_case, features);
  CHECK(Has(RefusalOf(definition), "or more"));
  for (const char* name : {"", "a b", "caf\xc3\xa9", static_cast<const char*>(nullptr)}) {
    definition = *FakeCase();
    definition.name = name;
    CHECK(Has(RefusalOf(definition), "name is empty"));
  }
  definition = *FakeCase();
  definition.run = nullptr;
  CHECK(Has(RefusalOf(definition), "no run function"));
  definition = *FakeCase();
  definition.parameters = nullptr;
  CHECK(Has(RefusalOf(definition), "no parameters"));
  const cppool_parameter twice[] = {FakeCase()->parameters[0], FakeCase()->parameters[0]};
  definition = *FakeCase();
  definition.parameters = twice;
  definition.parameter_count = 2;
  CHECK(Has(RefusalOf(definition), "action is given twice"));
}

TEST_CASE("a case that was built with more members than this daemon knows is loaded") {
  cppool_case definition = *FakeCase();
  definition.features = ~0U;
  definition.name = "newer";
  definition.struct_size = sizeof(cppool_case) + 64;
  daemon::CaseRegistry registry;
  registry.Add(&definition, "newer");
  CHECK(registry.Find("newer")->features == ~0U);
}

TEST_CASE("a schema that contradicts itself is refused, and the error names the parameter") {
  const cppool_parameter good{"p", CPPOOL_TYPE_INTEGER, "2", "[1, 2]", 0, 3, 0, "doc"};
  CHECK(RefusalOf(good).empty());
  const auto with = [&](auto change) {
    cppool_parameter parameter = good;
    change(parameter);
    return RefusalOf(parameter);
  };
  CHECK(Has(with([](auto& p) { p.default_json = "3"; }), "parameter p: the default does not fit"));
  CHECK(Has(with([](auto& p) { p.default_json = "two"; }), "not JSON"));
  CHECK(Has(with([](auto& p) { p.default_json = "2.5"; }), "the default does not fit"));
  CHECK(Has(with([](auto& p) { p.allowed_json = "[1, 2, 9]"; }), "an allowed value does not fit"));
  CHECK(Has(with([](auto& p) { p.allowed_json = "[]"; }), "not an array of values"));
  CHECK(Has(with([](auto& p) { p.minimum = 5; }), "minimum is above"));
  CHECK(Has(with([](auto& p) { p.type = static_cast<cppool_type>(77); }), "cppool_type"));
  CHECK(Has(with([](auto& p) { p.name = "a b"; }), "name is empty"));
  CHECK(with([](auto& p) { p.default_json = nullptr; }).empty());
  CHECK(with([](auto& p) { p.default_json = "null"; }).empty());
  CHECK(with([](auto& p) { p.doc = nullptr; }).empty());
}

}  // namespace cppool::test
