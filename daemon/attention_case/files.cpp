#include "daemon/attention_case/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <system_error>
#include <vector>

#include "base/file_cache.h"
#include "base/new_file.h"
#include "base/npy.h"
#include "base/words.h"
#include "daemon/attention_case/resolve.h"
#include "kernels/error.h"
#include "kernels/half.h"
#include "protocol/json_text.h"

namespace cppool::attention_case {
namespace {

namespace fs = std::filesystem;
using base::NpyError;
using base::NpyReader;
using base::NpyType;
using base::NpyWriter;
using kernels::Dtype;
using kernels::RuntimeError;
using kernels::StoredPart;
using kernels::StoredTensor;
using kernels::TensorInfo;

constexpr const char* kIndex = "index.json";

[[noreturn]] void Refuse(const char* key, const std::string& why) {
  throw Refused(CPPOOL_INVALID_REQUEST, std::string(key) + ": " + why);
}

// Whose tensor it is: that of the run, of the same kernels without CP, or of the oracle.
enum class Of { kCp, kNoCp, kOracle };
constexpr const char* kRuns[] = {"cp", "no_cp", "oracle"};

std::string FileOf(const TensorInfo& tensor, Of of = Of::kCp) {
  return tensor.name() + (of == Of::kCp ? "" : std::string("_") + kRuns[static_cast<int>(of)]) + ".npy";
}

// NumPy has no bf16: it is written as float32, which holds every value of it.
NpyType TypeOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
      return NpyType::kFloat16;
    case Dtype::kBf16:
    case Dtype::kFp32:
      return NpyType::kFloat32;
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      return NpyType::kUint8;
    case Dtype::kFp64:
      break;  // no tensor of a case
  }
  throw RuntimeError(CPPOOL_INTERNAL, std::string("no file type for ") + NameOf(dtype));
}

// The smallest magnitude that rounds to infinity: half a unit in the last place above the largest number.
double Limit(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16:
      return 65520;
    case Dtype::kBf16:
      return 0x1.FFp127;
    case Dtype::kFp32:
      return 0x1.FFFFFFp127;
    case Dtype::kFp64:
    case Dtype::kE4M3:
    case Dtype::kE5M2:
      break;
  }
  throw RuntimeError(CPPOOL_INTERNAL, std::string("no limit for ") + NameOf(dtype));
}

void CheckValues(const std::string& path, const NpyReader& file, Dtype dtype) {
  constexpr std::int64_t kChunk = 1 << 17;
  std::vector<double> values(static_cast<std::size_t>(std::min(kChunk, file.count())));
  const double limit = Limit(dtype);
  for (std::int64_t first = 0; first < file.count(); first += kChunk) {
    const std::int64_t count = std::min(kChunk, file.count() - first);
    file.Read(first, count, values.data());
    for (std::int64_t i = 0; i < count; ++i) {
      if (std::abs(values[i]) < limit) continue;  // false for NaN
      char number[32];
      std::snprintf(number, sizeof(number), "%.6g", values[i]);
      const std::string what = std::isnan(values[i]) ? "NaN"
                               : std::isinf(values[i])
                                   ? "an infinity"
                                   : std::string(number) + ", too large for " + NameOf(dtype);
      Refuse("inputs", path + ": element " + std::to_string(first + i) + " is " + what);
    }
  }
}

// Cumulated numbers of tokens and of places, by the name of the parameter.
std::map<std::string, std::vector<std::int64_t>> CuSeqlens(const kernels::AttentionSpec& spec) {
  const auto sums = [](const std::vector<std::int64_t>& lengths) {
    std::vector<std::int64_t> cumulated{0};
    for (const std::int64_t length : lengths) cumulated.push_back(cumulated.back() + length);
    return cumulated;
  };
  return {{"cu_seqlens_q", sums(spec.queries.length)},
          {"cu_seqlens_kv", sums(spec.keys.length)},
          {"cu_seqlens_q_padded", sums(spec.queries.room)},
          {"cu_seqlens_kv_padded", sums(spec.keys.room)}};
}

