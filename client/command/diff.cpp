// `cppool diff FOLDER`: where the results of a dump are furthest from what they are compared with, in words
// and as a picture.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <cppool/result.h>

#include "base/file_cache.h"
#include "base/new_file.h"
#include "base/npy.h"
#include "client/command/command.h"
#include "client/command/junit.h"
#include "client/suite/value_text.h"

#include "protocol/json_text.h"

namespace cppool::command {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kColumns = 256;  // of the picture, for all tokens of a sequence
constexpr int kWidth = 1024, kRow = 14, kLeft = 60;

// The errors of one tensor by head and part of the tokens.
struct Map {
  std::string title;
  std::vector<std::string> rows;
  std::int64_t columns = 0;
  std::vector<double> errors;  // [rows][columns]; NaN: nothing is compared there
  double tolerance = 0;        // 0: not known
};

struct Difference {
  Check check;
  Map map;
};

// Returns the axes of a tensor in the words of a failed check: a tensor with queries and keys (dbias) keeps
// them apart.
std::vector<std::string> WordsOf(std::vector<std::string> axes) {
  const auto has = [&](const char* axis) { return std::ranges::find(axes, axis) != axes.end(); };
  const bool both = has("query") && has("key");
  for (std::string& axis : axes) {
    if (axis == "batch") axis = "sequence";
    if (axis == "kv_head") axis = "head";
    if (!both && (axis == "query" || axis == "key")) axis = "token";
  }
  return axes;
}

// Compares `count` elements a time, so that a tensor of any size fits.
constexpr std::int64_t kChunk = 1 << 18;

class Folder {
 public:
  // `path`: a dump, or a folder of --failures with one.
  explicit Folder(std::string path) : path_(std::move(path)) {
    if (!fs::is_directory(path_)) throw suite::UsageError("there is no folder " + path_);
    if (!fs::exists(fs::path(path_) / "index.json") && fs::exists(fs::path(path_) / "dump" / "index.json"))
      path_ = (fs::path(path_) / "dump").string();
    const fs::path file = fs::path(path_) / "index.json";
    std::ifstream in(file);
    index_ = in ? Json::parse(in, nullptr, false) : Json();
    if (!index_.is_object() || !index_.contains("files") || !index_["files"].is_object())
      throw suite::UsageError(file.string() +
                              " is not that of a dump: give a folder that `cppool run --dump` has written");
  }

  // Every output with what it is compared with.
  std::vector<Difference> Compare() const {
    std::vector<Difference> differences;
    for (const char* against : {"oracle", "no_cp"}) {
      for (const auto& [name, about] : index_["files"].items()) {
        if (about.value("run", "") != against) continue;
        const std::string tensor = about.value("tensor", "");
        const std::string ours = tensor + ".npy";
        if (index_["files"].contains(ours))
          differences.push_back(CompareFiles(tensor, against, ours, name, about));
      }
    }
    return differences;
  }

