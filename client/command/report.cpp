// `cppool report FILE... -o FILE`: a page of what runs and benches have printed or saved as JSON.
#include <memory>
#include <string>
#include <vector>

#include "base/file_cache.h"
#include "client/command/command.h"
#include "client/command/report_page.h"
#include "client/suite/value_text.h"

namespace cppool::command {
namespace {

int Report(const std::vector<std::string>& files, const std::string& output, const Streams& streams) {
  CheckCanWrite("-o", output);
  ReportPage page;
  for (const std::string& file : files) page.Read(file);
  try {
    page.Write(output);
  } catch (const base::FileError& error) {
    streams.err << "cppool: " << error.what() << "\n";
    return kFailure;
  }
  streams.out << output << ": " << page.count("run") << " cells of runs, " << page.count("bench")
              << " rows of benches\n";
  return kSuccess;
}

}  // namespace

void AddReport(CLI::App& app, const Streams& streams, int* exit_code) {
  auto files = std::make_shared<std::vector<std::string>>();
  auto output = std::make_shared<std::string>();
  CLI::App* report = app.add_subcommand("report", "Makes a page of what runs and benches have written");
  report
      ->add_option("FILE", *files,
                   "What `cppool run --json` or `cppool bench --json` has printed, or `cppool bench --save` "
                   "written")
      ->required()
      ->check(IsPath)
      ->check(IsUtf8);
  report->add_option("-o,--output", *output, "The page: one HTML file that needs no other")
      ->required()
      ->check(IsPath);
  report->callback([files, output, streams, exit_code] { *exit_code = Report(*files, *output, streams); });
}

}  // namespace cppool::command
