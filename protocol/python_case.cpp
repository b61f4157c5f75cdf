// The member `python` of a run: which case in Python is to run on processes.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "protocol/json_text.h"
#include "protocol/request.h"
#include "protocol/schema.h"
#include "protocol/text.h"

namespace cppool::protocol {
namespace {

constexpr const char* kTargets[] = {"function", "script", "pytest"};
// What each target may have beside it.
constexpr std::pair<const char*, const char*> kArguments[] = {
    {"kwargs", "function"}, {"argv", "script"}, {"nodeid", "pytest"}, {"next", "pytest"}};

[[noreturn]] void Refuse(const std::string& member, const std::string& wanted, const Json& value) {
  throw InvalidRequest("the " + Quoted(member) + " of \"python\" must be " + wanted + ", not " +
                       EchoValue(value));
}

bool IsText(const Json& json) {
  return json.is_string() && json.get_ref<const std::string&>().find('\0') == std::string::npos;
}

bool IsPath(const Json& json) { return IsText(json) && json.get_ref<const std::string&>().starts_with('/'); }

template <typename Is>
void RequireList(const Json& python, const char* member, const char* what, Is is) {
  const auto found = python.find(member);
  if (found == python.end()) return;
  if (!found->is_array() || !std::all_of(found->begin(), found->end(), is))
    Refuse(member, std::string("a list of ") + what, *found);
}

// Values may be secrets: no error has one.
void CheckEnvironment(const Json& python) {
  const auto found = python.find("env");
  if (found == python.end()) return;
  if (!found->is_object())
    throw InvalidRequest("the \"env\" of \"python\" must be an object of variables, each a string or null");
  for (const auto& [name, value] : found->items()) {
    if (name.empty() || name.find('=') != std::string::npos || name.find('\0') != std::string::npos)
      throw InvalidRequest("the \"env\" of \"python\" has a name that no variable can have: " + Quoted(name));
    if (!value.is_null() && !IsText(value))
      throw InvalidRequest("the value of " + Quoted(name) +
                           " in \"env\" must be a string without NUL, or null");
  }
}

}  // namespace

void CheckPythonCase(const Json& python) {
  if (!python.is_object()) throw InvalidRequest("\"python\" must be an object, not " + EchoValue(python));
  static const std::vector<std::string> known = {"function", "kwargs", "script", "argv",  "pytest", "nodeid",
                                                 "next",     "path",   "cwd",    "roots", "env",    "seed"};
  for (const auto& [key, value] : python.items())
    if (std::ranges::find(known, key) == known.end())
      throw InvalidRequest(Unknown("key", key, known, " in \"python\""));
  std::string target;
  for (const char* name : kTargets) {
    if (!python.contains(name)) continue;
    if (!target.empty())
      throw InvalidRequest("\"python\" has both " + Quoted(target) + " and " + Quoted(name) + ": give one");
    target = name;
  }
  if (target.empty()) throw InvalidRequest("\"python\" has none of \"function\", \"script\" and \"pytest\"");
  for (const auto& [argument, of] : kArguments)
    if (python.contains(argument) && target != of)
      throw InvalidRequest("the " + Quoted(argument) + " of \"python\" is for " + Quoted(of) + ", not " +
                           Quoted(target));
  const Json& what = python.at(target);
  if (target == "function") {
    const std::string text = IsText(what) ? what.get<std::string>() : "";
    const std::size_t colon = text.rfind(':');  // the path may have some, too
    if (colon == 0 || colon == std::string::npos || colon + 1 == text.size() ||
        text.find('/', colon) != std::string::npos)
      Refuse("function", "\"FILE.py:NAME\"", what);
    if (python.contains("kwargs") && !python.at("kwargs").is_object())
      Refuse("kwargs", "an object", python.at("kwargs"));
  } else if (target == "script") {
    if (!IsText(what) || what == "") Refuse("script", "a path", what);
    RequireList(python, "argv", "strings", IsText);
  } else {
    RequireList(python, "pytest", "arguments, which are strings", IsText);
    if (!python.contains("nodeid") || !IsText(python.at("nodeid")) || python.at("nodeid") == "")
      throw InvalidRequest("the \"pytest\" of \"python\" needs a \"nodeid\": the item to run");
    if (python.contains("next") && !python.at("next").is_null() && !IsText(python.at("next")))
      Refuse("next", "the node id of the item to come, or null", python.at("next"));
  }
  RequireList(python, "path", "strings", IsText);
  RequireList(python, "roots", "absolute paths", IsPath);
  if (python.contains("cwd") && !IsPath(python.at("cwd")))
    Refuse("cwd", "an absolute path", python.at("cwd"));
  if (const auto seed = python.find("seed"); seed != python.end() && !seed->is_number_unsigned())
    Refuse("seed", "an integer from 0 to 18446744073709551615", *seed);
  CheckEnvironment(python);
}

Json ParsePythonCase(const std::string& text, const std::string& folder) {
  Json python = ParseJson(text);
  const std::filesystem::path from = python.contains("cwd") ? python.at("cwd").get<std::string>() : folder;
  for (const char* target : {"function", "script"})
    if (python.contains(target))
      python[target] = std::filesystem::absolute(from / python.at(target).get<std::string>()).string();
  return python;
}

std::string NameOfPythonCase(const Json& python) {
  if (python.contains("pytest")) return python.at("nodeid");
  const std::string text = python.at(python.contains("function") ? "function" : "script");
  return text.substr(text.rfind('/') + 1);
}

}  // namespace cppool::protocol