// The index of a dump; an empty object when there is none.
Json ReadIndex(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_regular_file(folder / kIndex, ignored)) return Json::object();
  std::ifstream file(folder / kIndex);
  Json index = Json::parse(file, nullptr, false);
  return index.is_object() ? index : Json::object();
}

// The tensors of a dump hold its sequences. Other places or longer sequences would read padding as tokens.
void CheckSequencesOf(const fs::path& folder, const kernels::AttentionSpec& spec) {
  const Json index = ReadIndex(folder);
  for (const auto& [name, values] : CuSeqlens(spec)) {
    const Json written = index.value(name, Json());
    if (!written.is_array()) continue;
    bool fits = written.size() == values.size();
    for (std::size_t i = 0; fits && i < values.size(); ++i) {
      if (name.ends_with("_padded")) {
        fits = written[i] == values[i];
      } else if (i > 0) {  // at most the dump's length
        fits =
            written[i].is_number_integer() && written[i - 1].is_number_integer() &&
            values[i] - values[i - 1] <= written[i].get<std::int64_t>() - written[i - 1].get<std::int64_t>();
      }
    }
    if (!fits) {
      Refuse("inputs", (folder / kIndex).string() + ": the tensors were dumped with " + name + " " +
                           protocol::EchoValue(written) + ", and the case has " +
                           protocol::EchoValue(Json(values)) +
                           ": give that dump's seed or cu_seqlens, or remove the index");
    }
  }
}

// Calls visit(tensor, of) for each file of a dump. `checked`: those that the results are compared with are
// among them.
template <typename Visit>
void ForEachFile(const kernels::AttentionSpec& spec, int world_size, bool checked, Visit&& visit) {
  for (const TensorInfo& tensor : InputTensors(spec)) visit(tensor, Of::kCp);
  for (const TensorInfo& tensor : OutputTensors(spec)) {
    visit(tensor, Of::kCp);
    if (!checked) continue;
    visit(tensor, Of::kNoCp);
    visit(tensor, Of::kOracle);
  }
  for (const TensorInfo& tensor : StoredTensors(spec, world_size)) visit(tensor, Of::kCp);
}

// The oracle is fp64: float32 is as good for looking at, and half as large.
NpyType TypeOf(const TensorInfo& tensor, Of of) {
  return of == Of::kOracle ? NpyType::kFloat32 : TypeOf(tensor.dtype);
}

// The format of a tensor's elements.
const char* FormatOf(const TensorInfo& tensor) {
  const auto* stored = std::get_if<StoredTensor>(&tensor.kind);
  if (stored && (stored->part == StoredPart::kRowExponents || stored->part == StoredPart::kColumnExponents))
    return "e8m0";
  return NameOf(tensor.dtype);
}

// A file that this dump would replace must be a regular file and no symbolic link, and the index must be that
// of a dump.
void CheckPlaces(const fs::path& folder, const kernels::AttentionSpec& spec, int world_size) {
  const auto check = [&](const std::string& name) {
    std::error_code error;
    const fs::file_type type = fs::symlink_status(folder / name, error).type();
    if (type == fs::file_type::symlink)
      Refuse("dump", (folder / name).string() +
                         " is a symbolic link, through which nothing is written: remove it, or name another "
                         "folder");
    if (type != fs::file_type::not_found && type != fs::file_type::regular && type != fs::file_type::none)
      Refuse("dump", (folder / name).string() + " exists and is not a file");
  };
  ForEachFile(spec, world_size, true, [&](const TensorInfo& tensor, Of of) { check(FileOf(tensor, of)); });
  check(kIndex);
  std::error_code ignored;
  const Json index = ReadIndex(folder);
  const auto has = [&](const char* key) { return index.contains(key) && index.at(key).is_object(); };
  if (fs::exists(folder / kIndex, ignored) && !(has("files") && has("parameters")))
    Refuse("dump",
           (folder / kIndex).string() +
               " is not that of a dump, and nothing in its folder is overwritten: name another folder");
}

