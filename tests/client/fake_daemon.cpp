// A daemon for the client's tests: `--start WORD` selects its behaviour at the start, the parameter `do` its
// behaviour in a request. It does not use protocol/, so that the client's tests do not rely on the code under
// test.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

namespace {

using Json = nlohmann::json;

std::string sentinel = "[CP_POOL_RESP] ";
int world_size = 0;

void Write(int fd, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    ssize_t count = write(fd, text.data() + done, text.size() - done);
    if (count <= 0) _exit(9);
    done += static_cast<std::size_t>(count);
  }
}

void Pause(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

[[noreturn]] void Hang() {
  for (;;) pause();
}

std::string Line(const Json& answer) { return sentinel + answer.dump() + "\n"; }

Json Passed(const Json& id) {
  return {{"ok", true},
          {"id", id},
          {"status", "passed"},
          {"wall_ms", 1.5},
          {"seed", 1234},
          {"tflops", {{"forward", 2.0}}},
          {"checks", Json::array()},
          {"ranks", {{{"rank", 0}, {"ok", true}, {"error", nullptr}, {"gpu_ms", {{"forward", 3.0}}}}}}};
}

// Every timed iteration takes as long as the median.
void AddSamples(const Json& request, Json* passed) {
  const std::size_t most = request.value("repeat", 1);
  if (most == 1 && !request.contains("sampling")) return;
  const std::size_t count = request.contains("sampling") ? std::min<std::size_t>(most, 6) : most;
  for (Json& rank : (*passed)["ranks"])
    for (const auto& [stage, ms] : rank["gpu_ms"].items())
      if (stage == "forward" || stage == "backward") rank["samples"][stage] = std::vector<Json>(count, ms);
}

Json NotPassed(const Json& id, const std::string& status, const std::string& kind) {
  return {{"ok", false},
          {"id", id},
          {"status", status},
          {"error", "because of " + kind},
          {"failure", {{"kind", kind}, {"rank", 1}, {"stage", "forward"}, {"detail", "detail"}}},
          {"ranks", Json::array()},
          {"checks",
           {{{"tensor", "dq"},
             {"against", "oracle"},
             {"rank", 1},
             {"max_abs_err", nullptr},
             {"rel_err", 0.5},
             {"tolerance", 0.01},
             {"worst", {{"index", {{"head", 3}, {"token", 17}}}, {"got", nullptr}, {"wanted", 1.5}}},
             {"bad", 64},
             {"where", "head 3"},
             {"ok", false}},
            {{"tensor", "out"},
             {"against", "no_cp"},
             {"rank", 0},
             {"max_abs_err", 0.0},
             {"rel_err", 0.0},
             {"tolerance", 0.01},
             {"ok", true}}}}};
}

// `--start leave_...`: exits as an idle daemon does, at the moment when a request arrives. The first `going`
// daemons do so; the file `marker` counts them.
void Leave(const std::string& start, const std::string& marker, int going) {
  int gone = 0;
  std::ifstream(marker) >> gone;
  if (gone >= going) return;
  std::ofstream(marker) << gone + 1;
  const bool all = start == "leave_all_closed", closed = all || start == "leave_closed";
  if (closed) close(0);  // before a request is sent
  if (all)
    for (const int fd : {1, 2}) close(fd);
  pollfd request = {0, POLLIN, 0};
  if (!closed) poll(&request, 1, -1);
  char byte;
  if (start == "leave_part" && read(0, &byte, 1) != 1) _exit(9);
  if (start == "leave_having_read") do {
      if (read(0, &byte, 1) != 1) _exit(9);
    } while (byte != '\n');
  if (closed || start == "leave_slowly") {
    close(0);
    Pause(1500);
  }
  _exit(start == "leave_in_disorder" ? 1 : 0);
}

// What the process inherited: descriptors, signals, environment; and its arguments.
Json Surroundings(int argc, char** argv) {
  Json json;
  json["pid"] = getpid();
  json["group"] = getpgrp();
  json["open"] = Json::array();
  for (int fd = 0; fd < 4096; ++fd)
    if (fcntl(fd, F_GETFD) >= 0) json["open"].push_back(fd);
  sigset_t mask;
  sigprocmask(SIG_BLOCK, nullptr, &mask);
  json["blocked"] = Json::array();
  json["not_default"] = Json::array();
  for (int number = 1; number < 32; ++number) {
    struct sigaction action;
    if (sigismember(&mask, number) == 1) json["blocked"].push_back(number);
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_DFL)
      json["not_default"].push_back(number);
  }
  for (const char* name : {"CUDA_VISIBLE_DEVICES", "CPPOOL_PARENT_PID", "FAKE_VARIABLE"}) {
    const char* value = getenv(name);
    json["environment"][name] = value ? Json(value) : Json();
  }
  json["arguments"] = std::vector<std::string>(argv + 1, argv + argc);
  return json;
}

