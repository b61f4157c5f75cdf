// `cppool doctor`: what this machine has and which world sizes run. It asks daemons and nvidia-smi and uses
// no GPU itself.
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include <cppool/version.h>

#include "base/nccl_settings.h"
#include "base/poll_timeout.h"
#include "base/visible_devices.h"
#include "base/words.h"
#include "client/command/command.h"
#include "client/src/daemon.h"
#include "client/src/process.h"
#include "client/src/shell.h"

namespace cppool::command {
namespace {

// Returns the output of a program, or why there is none.
std::string Capture(const std::string& path, const std::vector<std::string>& arguments,
                    std::chrono::milliseconds limit) {
  using client::Clock;
  constexpr std::size_t kEnough = 1 << 16;
  try {
    auto process = client::Process::Spawn({path, arguments, {}});
    auto until = Clock::now() + limit;
    std::string text;
    for (char buffer[4096]; Clock::now() < until && text.size() < kEnough;) {
      pollfd fd = {process->output(), POLLIN, 0};
      if (poll(&fd, 1, base::PollTimeout(until)) <= 0) continue;
      ssize_t count = read(process->output(), buffer, sizeof buffer);
      if (count == 0 && process->WaitEnd(until) && (process->EndedInOrder() || process->EndIsUnknown()))
        return text;
      if (count == 0) return path + " " + process->DescribeEnd() + "\n";
      if (count > 0) text.append(buffer, static_cast<std::size_t>(count));
    }
    return path + " did not end\n";
  } catch (const std::system_error& error) {
    return std::string(error.what()) + "\n";
  }
}

// Why a start failed: what the daemon says of it, else the last line of its stderr.
std::string Reason(const PoolError& error) {
  if (error.start_failure()) return error.start_failure()->error;
  std::vector<std::string> lines = base::Split(error.stderr_tail(), '\n');
  std::erase(lines, "");
  return lines.empty() ? error.what() : lines.back();
}

// The GPUs that `nvidia-smi -L` lists, and which of them CUDA sees. This process must not initialise the
// driver: it could not fork any more.
void DescribeGpus(const char* visible, std::ostream& out) {
  out << "CUDA_VISIBLE_DEVICES: ";
  if (visible != nullptr) {
    const std::string odd = base::ExplainVisibleDevices(visible);
    out << "'" << visible << "'" << (odd.empty() ? "" : ": ") << odd << "\n";
  } else {
    out << "not set\n";
  }
  const std::string smi = client::InPath("nvidia-smi");
  out << "GPUs: ";
  if (smi.empty()) {
    out << "nvidia-smi is not in PATH\n";
    return;
  }
  const std::string listed = Capture(smi, {"-L"}, std::chrono::seconds(20));
  out << (listed.empty() ? "none\n" : "\n" + listed);
  std::vector<std::string> uuids;  // "GPU 0: NVIDIA H200 (UUID: GPU-8932f937-...)"
  for (const std::string& line : base::Split(listed, '\n')) {
    const std::size_t uuid = line.find("(UUID: GPU-");
    if (line.rfind("GPU ", 0) == 0 && uuid != std::string::npos)
      uuids.push_back(line.substr(uuid + 7, line.find(')', uuid) - uuid - 7));
  }
  const base::VisibleDevices devices = base::ReadVisibleDevices(visible != nullptr ? visible : "");
  if (visible == nullptr || uuids.empty() || devices.of_mig()) return;
  std::string seen;
  for (int index : base::FindVisibleDevices(devices, uuids))
    seen += (seen.empty() ? "" : ", ") + std::to_string(index);
  out << "of these CUDA sees " << (seen.empty() ? "none" : seen) << "\n";
}

// The allocation of Slurm that this runs in, and NCCL's settings, which ranks of this machine get as they
// are.
void DescribeCluster(std::ostream& out) {
  const auto variable = [](const char* name) -> std::string {
    const char* const value = std::getenv(name);
    return value ? value : "";
  };
  if (const std::string job = variable("SLURM_JOB_ID"); !job.empty()) {
    const std::string nodes = variable("SLURM_JOB_NUM_NODES");
    out << "Slurm: job " << job << ", " << nodes << " nodes (" << variable("SLURM_JOB_NODELIST")
        << "): --launch \"srun -N " << nodes << " --ntasks-per-node=1\" runs on all of them\n";
  }
  for (const auto& [name, value] : base::NcclSettings()) out << name << "=" << value << "\n";
}

// NCCL's settings on the nodes that have others than this process: a launcher may not pass them on.
void DescribeNcclOf(const Json& hello, std::ostream& out) {
  for (const Json& node : hello.value("nodes", Json::array())) {
    if (!node.is_object() || !node.contains("nccl")) continue;
    const Json& settings = node.at("nccl");
    if (settings == Json(base::NcclSettings())) continue;
    out << "node " << node.value("node", "?")
        << " has other settings of NCCL:" << (settings.empty() ? " none" : "");
    for (const auto& [name, value] : settings.items())
      out << " " << name << "=" << (value.is_string() ? value.get<std::string>() : value.dump());
    out << std::endl;
  }
}

// Starts a daemon and describes its world, or says why it does not start, which it returns; empty: it does.
std::string Try(PoolOptions options, int world_size, std::ostream& out) {
  options.world_size = world_size;
  out << "world size " << world_size << " (--backend " << options.backend << "): " << std::flush;
  auto start = std::chrono::steady_clock::now();
  try {
    Pool pool(options);
    Json hello = pool.Hello();
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    out << DescribeWorld(hello) << "; up after " << Fixed(seconds, 2) << " s" << std::endl;
    DescribeNcclOf(hello, out);
    return "";
  } catch (const PoolError& error) {
    const std::string why = Reason(error);
    out << "does not run: " << why << std::endl;
    return why;
  }
}

int Doctor(const DaemonArguments& arguments, const Streams& streams) {
  std::ostream& out = streams.out;
  PoolOptions options = arguments.pool;
  options.case_files = arguments.libraries;
  std::string daemon = FindDaemon(options);
  out << "cppool " << CPPOOL_VERSION << "\n";
  out << "daemon: " << (daemon.empty() ? "cppoold was not found; set CPPOOL_DAEMON to its path" : daemon)
      << "\n";
  if (!daemon.empty()) out << Capture(daemon, {"--version"}, std::chrono::seconds(20));
  out << "CPU cores: " << std::thread::hardware_concurrency() << "\n";
  const std::string chosen = base::Join(options.devices, ",");
  DescribeGpus(options.devices.empty() ? std::getenv("CUDA_VISIBLE_DEVICES") : chosen.c_str(), out);
  DescribeCluster(out);
  out << std::flush;
  if (daemon.empty()) return kFailure;

  bool any = false;
  int agents = 0;  // of a launcher whose agents can share none of these sizes
  for (int world_size : {1, 2, 4, 8}) {
    const std::string why = Try(options, world_size, out);
    any |= why.empty();
    if (const auto found = why.find("evenly by "); found != std::string::npos)
      agents = std::atoi(why.c_str() + found + std::strlen("evenly by "));
  }
  if (!any && agents > 0) any |= Try(options, agents, out).empty();
  if (options.backend == "auto") {
    options.backend = "host";
    any |= Try(options, !any && agents > 0 ? agents : 2, out).empty();
  }
  return any ? kSuccess : kFailure;
}

}  // namespace

void AddDoctor(CLI::App& app, const Streams& streams, int* exit_code) {
  auto arguments = std::make_shared<DaemonArguments>();
  CLI::App* doctor = app.add_subcommand("doctor", "Says what this machine has and what will run where");
  AddDaemonOptions(*doctor, arguments.get());
  doctor->callback([arguments, streams, exit_code] { *exit_code = Doctor(*arguments, streams); });
}

}  // namespace cppool::command