[[noreturn]] void DumpFailed(const std::string& what) {
  throw RuntimeError(CPPOOL_INVALID_REQUEST, "dump: " + what);
}

}  // namespace

void CheckInputs(const std::string& folder, const kernels::AttentionSpec& spec) {
  std::error_code error;
  if (!fs::is_directory(folder, error))
    Refuse("inputs",
           "there is no folder " + protocol::Quoted(folder) + (error ? " (" + error.message() + ")" : ""));
  for (const TensorInfo& tensor : InputTensors(spec)) {
    const std::string path = (fs::path(folder) / FileOf(tensor)).string();
    try {
      const NpyReader file(path);
      if (file.header().shape != tensor.shape)
        Refuse("inputs", path + ": has shape " + base::ShapeText(file.header().shape) + " and must have " +
                             base::ShapeText(tensor.shape) + " (" + base::Join(tensor.axes) + ")");
      CheckValues(path, file, tensor.dtype);
    } catch (const NpyError& failed) {
      Refuse("inputs", failed.what());
    }
  }
  CheckSequencesOf(folder, spec);
}

void CheckDump(const std::string& folder, const char* inputs, const kernels::AttentionSpec& spec,
               int world_size) {
  std::error_code ignored;
  if (inputs && (fs::equivalent(folder, inputs, ignored) ||
                 fs::weakly_canonical(folder, ignored) == fs::weakly_canonical(inputs, ignored)))
    Refuse("dump", "is the folder of inputs, which would be overwritten: name another");
  // Only writing shows whether the folder, or the nearest existing parent that it would be made in, can be
  // written to. The folder itself is not made here: a concurrent check could find and remove it.
  fs::path at = fs::absolute(folder, ignored).lexically_normal();
  std::error_code error;
  while (fs::symlink_status(at, error).type() == fs::file_type::not_found && at.has_relative_path())
    at = at.parent_path();
  if (!error) {
    std::string probe = (at / ".cppool-XXXXXX").string();
    const int fd = mkostemp(probe.data(), O_CLOEXEC);
    if (fd < 0) {
      error.assign(errno, std::generic_category());
    } else {
      close(fd);
      unlink(probe.c_str());
    }
  }
  if (error) Refuse("dump", protocol::Quoted(folder) + " cannot be written to: " + error.message());
  CheckPlaces(folder, spec, world_size);
}

void InputFiles::ReadRow(const TensorInfo& tensor, std::int64_t row, double* to) {
  const std::string path = (fs::path(folder_) / FileOf(tensor)).string();
  try {
    auto file = files_.find(path);
    if (file == files_.end()) file = files_.emplace(path, NpyReader(path)).first;
    if (file->second.header().shape != tensor.shape) throw NpyError(path + ": has another shape than before");
    file->second.Read(row * tensor.columns, tensor.columns, to);
  } catch (const NpyError& error) {
    throw RuntimeError(CPPOOL_INVALID_REQUEST, std::string("inputs: ") + error.what());
  }
}

std::string DumpFiles::PathOf(const std::string& file) const { return (fs::path(folder_) / file).string(); }

DumpFiles::~DumpFiles() {
  if (lock_) flock(lock_.get(), LOCK_UN);  // also for a process that the case has forked
}

