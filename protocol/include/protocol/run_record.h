// The record of a run, RunOptions, as a table: what a request calls each of its members, and the values that
// it may have. Requests are read and written by it, and so is the command that repeats a run.
// cppool/run_options.h, schema/request.schema.json and README.md are written by hand;
// tests/protocol/run_record_test.cpp compares them with it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <cppool/run_options.h>
#include "protocol/kernel_choice.h"

namespace cppool::protocol {

// What a member may be.
struct Any {};
struct Integers {
  std::int64_t minimum, maximum;
};
struct Numbers {
  double minimum, maximum;
};
struct Text {             // never empty
  const char* what;       // in an error's text: "a folder's path"
  bool is_path = false;   // it has no NUL character
  bool required = false;  // in its object
};
struct Libraries {};   // paths
struct Digests {};     // by path
struct PythonCase {};  // as JSON text
// A tuple of Members: an object.

// When a request that is written has the member.
enum class Sent {
  kAlways,
  kUnlessDefault,  // the default is that of RunOptions; the member came after protocol 1.0, and its name is a
                   // feature
};

template <typename Record, typename Value, typename Values>
struct Member {
  const char* name;  // in a request
  Value Record::*value;
  Values values;
  Sent sent = Sent::kAlways;
  const char* option = nullptr;  // the option of `cppool run` that sets it; null: none does
};
template <typename Record, typename Value, typename Values>
Member(const char*, Value Record::*, Values, Sent = {}, const char* = nullptr)
    -> Member<Record, Value, Values>;

inline constexpr std::int64_t kLongestMs = 86'400'000;

inline constexpr std::tuple kSamplingMembers(Member{"precision", &Sampling::precision, Numbers{0.0001, 1}},
                                             Member{"max_ms", &Sampling::limit, Integers{1, kLongestMs}});

inline constexpr std::tuple kFaultMembers(
    Member{"kind", &Fault::kind, Text{.what = "a string", .required = true}},
    Member{"rank", &Fault::rank, Integers{0, 1'000'000}},
    Member{"stage", &Fault::stage, Text{"the name of a mark, or how it begins"}, Sent::kUnlessDefault},
    Member{"count", &Fault::count, Integers{1, 1'000'000}});

// `repeat` of a request is Sampling::most where there is `sampling`.
inline constexpr std::tuple kRunMembers(
    Member{"case", &RunOptions::case_name, Text{"a case's name"}},
    Member{"deadline_ms", &RunOptions::deadline, Integers{1, kLongestMs}, Sent::kAlways, "--deadline"},
    Member{"warmup", &RunOptions::warmup, Integers{0, 1000}},
    Member{"repeat", &RunOptions::repeat, Integers{1, 10000}}, Member{"checks", &RunOptions::checks, Any{}},
    Member{"perturb", &RunOptions::perturb, Integers{0, INT64_MAX}, Sent::kUnlessDefault, "--perturb"},
    Member{"dump", &RunOptions::dump, Text{"a folder's path", true}, Sent::kUnlessDefault, "--dump"},
    Member{"inputs", &RunOptions::inputs, Text{"a folder's path", true}, Sent::kUnlessDefault, "--inputs"},
    Member{"trace", &RunOptions::trace, Text{"a file's path", true}, Sent::kUnlessDefault, "--trace"},
    Member{"kernels", &RunOptions::kernels, Text{kKernelWordsAllowed}, Sent::kUnlessDefault, "--kernels"},
    Member{"fault", &RunOptions::fault, kFaultMembers, Sent::kUnlessDefault, "--fault"},
    Member{"sampling", &RunOptions::sampling, kSamplingMembers, Sent::kUnlessDefault},
    Member{"waits", &RunOptions::waits, Any{}, Sent::kUnlessDefault},
    Member{"profile", &RunOptions::profile, Any{}, Sent::kUnlessDefault},
    Member{"progress", &RunOptions::progress, Any{}, Sent::kUnlessDefault},
    Member{"load", &RunOptions::load, Libraries{}, Sent::kUnlessDefault},
    Member{"digests", &RunOptions::digests, Digests{}, Sent::kUnlessDefault},
    Member{"python", &RunOptions::python, PythonCase{}, Sent::kUnlessDefault},
    Member{"fresh", &RunOptions::fresh, Any{}, Sent::kUnlessDefault},
    Member{"own_group", &RunOptions::own_group, Any{}, Sent::kUnlessDefault},
    Member{"verdict", &RunOptions::verdict, Any{}, Sent::kUnlessDefault});

// The members that only runs on rank processes have, and those that runs on both kinds of ranks have. All
// others are for cases of libraries.
inline constexpr std::array<std::string_view, 4> kOfProcesses = {"python", "fresh", "own_group", "verdict"};
inline constexpr std::array<std::string_view, 7> kOfBoth = {"deadline_ms", "warmup",   "repeat", "checks",
                                                            "sampling",    "progress", "trace"};

// Calls `visit` with each member of a table, in order.
template <typename Table, typename Visit>
constexpr void ForEach(const Table& table, Visit visit) {
  std::apply([&](const auto&... member) { (visit(member), ...); }, table);
}

template <typename Value>
bool IsDefault(const Value& value, const Value& by_default) {
  return value == by_default;
}
template <typename Record>
bool IsDefault(const std::optional<Record>& value, const std::optional<Record>&) {
  return !value;
}

template <typename Table>
std::vector<std::string> NamesOf(const Table& table) {
  std::vector<std::string> names;
  ForEach(table, [&](const auto& member) { names.emplace_back(member.name); });
  return names;
}

}  // namespace cppool::protocol
