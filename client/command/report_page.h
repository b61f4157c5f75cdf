// The page that `cppool report` and --html write: one HTML file that needs no other. It has the records of
// runs and benches as JSON, and what shows them: report.html with its scripts, and Chart.js where the build
// has it. Texts of records are data there and never markup.
#pragma once

#include <string>

#include <cppool/pool.h>

namespace cppool::command {

class ReportPage {
 public:
  // What follows comes from here, a file or a command: it has sections of its own.
  void Begin(const std::string& from);
  // Takes an object that `run --json` or `bench --json` prints, and keeps of it what the page shows. Throws
  // UsageError with what is wrong.
  void Add(const Json& record);
  // Takes what `bench --save` writes.
  void AddSaved(const Json& saved);
  // Reads a file of such an object per line, or of `bench --save`. Throws UsageError that names file and
  // line.
  void Read(const std::string& file);

  int count(const std::string& kind) const;  // of "run": cells; of "bench": rows
  std::string Html() const;
  // Replaces the file at once. Throws base::FileError with the reason.
  void Write(const std::string& file) const;

 private:
  Json& PartOf(const std::string& kind);

  std::string from_;
  bool open_ = false;           // the last part takes further records
  Json parts_ = Json::array();  // each with `from`, `kind`, `records` and `summary`
};

// The files that are built in: "report", "report_run", "report_bench", and "chart", which is empty without
// Chart.js.
std::string ReportText(const std::string& name);

}  // namespace cppool::command