void DumpFiles::Begin() {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) DumpFailed(folder_ + ": cannot be made: " + error.message());
  lock_ = base::UniqueFd(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_) DumpFailed(folder_ + ": cannot be opened: " + std::strerror(errno));
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK)
      DumpFailed(folder_ +
                 ": another run is writing a dump into it: wait for that run, or name another folder");
    const bool has_no_locks = errno == ENOLCK || errno == EOPNOTSUPP || errno == ENOSYS;  // the file system
    if (!has_no_locks)
      DumpFailed(folder_ + ": cannot be locked: " + std::strerror(errno) + ": name another folder");
  }
  try {
    CheckPlaces(folder_, spec_, world_size_);  // again: they may have changed since the request was checked
  } catch (const Refused& refused) {
    throw RuntimeError(refused.status(), refused.what());
  }
  // Removes the earlier dump: its index would describe the new files, and files that only it has would stay
  // among them.
  Json old = ReadIndex(folder_).value("files", Json());
  if (!old.is_object()) old = Json::object();
  fs::remove(fs::path(folder_) / kIndex, error);
  for (const auto& [name, about] : old.items()) {
    if (fs::path(name).filename() == name && fs::path(name).extension() == ".npy")
      fs::remove(fs::path(folder_) / name, error);
  }
  try {
    ForEachFile(spec_, world_size_, checked_, [&](const TensorInfo& tensor, Of of) {
      NpyWriter::Create(PathOf(FileOf(tensor, of)), {TypeOf(tensor, of), tensor.shape});
      if (of != Of::kOracle) return;
      const std::vector<double> none(static_cast<std::size_t>(tensor.columns),
                                     std::numeric_limits<double>::quiet_NaN());
      for (std::int64_t row = 0; row < tensor.rows; ++row) WriteOracle(tensor, row, 0, none);
    });
  } catch (const NpyError& failed) {
    DumpFailed(failed.what());
  }
}

void DumpFiles::Write(const std::string& name, NpyType type, std::int64_t first, std::int64_t count,
                      const void* elements) {
  const std::string path = PathOf(name);
  try {
    auto file = files_.find(path);
    if (file == files_.end()) file = files_.emplace(path, NpyWriter(path, type)).first;
    file->second.Write(first, count, elements);
  } catch (const NpyError& failed) {
    throw RuntimeError(CPPOOL_INTERNAL, std::string("dump: ") + failed.what());
  }
}

void DumpFiles::WriteRow(const TensorInfo& tensor, bool reference, std::int64_t row, const void* elements) {
  const std::string file = FileOf(tensor, reference ? Of::kNoCp : Of::kCp);
  const std::int64_t first = row * tensor.columns;
  if (tensor.dtype != Dtype::kBf16) return Write(file, TypeOf(tensor.dtype), first, tensor.columns, elements);
  std::vector<float> wide(static_cast<std::size_t>(tensor.columns));
  const auto* bits = static_cast<const std::uint16_t*>(elements);
  for (std::size_t i = 0; i < wide.size(); ++i) wide[i] = kernels::BF16ToFloat(bits[i]);
  Write(file, NpyType::kFloat32, first, tensor.columns, wide.data());
}

void DumpFiles::WriteOracle(const TensorInfo& tensor, std::int64_t row, std::int64_t first,
                            const std::vector<double>& elements) {
  const std::vector<float> narrow(elements.begin(), elements.end());
  Write(FileOf(tensor, Of::kOracle), NpyType::kFloat32, row * tensor.columns + first,
        static_cast<std::int64_t>(narrow.size()), narrow.data());
}

void DumpFiles::End() {
  Json files = Json::object();
  ForEachFile(spec_, world_size_, checked_, [&](const TensorInfo& tensor, Of of) {
    files[FileOf(tensor, of)] = {{"tensor", tensor.name()},
                                 {"run", kRuns[static_cast<int>(of)]},
                                 {"shape", tensor.shape},
                                 {"axes", tensor.axes},
                                 {"dtype", NameOf(TypeOf(tensor, of))},
                                 {"computed_in", of == Of::kOracle ? "fp64" : FormatOf(tensor)}};
  });
  Json index = about_;
  index["files"] = std::move(files);
  for (const auto& [name, values] : CuSeqlens(spec_)) index[name] = values;
  try {
    base::NewFile file((fs::path(folder_) / kIndex).string());
    file.Write(index.dump(2) + "\n");
    file.Commit();
  } catch (const base::FileError& error) {
    throw RuntimeError(CPPOOL_INTERNAL, std::string("dump: ") + error.what());
  }
}

}  // namespace cppool::attention_case
