#include "tests/end_to_end/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <thread>

#include "tests/files.h"

namespace cppool::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::string_view kSentinel = "[CP_POOL_RESP] ";

}  // namespace

DaemonProcess::DaemonProcess(const std::vector<std::string>& arguments, const std::string& program) {
  std::signal(SIGPIPE, SIG_IGN);
  int to[2], from[2];
  char name[] = "/tmp/cppool-stderr-XXXXXX";
  const int errors = mkostemp(name, O_CLOEXEC);
  if (errors < 0 || pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0)
    throw std::runtime_error("pipes");
  stderr_file_ = name;
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    dup2(to[0], 0);
    dup2(from[1], 1);
    dup2(errors, 2);
    std::signal(SIGPIPE, SIG_DFL);
    execv(program.c_str(), argv.data());
    _exit(127);
  }
  close(to[0]);
  close(from[1]);
  close(errors);
  input_ = to[1];
  output_ = from[0];
}

DaemonProcess::~DaemonProcess() {
  if (!status_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  CloseInput();
  CloseOutput();
  unlink(stderr_file_.c_str());
}

void DaemonProcess::Send(const std::string& line) { SendBytes(line + "\n"); }

void DaemonProcess::SendBytes(const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = write(input_, text.data() + done, text.size() - done);
    if (count <= 0) return;
    done += static_cast<std::size_t>(count);
  }
}

void DaemonProcess::CloseInput() {
  if (input_ >= 0) close(input_);
  input_ = -1;
}

void DaemonProcess::CloseOutput() {
  if (output_ >= 0) close(output_);
  output_ = -1;
}

std::optional<std::string> DaemonProcess::ReadLine(std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  while (true) {
    if (const auto end = buffer_.find('\n'); end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    pollfd ready{output_, POLLIN, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0 || poll(&ready, 1, static_cast<int>(left)) <= 0) return std::nullopt;
    char bytes[65536];
    const ssize_t count = read(output_, bytes, sizeof(bytes));
    if (count <= 0) return std::nullopt;
    buffer_.append(bytes, static_cast<std::size_t>(count));
  }
}

Json DaemonProcess::ReadAnswer() {
  const auto line = ReadLine();
  if (!line) throw std::runtime_error("no answer; stderr: " + Stderr());
  if (line->rfind(kSentinel, 0) != 0) throw std::runtime_error("not an answer: " + *line);
  return Json::parse(line->substr(kSentinel.size()));
}

Json DaemonProcess::Ask(const Json& request) {
  Send(request.dump());
  return ReadAnswer();
}

int DaemonProcess::Wait() {
  CloseInput();
  const auto deadline = Clock::now() + kPatience;
  while (!status_) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    } else if (Clock::now() > deadline) {
      return -1;
    } else {
      std::this_thread::sleep_for(1ms);
    }
  }
  return *status_;
}

std::string DaemonProcess::Stderr() const { return ReadFile(stderr_file_); }

std::vector<Json> DaemonProcess::CrashLines() const {
  const std::string prefix = "cppoold: crash ";
  std::vector<Json> lines;
  for (const std::string& line : Lines(Stderr()))
    if (line.starts_with(prefix)) lines.push_back(Json::parse(line.substr(prefix.size())));
  return lines;
}

bool EndsInTime(pid_t pid) {
  const auto deadline = Clock::now() + kPatience;
  while (kill(pid, 0) == 0) {
    // A zombie has ended too: its parent has been killed, so this process cannot reap it.
    const std::string line = ReadFile("/proc/" + std::to_string(pid) + "/stat");
    const auto name_end = line.rfind(')');
    if (name_end != std::string::npos && line.size() > name_end + 2 && line[name_end + 2] == 'Z') return true;
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

}  // namespace cppool::test
