// A strict reader of the XML that JUnit files use; throws std::runtime_error if the text is not well-formed.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace cppool::test {

struct XmlNode {
  std::string name, text;
  std::map<std::string, std::string> attributes;
  std::vector<XmlNode> children;
};

class XmlReader {
 public:
  explicit XmlReader(const std::string& text) : text_(text) {}

  XmlNode Document() {
    for (unsigned char c : text_)
      if (c < 0x20 && c != '\t' && c != '\n' && c != '\r') Refuse("a control character");
    Expect("<?xml version=\"1.0\" encoding=\"UTF-8\"?>");
    Space();
    XmlNode root = Element();
    Space();
    if (at_ != text_.size()) Refuse("something after the root");
    return root;
  }

 private:
  [[noreturn]] void Refuse(const std::string& why) const {
    throw std::runtime_error("XML at " + std::to_string(at_) + ": " + why);
  }
  bool Next(const std::string& word) const { return text_.compare(at_, word.size(), word) == 0; }
  void Expect(const std::string& word) {
    if (!Next(word)) Refuse("expected " + word);
    at_ += word.size();
  }
  void Space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  std::string Name() {
    std::string name;
    auto in_name = [](unsigned char c) { return isalnum(c) || c == '_' || c == '-'; };
    while (at_ < text_.size() && in_name(static_cast<unsigned char>(text_[at_]))) name += text_[at_++];
    if (name.empty()) Refuse("expected a name");
    return name;
  }
  std::string Text(char end) {
    std::string result;
    while (at_ < text_.size() && text_[at_] != end) {
      if (text_[at_] == '<' || text_[at_] == '>') Refuse("markup in text");
      if (text_[at_] != '&') {
        result += text_[at_++];
        continue;
      }
      static const std::map<std::string, char> kEntities = {
          {"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}};
      bool known = false;
      for (const auto& [entity, character] : kEntities)
        if (!known && Next(entity)) {
          result += character;
          at_ += entity.size();
          known = true;
        }
      if (!known) Refuse("an unknown entity");
    }
    return result;
  }
  XmlNode Element() {
    XmlNode node;
    Expect("<");
    node.name = Name();
    for (Space(); !Next("/>") && !Next(">"); Space()) {
      std::string name = Name();
      Expect("=\"");
      if (!node.attributes.emplace(name, Text('"')).second) Refuse("an attribute twice");
      Expect("\"");
    }
    if (Next("/>")) {
      at_ += 2;
      return node;
    }
    Expect(">");
    for (;;) {
      node.text += Text('<');
      if (Next("</")) break;
      node.children.push_back(Element());
    }
    Expect("</" + node.name + ">");
    return node;
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

inline XmlNode ParseXml(const std::string& text) { return XmlReader(text).Document(); }
// The suite of a JUnit report, with its cases as children.
inline XmlNode JunitSuiteIn(const std::string& text) {
  XmlNode suite = ParseXml(text).children.at(0);
  std::erase_if(suite.children, [](const XmlNode& child) { return child.name == "properties"; });
  return suite;
}

}  // namespace cppool::test