// `--start start_...`: writes the start line of a daemon that cannot start, valid or not. False: the daemon
// starts nevertheless.
bool CannotStart(const std::string& start) {
  const std::string prefix = "cppoold: start ";
  Json line = {{"error", "no room for 4 ranks: ask for fewer"},
               {"kind", "out_of_memory"},
               {"detail", "no room"},
               {"stage", "ranks"},
               {"rank", 3},
               {"world_size", 4},
               {"backend", "cuda"},
               {"transport", "peer"},
               {"devices", 2}};
  if (start == "start_line" || start == "start_noise") {
    Json other = line;
    other["error"] = "not the last one";
    Write(2, prefix + other.dump() + "\n");
  }
  if (start == "start_new") line.update({{"kind", "a new kind"}, {"member", {{"new", {1, 2}}}}});
  if (start == "start_bare") line = {{"error", "why"}, {"kind", "internal"}};
  if (start == "start_types") line["kind"] = 7;
  if (start == "start_huge") line["error"] = std::string(1 << 20, 'x');
  std::string text = prefix + line.dump() + "\n";
  if (start == "start_not_utf8") text.replace(text.find("no room"), 1, "\xff");
  if (start == "start_told") text = "cppoold: no room for 4 ranks: ask for fewer\n" + text;
  if (start == "start_cut") text.resize(text.size() / 2);
  if (start == "start_inside") text = "words before " + text;
  Write(2, "the reason for people\n" + text);
  if (start == "start_noise")
    for (int i = 0; i < 5000; ++i) Write(2, "a library says goodbye " + std::to_string(i) + "\n");
  return start != "start_all_the_same";
}

