// `cppool bench --resume`: the points that an earlier bench has measured are taken from its file.
#pragma once

#include <string>

#include "client/command/bench_records.h"

namespace cppool::command {

class ResumedBench {
 public:
  // Reads a file that Save or --save has written; one that is not there has no rows. Throws UsageError when
  // it cannot be read or written, is another file, or was measured in another way than `plan`.
  ResumedBench(const std::string& file, const BenchPlan& plan);

  // Throws UsageError when the file was measured on other worlds, by another version, or with another content
  // of a library.
  void Check(const BenchResults& now) const;
  // Sets the row's measurements to those of the file. False: it has none, or the row was not measured.
  bool Take(BenchRow* row) const;
  // Replaces the file by one with these results and with the rows that it had beside them. Throws
  // base::FileError.
  void Save(const BenchResults& results) const;

  const std::string& file() const { return file_; }

 private:
  [[noreturn]] void Refuse(const std::string& why) const;

  const std::string file_;
  Json content_;  // null: there was no file
};

}  // namespace cppool::command