 private:
  Difference CompareFiles(const std::string& tensor, const std::string& against, const std::string& ours,
                          const std::string& wanted, const Json& about) const {
    const base::NpyReader a((fs::path(path_) / ours).string()), b((fs::path(path_) / wanted).string());
    if (a.header().shape != b.header().shape)
      throw suite::UsageError(ours + " has the shape " + base::ShapeText(a.header().shape) + ", and " +
                              wanted + " " + base::ShapeText(b.header().shape));
    const std::vector<std::int64_t>& shape = a.header().shape;
    const auto axes = about.value("axes", std::vector<std::string>());
    if (axes.size() != shape.size()) throw suite::UsageError(wanted + " has not the axes of its index");
    Difference found;
    Check& check = found.check;
    check.tensor = tensor;
    check.against = against;
    const Json of_tensor = index_.value("tolerances", Json::object()).value(tensor, Json::object());
    check.tolerance = of_tensor.value(against, 0.0);
    const std::vector<std::string> words = WordsOf(axes);
    // The picture's axes: heads, or what else there is, over tokens.
    const auto axis = [&](std::initializer_list<const char*> names) {
      for (const char* name : names) {
        const auto at = std::ranges::find(axes, name);
        if (at != axes.end()) return static_cast<std::size_t>(at - axes.begin());
      }
      return axes.size();
    };
    const std::size_t head = axis({"head", "kv_head"}), token = axis({"token", "query", "key", "seqlen"}),
                      batch = axis({"batch"});
    const auto size = [&](std::size_t at) { return at < shape.size() ? shape[at] : 1; };
    Map& map = found.map;
    map.columns = std::min(size(token), kColumns);
    for (std::int64_t sequence = 0; sequence < size(batch); ++sequence)
      for (std::int64_t each = 0; each < size(head); ++each)
        map.rows.push_back((size(batch) > 1 ? std::to_string(sequence) + ", " : "") + std::to_string(each));
    map.errors.assign(map.rows.size() * static_cast<std::size_t>(map.columns),
                      std::numeric_limits<double>::quiet_NaN());
    map.tolerance = check.tolerance;

    std::vector<std::int64_t> index(shape.size(), 0);
    std::vector<double> got(kChunk), right(kChunk);
    std::uint64_t compared = 0, bad = 0;
    double worst = -1, sum_err = 0, sum_ref = 0;
    for (std::int64_t first = 0; first < a.count(); first += kChunk) {
      const std::int64_t count = std::min(kChunk, a.count() - first);
      a.Read(first, count, got.data());
      b.Read(first, count, right.data());
      for (std::int64_t i = 0; i < count; ++i) {
        const double x = got[static_cast<std::size_t>(i)], y = right[static_cast<std::size_t>(i)];
        if (!(against == "oracle" && std::isnan(y))) {  // else it was not computed
          const double error = x == y                                 ? 0
                               : std::isfinite(x) && std::isfinite(y) ? std::abs(x - y)
                                                                      : kInfinity;
          ++compared;
          if (error > worst) {
            worst = error;
            check.worst = Worst{Json::object(), x, y};
            for (std::size_t at = 0; at < axes.size(); ++at) check.worst->index[words[at]] = index[at];
          }
          if (std::isfinite(error)) {
            sum_err += error * error;
            sum_ref += y * y;
          }
          if (check.tolerance > 0 && error > check.tolerance) ++bad;
          const std::int64_t row = (batch < shape.size() ? index[batch] : 0) * size(head) +
                                   (head < shape.size() ? index[head] : 0);
          const std::int64_t column = token < shape.size() ? index[token] * map.columns / size(token) : 0;
          double& cell = map.errors[static_cast<std::size_t>(row * map.columns + column)];
          cell = std::isnan(cell) ? error : std::max(cell, error);
        }
        for (std::size_t at = axes.size(); at-- > 0;) {
          if (++index[at] < shape[at]) break;
          index[at] = 0;
        }
      }
    }
    check.max_abs_err = worst < 0 ? 0 : worst;
    check.rel_err = sum_ref > 0 ? std::sqrt(sum_err / sum_ref) : 0;
    check.ok = compared == 0 || (check.tolerance > 0 && bad == 0);
    if (check.tolerance > 0) check.bad = bad;
    map.title = tensor + " against " + against + (compared == 0 ? ": not computed" : "");
    return found;
  }

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::string path_;
  Json index_;
};

// White: no error. Blue up to the tolerance, then red; black: infinite or NaN. Grey: not compared.
std::string ColourOf(double error, double most, double tolerance) {
  if (std::isnan(error)) return "#ddd";
  if (std::isinf(error)) return "#000";
  const double limit = tolerance > 0 ? tolerance : most;
  const double share = limit > 0 ? error / limit : 0;
  std::ostringstream text;
  if (tolerance > 0 && share > 1) {
    const int dark = static_cast<int>(200 - 40 * std::min(4.0, std::log10(share) + 1));
    text << "rgb(255," << std::max(0, dark) << "," << std::max(0, dark) << ")";
  } else {
    const int rest = static_cast<int>(250 - 140 * std::min(1.0, share));
    text << "rgb(" << rest << "," << rest << ",255)";
  }
  return text.str();
}

std::string Picture(const std::vector<Difference>& differences) {
  std::ostringstream body;
  int y = 10;
  for (const auto& [check, map] : differences) {
    double most = 0;
    for (const double error : map.errors)
      if (std::isfinite(error)) most = std::max(most, error);
    body << "<text x=\"10\" y=\"" << y + 12 << "\">" << XmlEscape(map.title) << "</text>\n";
    y += 20;
    const double width = static_cast<double>(kWidth) / static_cast<double>(map.columns);
    for (std::size_t row = 0; row < map.rows.size(); ++row, y += kRow) {
      body << "<text x=\"10\" y=\"" << y + 11 << "\">" << XmlEscape(map.rows[row]) << "</text>\n";
      const double* const errors = &map.errors[row * static_cast<std::size_t>(map.columns)];
      for (std::int64_t begin = 0, end = 0; begin < map.columns; begin = end) {
        const std::string colour = ColourOf(errors[begin], most, map.tolerance);
        do ++end;
        while (end < map.columns && ColourOf(errors[end], most, map.tolerance) == colour);
        body << "<rect x=\"" << kLeft + width * static_cast<double>(begin) << "\" y=\"" << y << "\" width=\""
             << width * static_cast<double>(end - begin) << "\" height=\"" << kRow - 1 << "\" fill=\""
             << colour << "\"/>";
      }
      body << "\n";
    }
    y += 10;
  }
  std::ostringstream text;
  text << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << kLeft + kWidth + 20 << "\" height=\"" << y
       << "\" font-family=\"sans-serif\" font-size=\"11\" shape-rendering=\"crispEdges\">\n"
       << "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
       << body.str() << "</svg>\n";
  return text.str();
}

int Diff(const std::string& path, const Streams& streams) {
  const Folder folder(path);
  const std::vector<Difference> differences = folder.Compare();
  if (differences.empty())
    throw suite::UsageError(path + " has nothing to compare with: dump a run with checks");
  bool holds = true;
  for (const Difference& each : differences) {
    const Check& check = each.check;
    streams.out << each.map.title;
    if (check.worst) {
      streams.out << ": max_abs_err " << check.max_abs_err << ", rel_err " << check.rel_err;
      if (check.tolerance > 0) streams.out << ", tolerance " << check.tolerance;
      Check worst = check;
      if (worst.bad == 0u) worst.bad.reset();
      streams.out << "; " << DescribeWorst(worst);
    }
    streams.out << "\n";
    holds = holds && (!check.bad || *check.bad == 0);
  }
  const std::string picture = (fs::path(path) / "diff.svg").string();
  base::NewFile file(picture);
  file.Write(Picture(differences));
  file.Commit();
  streams.out << "the errors by head and token: " << picture << "\n";
  return holds ? kSuccess : kFailure;
}

}  // namespace

void AddDiff(CLI::App& app, const Streams& streams, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "diff", "Says where the results of a dump are furthest from what they are compared with, and draws it");
  auto folder = std::make_shared<std::string>();
  command->add_option("FOLDER", *folder, "What `cppool run --dump` has written")->required();
  command->callback([=, &streams] {
    try {
      *exit_code = Diff(*folder, streams);
    } catch (const base::NpyError& error) {
      throw suite::UsageError(error.what());
    } catch (const base::FileError& error) {
      throw suite::UsageError(error.what());
    }
  });
}

}  // namespace cppool::command