// True for the first call with this file, which it creates.
bool First(const std::string& marker) {
  int fd = open(marker.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
  if (fd >= 0) close(fd);
  return fd >= 0;
}

void ForkSleeper() {
  if (fork() == 0) {
    signal(SIGTERM, SIG_IGN);
    alarm(60);
    Hang();
  }
}

// Forks a child that leaves the process group and has copies of the pipes. Killing the group does not end it;
// it runs for five seconds.
void ForkRunaway(bool flooding) {
  const pid_t child = fork();
  if (child != 0) {
    while (getsid(child) != child) Pause(1);  // until it has left the group
    return;
  }
  setsid();
  alarm(5);
  while (flooding) Write(2, "a line of a runaway\n");  // NOLINT(bugprone-infinite-loop): intended
  Hang();
}

// `--start only_p2p`: no other schedule is possible in this world.
bool Inapplicable(const Json& request, const std::string& start) {
  return start == "only_p2p" && request["params"].value("cp_comm_type", "p2p") != "p2p";
}

// The answer to `validate`: the answer with which `run` would be refused, or that it would run.
Json Validated(const Json& request, const std::string& what) {
  const Json& id = request["id"];
  if (what == "skip" || (what == "by_schedule" && request["params"]["cp_comm_type"] == "all_gather"))
    return NotPassed(id, "skipped", "unsupported");
  if (what == "error") return NotPassed(id, "error", "invalid_request");
  if (what == "hang") Hang();
  if (what == "contradict") return {{"ok", false}, {"id", id}, {"runs", true}};
  if (what == "digest") return {{"ok", true}, {"id", id}, {"runs", true}, {"libraries", {{{"digest", "x"}}}}};
  return {{"ok", true}, {"id", id}, {"runs", true}, {"request", request}};
}

// Does what `what` names: `..._once` for the first request with the file `marker`, and what `then` names for
// others. It need not write an answer.
void Run(const Json& request, const std::string& what, const Json& surroundings) {
  const Json& id = request["id"];
  const Json& params = request["params"];
  Json passed = Passed(id);
  AddSamples(request, &passed);
  passed["wall_ms"] = params.value("wall_ms", passed["wall_ms"].get<double>());
  if (what.ends_with("_once")) {
    const bool first = First(params["marker"]);
    return Run(request, first ? what.substr(0, what.size() - 5) : params.value("then", "pass"), surroundings);
  }
  if (what == "pass") return Write(1, Line(passed));
  if (what == "fail") return Write(1, Line(NotPassed(id, "failed", "mismatch")));
  if (what == "skip") return Write(1, Line(NotPassed(id, "skipped", "unsupported")));
  if (what == "error") return Write(1, Line(NotPassed(id, "error", "internal")));
  if (what == "released") {
    Json released = NotPassed(id, "error", "internal");
    released["error"] = "rank 1 threw";
    released["checks"] = Json::array();
    for (int rank = 0; rank < world_size; ++rank)
      released["ranks"].push_back({{"rank", rank},
                                   {"ok", false},
                                   {"error", rank == 1 ? "rank 1 threw" : "released, since rank 1 failed"},
                                   {"gpu_ms", Json::object()}});
    return Write(1, Line(released));
  }
  if (what == "told_often") {
    const std::string check = "dq against oracle: max_abs_err 7, rel_err 0.5, tolerance 0.01";
    Json often = NotPassed(id, "failed", "mismatch");
    often["checks"][0]["max_abs_err"] = 7;
    often["error"] = "rank 1: " + check + " (1 of 2 checks do not hold)";
    often["failure"]["detail"] = check;
    often["ranks"] = {{{"rank", 1},
                       {"ok", false},
                       {"error", "the check of dq against oracle does not hold"},
                       {"gpu_ms", Json::object()}}};
    return Write(1, Line(often));
  }
  if (what == "told_by_ranks") {
    const std::string first = "the kernel threw",
                      then = "communication was aborted: rank 1 failed first: " + first;
    const std::string log = "[07:08:49.665] [cppoold 24396] [warning] [rank ";
    Write(2, log + "1] [request 3] " + first + "\n" + log + "0] [request 3] " + then + "\n");
    Write(2, "a line of the case: " + first + " 7\n");
    Json threw = NotPassed(id, "error", "internal");
    threw["error"] = "rank 1: " + first;
    threw["failure"]["detail"] = first;
    threw["checks"] = Json::array();
    for (const int rank : {0, 1})
      threw["ranks"].push_back(
          {{"rank", rank}, {"ok", false}, {"error", rank == 1 ? first : then}, {"gpu_ms", Json::object()}});
    return Write(1, Line(threw));
  }
  if (what == "by_schedule") {  // a suite then has passed, failed and skipped cells
    const std::string schedule = params["cp_comm_type"];
    if (schedule == "p2p") return Write(1, Line(NotPassed(id, "failed", "mismatch")));
    if (schedule == "all_gather") return Write(1, Line(NotPassed(id, "skipped", "unsupported")));
    for (const char* tensor : {"out", "dq"})
      passed["checks"].push_back({{"tensor", tensor},
                                  {"against", "oracle"},
                                  {"rank", 0},
                                  {"max_abs_err", 0.0},
                                  {"rel_err", 0.0},
                                  {"tolerance", 0.01},
                                  {"ratio", schedule == "a2a" ? 1.25 : 0.5},
                                  {"ok", true}});
    passed["checks"][1]["ratio"] = nullptr;
    passed["checks"].push_back(passed["checks"][0]);
    passed["checks"][2].update({{"against", "no_cp"}, {"ratio", 77.0}});
    return Write(1, Line(passed));
  }
  if (what == "more_members") {  // unknown ones in every object, as a newer daemon may have
    Json more = NotPassed(id, "failed", "mismatch");
    more["new"] = {{"a", {1, 2}}};
    more["failure"]["new"] = 1;
    more["failure"]["kind"] = "a new kind";
    more["checks"][0]["new"] = nullptr;
    more["ranks"] = passed["ranks"];
    more["ranks"][0]["new"] = "b";
    return Write(1, Line(more));
  }
  if (what == "echo") {
    passed["request"] = request;
    passed["surroundings"] = surroundings;
    return Write(1, Line(passed));
  }
  if (what == "bench" ||
      what == "bench_to_4") {  // alone twice the rate; "cudnn" in half the time; at 4 ranks the latter hangs
    if (params.contains("log"))  // every request
      std::ofstream(params["log"].get<std::string>(), std::ios::app) << request.dump() << "\n";
    if (what == "bench_to_4" && world_size == 4) Hang();
    if (request.value("kernels", "").ends_with("none"))
      return Write(1, Line(NotPassed(id, "skipped", "unsupported")));
    // "F" or "F until ID": the times are F times as long, the latter in requests up to this one. With it the
    // thousandths differ from request to request.
    double scale = 1;
    int last = id.get<int>();
    const bool scaled = std::getenv("FAKE_SCALE") &&
                        std::sscanf(std::getenv("FAKE_SCALE"), "%lf until %d", &scale, &last) > 0;
    if (id.get<int>() > last) scale = 1;
    const double time = (request.value("kernels", "") == "cudnn" ? 0.5 : 1.0) * scale *
                        (scaled ? 1 + 0.001 * (id.get<int>() % 7) : 1.0);
    const double rate = (world_size == 1 ? 4.0 : 2.0) / time;
    passed["tflops"] = {{"forward", rate}, {"backward", rate / 2}};
    passed["ranks"] = Json::array();
    for (int rank = 0; rank < world_size; ++rank)
      passed["ranks"].push_back({{"rank", rank},
                                 {"ok", true},
                                 {"error", nullptr},
                                 {"gpu_ms",
                                  {{"forward", (1.0 + rank) * time},
                                   {"forward/step", 0.5},
                                   {"backward", 2.0 * time},
                                   {"inputs", 9.0}}}});
    if (request.value("waits", false))
      for (Json& rank : passed["ranks"])
        rank["gpu_ms"]["forward/step/waiting"] = rank["gpu_ms"]["forward"].get<double>() / 4;
    if (request["checks"] == true)
      for (const double ratio : {0.5, 1.25})
        passed["checks"].push_back({{"tensor", "out"},
                                    {"against", "oracle"},
                                    {"rank", 0},
                                    {"max_abs_err", 0.0},
                                    {"rel_err", 0.0},
                                    {"tolerance", 0.01},
                                    {"ratio", ratio},
                                    {"ok", true}});
    if (request.contains("kernels"))
      passed["kernels"] = {{"name", request["kernels"]}, {"version", "1"}, {"family", "fake"}};
    if (params.value("max_seqlen_q", 0) == 666) return Write(1, Line(NotPassed(id, "failed", "mismatch")));
    AddSamples(request, &passed);
    return Write(1, Line(passed));
  }
  if (what == "hang_at_4" && world_size == 4) {
    std::ofstream(params["hung"].get<std::string>()) << getpid() << "\n";
    Hang();
  }
  if (what == "alone") {  // needs the devices for itself: `folder` has a file for each daemon
    Pause(params.value("ms", 0));
    const std::filesystem::directory_iterator files(params["folder"].get<std::string>());
    const bool alone = std::distance(begin(files), end(files)) == 1;
    return Write(1, Line(alone ? passed : NotPassed(id, "error", "out_of_memory")));
  }
  if (what == "fatal" || what == "fatal_lingering") {
    Json fatal = NotPassed(id, "error", "cuda");
    fatal["fatal"] = true;
    Write(1, Line(fatal));
    if (what == "fatal") _exit(1);
    Hang();
  }
  if (what == "polluted") {  // one cell of the smoke suite fails after two others in their order, another
                             // always fails
    static int left = 0;
    const Json about = {params["num_gqa_groups"], params["dtype"], params["qkv_format"],
                        params["cp_comm_type"]};
    if (about == Json({1, "fp16", "sbhd", "p2p"})) left = 1;
    if (about == Json({2, "fp16", "bshd", "a2a"}) && left == 1) left = 2;
    const bool spoilt = params["head_dim_qk"] == 256 && params["cp_comm_type"] == "a2a" && left == 2;
    const bool wrong = params["head_dim_qk"] == 256 && params["cp_comm_type"] == "a2a+p2p";
    if (spoilt && params.contains("dies")) raise(SIGKILL);
    if (spoilt || wrong) return Write(1, Line(NotPassed(id, "failed", "mismatch")));
  }
  if (what ==
      "nth") {  // at the nth request, of any daemon with this `log`, the nth of `ends`; later ones the last
    const std::string log = params["log"];
    std::size_t before = 0;
    std::ifstream file(log);
    for (std::string line; std::getline(file, line);) ++before;
    std::ofstream(log, std::ios::app) << request.dump() << "\n";
    std::string ends = params["ends"];  // "[pass,fail]"
    ends = ends.substr(1, ends.size() - 2);
    for (; before > 0 && ends.find(',') != std::string::npos; --before) ends.erase(0, ends.find(',') + 1);
    return Run(request, ends.substr(0, ends.find(',')), surroundings);
  }
  if (what == "fail_with")  // fails if the request has this key
    return Write(1, Line(request.contains(params["key"]) ? NotPassed(id, "failed", "mismatch") : passed));
  if (what == "fail_without")
    return Write(1, Line(request.contains(params["key"]) ? passed : NotPassed(id, "failed", "mismatch")));
  if (what == "hang") Hang();
  if (what == "spin") {
    for (std::atomic<int> turns{0};;) turns.fetch_add(1);
  }
  if (what == "hang_ignoring_term") {
    signal(SIGTERM, SIG_IGN);
    Hang();
  }
  if (what == "stopped") {
    raise(SIGSTOP);
    Hang();
  }
  if (what == "late" || what == "late_ignoring_term") {
    if (what == "late_ignoring_term") signal(SIGTERM, SIG_IGN);
    Pause(params.value("ms", 300));
    return Write(1, Line(passed));
  }
  if (what == "die") {
    std::cerr << "the last words" << std::endl;
    _exit(3);
  }
  if (what == "crash") {
    Write(2,
          "cppoold: crash {\"error\": \"rank 1 crashed\", \"rank\": 1, \"stage\": \"forward/attend\", "
          "\"stack\": [\"Attend\", \"Run\"]}\n");
    _exit(3);
  }
  if (what == "die_by_signal") {
    signal(SIGTERM, SIG_DFL);
    raise(SIGKILL);
  }
  if (what == "half_an_answer") {
    std::string line = Line(passed);
    Write(1, line.substr(0, line.size() / 2));
    _exit(4);
  }
  if (what == "die_after") {
    Write(1, Line(passed));
    _exit(5);
  }
  if (what == "garbage") return Write(1, sentinel + "{\"ok\": tru\n");
  if (what == "no_object") return Write(1, sentinel + "[1, 2]\n");
  if (what == "no_result") return Write(1, sentinel + Json({{"id", id}, {"ok", true}}).dump() + "\n");
  if (what == "deep") {  // otherwise a valid answer
    std::string line = Line(passed);
    line.erase(line.size() - 2);
    return Write(1, line + ",\"more\":" + std::string(1000, '[') + std::string(1000, ']') + "}\n");
  }
  if (what == "no_id") {
    Json error = NotPassed(id, "error", "invalid_request");
    error.erase("id");
    return Write(1, Line(error));
  }
  if (what == "stale") {
    Json stale = NotPassed(id.get<int>() - 1, "failed", "mismatch");
    return Write(1, Line(stale) + Line(passed));
  }
  if (what == "stale_for_ever")
    for (;;) Write(1, Line(Passed(id.get<int>() - 1)));
  if (what == "pass_without_id") {
    passed.erase("id");
    return Write(1, Line(passed));
  }
  if (what == "twice_without_id") {
    Json error = NotPassed(id, "error", "invalid_request");
    error.erase("id");
    return Write(1, Line(passed) + Line(error));
  }
  if (what == "twice") return Write(1, Line(passed) + Line(NotPassed(id, "failed", "mismatch")));
  if (what == "noise") {
    for (int i = 0; i < 20000; ++i)
      Write(1, "noise with " + sentinel + "{\"ok\": true} inside, line " + std::to_string(i) + "\n");
    return Write(1, Line(passed));
  }
  if (what == "noise_and_hang") {
    Write(1, "noise\n");
    Hang();
  }
  if (what == "noise_for_ever")
    for (;;) Write(1, "noise\n");
  if (what == "noise_with_sentinels_for_ever")
    for (;;) Write(1, "noise, then " + Line(passed));
  if (what == "binary_noise") {  // all byte values, and the sentinel, but never at the start of a line
    std::string block;
    for (int i = 0; i < 65536; ++i) block += static_cast<char>(i * 31 + i / 256);
    for (int i = 0; i < 256; ++i) Write(1, "x" + block + sentinel + "{\"ok\": true}" + block);
    return Write(1, "\n" + Line(passed));
  }
  if (what == "gigabyte" || what == "gigabyte_of_answer") {  // without a newline
    const std::string chunk(1 << 20, ' ');
    Write(1, what == "gigabyte" ? "noise" : sentinel);
    for (int i = 0; i < 1024; ++i) Write(1, chunk);
    return Write(1, "\n" + Line(passed));
  }
  if (what == "endless_line" || what == "endless_line_after_sentinel") {
    if (what != "endless_line") Write(1, sentinel);
    const std::string chunk(1 << 20, 'x');
    for (;;) Write(1, chunk);
  }
  if (what == "endless_answer") {
    Write(1, sentinel);
    const std::string chunk(1 << 20, ' ');
    for (int i = 0; i < 40; ++i) Write(1, chunk);
    return Write(1, "\n");
  }
  if (what == "say" || what == "say_and_fail") {
    Write(2, params["text"].get<std::string>());
    return Write(1, Line(what == "say" ? passed : NotPassed(id, "failed", "mismatch")));
  }
  if (what == "flood_stderr") {
    for (int i = 0; i < 50000; ++i) Write(2, "a line of the flood, number " + std::to_string(i) + "\n");
    return Write(1, Line(passed));
  }
  if (what == "flood_stderr_for_ever")
    for (;;) Write(2, "a line of the flood\n");
  if (what == "flood_stderr_afterwards") {
    Write(1, Line(passed));
    for (int i = 0; i < 50000; ++i) Write(2, "a line of the flood, number " + std::to_string(i) + "\n");
    return;
  }
  if (what == "dribble") {
    for (char c : Line(passed)) {
      Write(1, std::string(1, c));
      Pause(params.value("ms", 1));
    }
    return;
  }
  if (what == "close_stdout") {
    close(1);
    Hang();
  }
  if (what == "close_stdin") {
    close(0);
    Hang();
  }
  if (what == "close_stdin_afterwards" || what == "close_stdout_afterwards") {
    Write(1, Line(passed));
    close(what == "close_stdin_afterwards" ? 0 : 1);
    Hang();
  }
  if (what == "grandchild") {
    ForkSleeper();
    _exit(6);
  }
  if (what == "hang_with_grandchild") {
    ForkSleeper();
    Hang();
  }
  if (what == "runaway" || what == "flooding_runaway") {
    ForkRunaway(what == "flooding_runaway");
    _exit(6);
  }
  if (what == "sleeper") {
    ForkSleeper();
    return Write(1, Line(passed));
  }
  Write(1, Line(passed));
}

}  // namespace

