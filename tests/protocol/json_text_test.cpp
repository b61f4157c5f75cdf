#include "protocol/json_text.h"

#include "tests/protocol/support.h"

namespace cppool::protocol {
namespace {

using test::CheckText;
using test::Repeat;
using test::Thrown;

std::string ErrorOf(const std::string& text) {
  return Thrown<InvalidRequest>([&] { ParseJson(text); });
}

TEST_CASE("ParseJson returns the value of any JSON text") {
  for (const char* text : {R"({"a":[1,-2,0.5,true,false,null,"x",{}],"b":{"c":[[]],"a":1}})", "[]", "12",
                           R"("\u00e9\ud83d\ude00")", "null", "18446744073709551615", "-9223372036854775808",
                           R"({"":{"":{"":0}}})", R"([{"a":1},{"a":2},[{"a":3}]])"}) {
    CAPTURE(text);
    CHECK(ParseJson(text) == Json::parse(text));
  }
  CHECK(ParseJson(" \t{\"a\" : 1}\r\n") == Json{{"a", 1}});
}

TEST_CASE("invalid JSON text is refused with the position of the error") {
  struct Row {
    std::string text;
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      {"", {"empty line"}},
      {" \t\r\n", {"empty line"}},
      {"hello", {"not JSON", "column 1", "near \"h\""}},
      {"{", {"not JSON", "unexpected end of input"}},
      {"{\"a\":1}}", {"not JSON", "column 8", "near \"1}}\""}},
      {"{\"a\":1} {}", {"not JSON", "expected end of input"}},
      {"{'a':1}", {"not JSON"}},
      {"[1,]", {"not JSON"}},
      {"[01]", {"not JSON"}},
      {"[+1]", {"not JSON"}},
      {"[NaN]", {"not JSON"}},
      {"[Infinity]", {"not JSON"}},
      {"[1] // one", {"not JSON"}},
      {"[\"\x01\"]", {"not JSON", "control character"}},
      {"[\"\\x\"]", {"not JSON"}},
      {"[\"\\ud800\"]", {"not JSON", "surrogate"}},
      {"[\"\\udc00\"]", {"not JSON", "surrogate"}},
      {"[\"\\ud800\\ud800\"]", {"not JSON", "surrogate"}},
      {"[1e400]", {"\"1e400\"", "too large"}},
      {"[-1e400]", {"\"-1e400\"", "too large"}},
      {std::string("[").append(1000, '9').append("]"), {"\"9999", "...\"", "too large"}},
      {"[\"\xff\"]", {"not UTF-8 from byte 2", "\\xff"}},
      {"\xff", {"not UTF-8 from byte 0"}},
      {"[]\xc3", {"not UTF-8 from byte 2"}},
      {"[\"\xc0\x80\"]", {"not UTF-8"}},          // overlong NUL
      {"[\"\xe0\x80\x80\"]", {"not UTF-8"}},      // overlong NUL, three bytes
      {"[\"\xf0\x80\x80\x80\"]", {"not UTF-8"}},  // overlong NUL, four bytes
      {"[\"\xed\xa0\x80\"]", {"not UTF-8"}},      // a surrogate
      {"[\"\xf4\x90\x80\x80\"]", {"not UTF-8"}},  // past U+10FFFF
      {"[\"\xe2\x82\"]", {"not UTF-8"}},          // cut off
      {std::string("[]\0", 3), {"NUL byte at byte 2"}},
      {std::string("[]\0[]", 5), {"NUL byte at byte 2"}},
      {std::string("[\"a\0b\"]", 7), {"NUL byte at byte 3"}},
      {R"({"a":1,"a":2})", {"\"a\" is given twice"}},
      {R"([{"b":{"x":1,"y":2,"x":3}}])", {"\"x\" is given twice"}},
      {R"({"id":1,"id":1})", {"\"id\" is given twice"}},
      {"{\"" + std::string(5000, 'k') + "\":1,\"" + std::string(5000, 'k') + "\":1}",
       {"kkk...\" is given twice"}},
      {"\"" + std::string(5000, 'k') + "\\x\"", {"not JSON", "kkk...\""}},
      {"\"; last read: 'k'; expected " + std::string(5000, 'k'), {"not JSON", "missing closing quote; near"}},
  };
  for (const Row& row : rows) {
    CAPTURE(row.text.substr(0, 60));
    CheckText(ErrorOf(row.text), row.parts);
  }
}

TEST_CASE("a quoted text contains no character that controls a terminal") {
  struct Row {
    const char *given, *shown;
  };
  const Row rows[] = {
      {"a\x1b[2Jb", "\"a\\x1b[2Jb\""},
      {"\n\r\t\x7f", "\"\\n\\r\\t\\x7f\""},
      {"\xc2\x80\xc2\x9b"
       "2J\xc2\x9f",
       "\"\\u0080\\u009b2J\\u009f\""},                                    // C1 control characters
      {"\xc2\xa0\xc3\xa9", "\"\xc2\xa0\xc3\xa9\""},                       // the first characters after them
      {"\xd8\x9c\xe2\x80\x8e\xe2\x80\x8f", "\"\\u061c\\u200e\\u200f\""},  // direction marks
      {"\xe2\x80\xa8\xe2\x80\xa9", "\"\\u2028\\u2029\""},                 // line and paragraph separators
      {"\xe2\x80\xaa"
       "a\xe2\x80\xae",
       "\"\\u202aa\\u202e\""},  // bidirectional embeddings and overrides
      {"\xe2\x81\xa6"
       "a\xe2\x81\xa9",
       "\"\\u2066a\\u2069\""},  // bidirectional isolates
      {"\xe2\x80\x8d\xe2\x80\xaf\xe2\x81\xa5\xe2\x81\xaa",
       "\"\xe2\x80\x8d\xe2\x80\xaf\xe2\x81\xa5\xe2\x81\xaa\""},  // neighbouring characters, not escaped
      {"\xf0\x9f\x98\x80\xe6\xbc\xa2", "\"\xf0\x9f\x98\x80\xe6\xbc\xa2\""},
      {"\x9b", "\"\\x9b\""},  // not UTF-8
  };
  for (const Row& row : rows) {
    CAPTURE(row.given);
    CHECK(Quoted(row.given) == row.shown);
  }
  // The same holds for JSON text in an error, here the name of an unknown key.
  const std::string error =
      Thrown<InvalidRequest>([] { ParseRequest(R"({"op":"run","\u009b31m\u202e":1})"); });
  CheckText(error, {"\\u009b31m\\u202e"});
}

TEST_CASE("nesting is limited without recursion") {
  CHECK(ErrorOf(Repeat("[", 64) + Repeat("]", 64)).empty());
  CheckText(ErrorOf(Repeat("[", 65) + Repeat("]", 65)), {"nested deeper than 64"});
  CHECK(ErrorOf(Repeat("{\"a\":", 63) + "{}" + Repeat("}", 63)).empty());
  CheckText(ErrorOf(Repeat("{\"a\":", 64) + "{}" + Repeat("}", 64)), {"nested deeper than 64"});
  for (const char* open : {"[", "{\"a\":", "[{\"a\":", " [ "}) {
    CAPTURE(open);
    CheckText(ErrorOf(Repeat(open, 200'000)), {"nested deeper than 64"});
  }
  CheckText(ErrorOf(Repeat("[", 200'000) + Repeat("]", 200'000)), {"nested deeper than 64"});
  CheckText(ErrorOf(Repeat("{\"a\":", 200'000) + "1" + Repeat("}", 200'000)), {"nested deeper than 64"});
  CHECK(ErrorOf(std::string("[\"") + Repeat("[{", 1000) + "\\\"" + Repeat("[", 1000) + "\"]")
            .empty());                                                     // brackets in a string are text
  CHECK(ErrorOf(std::string("[") + Repeat("[],", 1000) + "[]]").empty());  // width is not depth
  CHECK(ParseJson(Repeat("[", 100) + Repeat("]", 100), 100).is_array());
  CheckText(Thrown<InvalidRequest>([] { ParseJson("[[[]]]", 2); }), {"nested deeper than 2"});
}

}  // namespace
}  // namespace cppool::protocol