int main(int argc, char** argv) {
  alarm(60);  // ends this process if the test fails to
  if (std::find(argv, argv + argc, std::string("--version")) != argv + argc) {
    std::cout << "cppoold of a test\nCUDA module: that the daemon says\n";
    return 0;
  }
  const Json surroundings = Surroundings(argc, argv);
  std::string start, file;
  int going = 0;
  for (int i = 1; i + 1 < argc; ++i) {
    std::string word = argv[i];
    if (word == "--sentinel") sentinel = argv[i + 1];
    if (word == "--world-size") world_size = std::atoi(argv[i + 1]);
    if (word == "--start") start = argv[i + 1];
    if (word == "--file") file = argv[i + 1];
    if (word == "--going") going = std::atoi(argv[i + 1]);
    if (word == "--count") std::ofstream(argv[i + 1], std::ios::app) << "started\n";
  }
  std::cerr << "the fake daemon has started" << std::endl;
  if (start == "usage") {
    std::cerr << "cuda: 4 ranks need 4 devices, 1 is there" << std::endl;
    return 2;
  }
  if ((start == "two_devices" && world_size > 2) || (start == "once" && !First(file))) {
    std::cerr << "cppoold: start "
              << Json({{"error", "--world-size 4 needs as many devices, and CUDA sees 2"},
                       {"kind", "unsupported"},
                       {"devices", 2}})
              << std::endl;
    return 2;
  }
  if (start.rfind("start_", 0) == 0 && CannotStart(start)) return 2;
  if (start == "file" && !std::ifstream(file)) return 2;
  if (start == "die") raise(SIGKILL);
  if (start == "silent") Hang();
  if (start == "ignore_term") signal(SIGTERM, SIG_IGN);
  if (start == "ignore_end") signal(SIGTERM, SIG_IGN);
  if (start == "noise") Write(1, "a library greets\nand greets\n");

  std::string line;
  while (std::getline(std::cin, line)) {
    Json request = Json::parse(line);
    const std::string op = request["op"];
    if ((op == "run" || op == "validate") && Inapplicable(request, start)) {
      Write(1, Line(NotPassed(request["id"], "skipped", "inapplicable")));
      continue;
    }
    if (op == "run") {
      Run(request, request["params"].value("do", "pass"), surroundings);
      continue;
    }
    if (op == "validate") {
      const std::string what = request["params"].value("do", "pass");
      if (what == "crash_once" && First(request["params"]["marker"])) Run(request, "crash", surroundings);
      Write(1, Line(Validated(request, what)));
      continue;
    }
    Json answer = {{"ok", true}, {"id", request["id"]}};
    if (op == "hello") {
      answer.update({{"protocol", start == "other_protocol" ? 7 : 1},
                     {"version", "fake"},
                     {"pid", getpid()},
                     {"world_size", start == "other_world" ? 64 : world_size},
                     {"backend", "host"},
                     {"transport", "host"},
                     {"devices", Json::array()},
                     {"init_ms", Json::object()}});
      for (int rank = 0; rank < world_size; ++rank)
        answer["devices"].push_back({{"rank", rank},
                                     {"name", "cpu"},
                                     {"ordinal", -1},
                                     {"uuid", start.rfind("GPU-", 0) == 0 ? start : ""},
                                     {"capability", ""},
                                     {"total_bytes", 0}});
      if (start == "sampling" || start == "only_p2p")
        answer["features"] = {"samples", "sampling", "waits", "profile"};
      if (start == "newer")
        answer.update(
            {{"protocol_minor", 99}, {"features", {"validate", "a new one"}}, {"new", {{"a", {1}}}}});
      if (start == "odd_features") answer["features"] = {"validate", 7};
      if (start == "garbage") Write(1, sentinel + "hello?\n");
      if (start == "refuse")
        answer = {{"ok", false}, {"id", request["id"]}, {"status", "error"}, {"error", "not today"}};
    }
    if (start == "fatal_stats" && op == "stats") {
      answer.update({{"ok", false}, {"fatal", true}, {"error", "the device is lost"}});
      Write(1, Line(answer));
      Pause(300);
      return 3;
    }
    Write(1, Line(answer));
    if (start == "deaf") Hang();
    if (start.rfind("leave_", 0) == 0) Leave(start, file, going);
    if (start == "close_stdin" && op == "hello") {
      close(0);
      Hang();
    }
    if (op == "shutdown") return 0;
  }
  if (start == "ignore_end") Hang();
  return 0;
}
