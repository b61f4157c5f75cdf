"""Python ranks without a daemon and without torch: the fork server, frames, faults, state, loading of code."""
import contextlib
import importlib.util
import os
import pathlib
import py_compile
import shutil
import signal
import subprocess
import sys
import time

import pytest

import ranks_parent
from ranks_parent import LIMIT, Server, World, start_time
from support import eventually, is_running

CASES = str(pathlib.Path(__file__).with_name("ranks_cases.py"))


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    assert server.end() == 0
    assert server.text() == ""


@pytest.fixture(scope="module")
def worlds(server):
    made = {}

    def world(size):
        made[size] = made.get(size) or World(server, size)
        return made[size]
    yield world
    for each in made.values():
        each.kill()


@pytest.fixture
def world(worlds):
    return worlds(2)


def run(world, function, **members):
    loaded = world.load(function=f"{CASES}:{function}")
    assert loaded.status == "passed", loaded.error
    return world.run(**{"kwargs": {}, **members})


ENDS = {  # kind -> (kind of failure, what the error has) of those that the rank reports itself
    "exception": ("internal", "ValueError: planted"), "assertion": ("mismatch", "assert out == 3"), "memory": ("out_of_memory", "MemoryError"),
    "exit": ("internal", "sys.exit(3)")}
DEATHS = {"_exit": 5 << 8, "abort": signal.SIGABRT, "segmentation fault": signal.SIGSEGV}  # kind -> wait status
HANGS = ("sleep", "GIL", "stop")
REMAINS = {"thread": "threads", "child": "children", "orphan": "children", "setsid orphan": "children"}


@pytest.mark.parametrize("size", [1, 2, 4])
class TestFaults:
    @pytest.fixture
    def fault(self, worlds, size, tmp_path):
        def do(kind):
            return run(worlds(size), "fault", kwargs={"kind": kind, "folder": str(tmp_path)})
        yield do
        assert run(worlds(size), "passes").status == "passed"

    @pytest.mark.parametrize("kind", ENDS)
    def test_reported(self, fault, size, kind):
        outcome = fault(kind)
        assert (outcome.culprit, outcome.kind, outcome.stage) == (size - 1, ENDS[kind][0], "fault")
        assert ENDS[kind][1] in outcome.error
        assert outcome.status == ("failed" if kind == "assertion" else "error")
        assert outcome.traceback.startswith(f"Traceback (most recent call last):\n  File \"{CASES}\"")

    @pytest.mark.parametrize("kind", DEATHS)
    def test_died(self, fault, size, kind):
        outcome = fault(kind)
        assert outcome.culprit == size - 1
        assert outcome.ended[size - 1]["status"] & ~0x80 == DEATHS[kind]  # without the bit of a core dump
        assert ("ranks_cases.py" in outcome.stacks[size - 1]) == (kind != "_exit")  # faulthandler's

    @pytest.mark.parametrize("kind", HANGS)
    def test_hang(self, worlds, size, kind, tmp_path):
        world = worlds(size)
        world.load(function=f"{CASES}:fault")
        for rank in world.ranks:
            rank.send("run", id=100, kwargs={"kind": kind, "folder": str(tmp_path)})
        stages = ["second"] * (size - 1) + ["fault"]
        assert eventually(lambda: [rank.stage()[1] for rank in world.ranks] == stages)
        asked = world.ranks[:size if kind == "sleep" else size - 1]

        def wait_in_the_case():
            for rank in asked:
                rank.send("stacks")
            answers = dict(world.frames.get(timeout=LIMIT) for _ in asked)
            main = {rank: next(thread for thread in frame["threads"] if thread["name"] == "MainThread") for rank, frame in answers.items()}
            return all(any("ranks_cases.py" in frame and frame.endswith("<lambda>" if rank == size - 1 else " meet") for frame in thread["frames"])
                       for rank, thread in main.items())
        assert eventually(wait_in_the_case)  # a stage begins shortly before the wait in it
        if kind != "stop":
            world.server.send("kill", pid=world.ranks[-1].pid, signal=signal.SIGRTMAX - 3)
            assert eventually(lambda: b"ranks_cases.py" in b"".join(world.ranks[-1].stacks))
        ended = world.kill()
        assert {frame["status"] for frame in ended.values()} == {signal.SIGKILL}
        world.fork()
        assert run(world, "passes").status == "passed"

    def test_output_flood(self, fault, size, worlds):
        assert fault("flood").status == "passed"
        assert eventually(lambda: worlds(size).output(size - 1).count("x") >= 3_000_000)

    @pytest.mark.parametrize("kind", REMAINS)
    def test_left_behind(self, fault, size, kind, tmp_path):
        outcome = fault(kind)
        assert outcome.status == "passed" and list(outcome.left) == [REMAINS[kind]]
        assert ("left over" if kind == "thread" else "sleep") in outcome.left[REMAINS[kind]][0]
        assert kind == "thread" or not is_running(int((tmp_path / "pid").read_text()))  # when `ended` has come


def test_stray_of_a_killed_rank(world, tmp_path):
    world.load(function=f"{CASES}:fault")
    for rank in world.ranks:
        rank.send("run", id=100, kwargs={"kind": "setsid orphan", "folder": str(tmp_path)})
    assert eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert sum(frame["killed"] for frame in world.kill().values()) == 1
    assert not is_running(int((tmp_path / "pid").read_text()))
    world.fork()


def test_stray_of_a_rank_that_ends(world, tmp_path):
    ended = run(world, "fault", kwargs={"kind": "_exit with an orphan", "folder": str(tmp_path)}).ended
    assert ended[1]["status"] == 5 << 8 and sum(frame["killed"] for frame in ended.values()) == 1
    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("way", ["end of the socket", "SIGKILL"])
def test_end_of_the_server(way, tmp_path):
    server = Server()
    world = World(server, 2)
    world.load(function=f"{CASES}:fault")
    for rank in world.ranks:
        rank.send("run", id=100, kwargs={"kind": "GIL", "folder": str(tmp_path)})
    assert eventually(lambda: world.ranks[1].stage()[1] == "fault")
    if way == "SIGKILL":
        server.process.kill()
    else:
        server.reader.channel.socket.shutdown(2)
    server.process.wait(timeout=LIMIT)
    assert eventually(lambda: not any(is_running(rank.pid) for rank in world.ranks))


def test_a_rank_that_ends_with_the_daemon():
    server = Server()
    rank, = World(server, 1).ranks
    os.kill(server.process.pid, signal.SIGSTOP)  # it sees both ends at once
    os.kill(rank.pid, signal.SIGKILL)
    server.reader.channel.socket.shutdown(2)
    os.kill(server.process.pid, signal.SIGCONT)
    assert server.process.wait(timeout=LIMIT) == 0
    server.drain.join(LIMIT)
    assert "Traceback" not in server.text()


def test_abandoned_processes_are_ended_by_the_next_server(tmp_path):
    def tells():
        folder = tmp_path / str(time.monotonic_ns())
        folder.mkdir()
        daemon = subprocess.Popen(["sleep", "1000"])
        server = Server(of=f"{daemon.pid}:{start_time(daemon.pid)}")
        world = World(server, 1)
        world.load(function=f"{CASES}:fault")
        world.ranks[0].send("run", id=1, kwargs={"kind": "setsid orphan", "folder": str(folder)})
        assert eventually(lambda: (folder / "pid").exists() and (folder / "pid").read_text())
        pid = int((folder / "pid").read_text())
        os.kill(server.process.pid, signal.SIGSTOP)  # so that it does not see the rank's end
        server.process.kill()
        server.process.wait(timeout=LIMIT)
        assert is_running(pid)
        daemon.kill()
        daemon.wait(timeout=LIMIT)
        other = Server()
        assert eventually(lambda: not is_running(pid))
        assert other.end() == 0
        other.drain.join(LIMIT)
        return f"process {pid} was left by the ranks of a daemon that is gone" in other.text()

    assert any(tells() for _ in range(10))  # one that another test starts can be the next server, too


def state_of(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]


def records_of(pid):
    return list(pathlib.Path("/dev/shm").glob(f"cppool_rank.*.{pid}.*"))


@pytest.fixture
def abandoned():
    """abandoned(aged) makes names in /dev/shm of a rank that then died with all above it: its pid, and the names that are to go, one of which is open, and
    to stay. aged: the rank looks as if it had died long before."""
    made, files = [], []

    def abandon(aged=0):
        daemon = subprocess.Popen(["sleep", "1000"])
        server = Server(of=f"{daemon.pid}:{start_time(daemon.pid)}")
        world = World(server, 1)
        port, pid = run(world, "environment", kwargs={"name": "MASTER_PORT"}).reports[0]["value"], world.ranks[0].pid
        own, others = ([pathlib.Path("/dev/shm", name) for name in names] for names in (
            (f"of_{pid}", f"buffer_{port}_0", f"buffer_{port}_in_use"), (f"folder_{pid}", f"link_{pid}", f"of_another_{pid}")))
        made.extend(own + others)
        for name in (*own, others[2]):
            files.append(name.open("w", encoding="ascii"))
        for file in (files[0], files[1], files[3]):
            file.close()
        others[0].mkdir()
        others[1].symlink_to("nowhere")
        if os.getuid() == 0:
            os.chown(others[2], 12345, -1)
        else:
            others.pop().unlink()
        for process in (pid, server.process.pid):
            os.kill(process, signal.SIGSTOP)  # so that the rank leaves its record as it is, and the server does not see the rank's end
        assert eventually(lambda: state_of(pid) == "T")
        record, = records_of(pid)
        os.utime(record, (record.stat().st_atime - aged, record.stat().st_mtime - aged))
        server.process.kill()
        server.process.wait(timeout=LIMIT)
        daemon.kill()
        daemon.wait(timeout=LIMIT)
        assert eventually(lambda: not is_running(pid))
        return pid, own, others, files[2]

    yield abandon
    for file in files:
        file.close()
    for name in made:
        with contextlib.suppress(FileNotFoundError):
            name.rmdir() if name.is_dir() else name.unlink()


def until_a_start_has(done):
    """One that another test starts at the same time does not wait for this one's, nor this one for it."""
    return eventually(lambda: Server().end() == 0 and done())


def test_names_of_abandoned_ranks_are_removed_by_the_next_server(abandoned):
    """One that a process has open stays, and is removed by a later one; so do those of other users and what are no files."""
    pid, own, others, used = abandoned()
    assert until_a_start_has(lambda: not own[0].exists() and not own[1].exists())
    assert own[2].exists() and records_of(pid)
    used.close()
    assert until_a_start_has(lambda: not own[2].exists() and not records_of(pid))
    assert all(map(os.path.lexists, others))


def test_names_from_after_the_end_of_abandoned_ranks_stay(abandoned):
    pid, own, _, used = abandoned(aged=100)
    used.close()
    assert until_a_start_has(lambda: not records_of(pid))
    assert all(map(os.path.exists, own))


def test_a_rank_is_recorded_while_it_lives():
    server = Server()
    dead, living = World(server, 2).ranks
    assert records_of(dead.pid) and records_of(living.pid)
    server.send("kill", pid=dead.pid, signal=signal.SIGKILL)
    assert server.next("ended")["pid"] == dead.pid
    assert not records_of(dead.pid) and records_of(living.pid)
    assert server.end() == 0
    assert not records_of(living.pid)


def test_state_is_put_back(world, tmp_path):
    before = run(world, "draw")
    outcome = run(world, "change_state")
    assert outcome.status == "passed" and not outcome.left
    assert outcome.differed == {
        "environment": ["SECRET_OF_TEST"], "process": ["cwd", "umask"], "limits": ["RLIMIT_NOFILE"], "sys": ["stdout", "path"],
        "sys hooks": ["unraisablehook"], "threading": ["excepthook"], "gc": ["callbacks"], "interpreter": ["recursion_limit", "switch_interval"],
        "warnings": ["filters"], "logging": ["root", "mine"], "signals": ["SIGUSR1"], "timers": ["ITIMER_REAL"], "signal mask": ["SIGUSR2"]}
    assert "hidden value" not in str(outcome.reports)
    after = run(world, "draw")
    assert [each["value"] for each in after.reports.values()] == [each["value"] for each in before.reports.values()]
    assert after.reports[0]["results"] == before.reports[1]["results"]  # seeded before each case, and each rank alike
    assert run(world, "draw", seed=7).reports[0]["results"] != before.reports[0]["results"]


def test_niceness_is_put_back_or_replaces_the_ranks(world):
    """Only root, and who may do as root, can go back."""
    outcome = run(world, "be_nice")
    assert outcome.status == "passed" and {**outcome.differed, **outcome.left}["process"] == ["niceness"]
    assert all(os.getpriority(os.PRIO_PROCESS, rank.pid) == os.getpriority(os.PRIO_PROCESS, world.server.process.pid) for rank in world.ranks)


def test_shared_memory_of_the_process_is_removed(world):
    outcome = run(world, "leave_shared_memory")
    assert not outcome.left and len(outcome.differed["shared memory"]) == 1
    assert not any(os.path.exists(f"/dev/shm/{name}") for report in outcome.reports.values() for name in report["differed"]["shared memory"])


def test_shared_memory_of_a_dead_rank_is_removed(world):
    port = run(world, "environment", kwargs={"name": "MASTER_PORT"}).reports[0]["value"]
    run(world, "leave_shared_memory", kwargs={"name": f"buffer_{port}_0"})
    assert os.path.exists(f"/dev/shm/buffer_{port}_0")  # another rank may be about to open it
    world.kill()
    assert not os.path.exists(f"/dev/shm/buffer_{port}_0")
    world.fork()


@pytest.mark.parametrize("kind", ["passes", "_exit", "SIGKILL", "hang"])
def test_shared_memory_of_multiprocessing_is_removed(world, tmp_path, kind):
    loaded = world.load(function=f"{CASES}:end_with_shared_memory")
    assert loaded.status == "passed", loaded.error
    kwargs = {"folder": str(tmp_path), "kind": kind}
    if kind == "hang":
        for rank in world.ranks:
            rank.send("run", id=100, kwargs=kwargs)
        assert eventually(lambda: len(list(tmp_path.glob("meeting *"))) == world.size)
        world.kill()
        world.fork()
    else:
        outcome = world.run(kwargs=kwargs)
        assert (outcome.status, outcome.left) == ("passed" if kind == "passes" else "error", {})
    names = [(tmp_path / f"name {rank}").read_text() for rank in range(world.size)]
    assert len(set(names)) == world.size and not [name for name in names if os.path.exists(f"/dev/shm/{name}")]


def test_a_file_left_open_replaces_the_ranks(world):
    outcome = run(world, "leave_file")
    assert outcome.left["descriptors"][0].startswith("/etc/hostname (")


def test_the_socket_has_a_higher_descriptor_than_what_a_case_opens(world):
    """So that it is closed first where the rank ends."""
    opened = run(world, "open_many_files").reports
    for rank, report in zip(world.ranks, opened.values()):
        highest = max(map(int, os.listdir(f"/proc/{rank.pid}/fd")))
        assert highest > report["value"] and os.readlink(f"/proc/{rank.pid}/fd/{highest}").startswith("socket:")


def test_the_high_descriptor_is_taken(tmp_path):
    (tmp_path / "takes.py").write_text("import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
                                       "os.dup2(os.open('/dev/null', os.O_RDONLY), 1023)\n")
    server = Server(preload="takes", environment={"PYTHONPATH": str(tmp_path)})
    assert server.ready["preloaded"] == ["takes"]
    world = World(server, 2)
    assert run(world, "passes").status == "passed"
    world.kill()
    assert server.end() == 0


def test_a_file_of_a_cycle_is_closed(world):
    assert not run(world, "leave_cycle").left


def test_odd_results(world):
    report = run(world, "odd_results").reports[0]
    assert report["results"] == {"numbers": [None, -2**63, 2**64 - 1], "text": "half ? of a pair"}
    assert report.get("value") is None and not report["warnings"]


def test_environment_of_a_case(world):
    outcome = run(world, "environment", kwargs={"name": "MINE"}, env={"MINE": "1"})
    assert outcome.reports[0]["value"] == "1" and not outcome.differed
    assert "value" not in run(world, "environment", kwargs={"name": "MINE"}).reports[0]
    assert [each["value"] for _, each in sorted(run(world, "environment", kwargs={"name": "LOCAL_RANK"}).reports.items())] == ["0", "1"]


def test_stages_checks_results(world):
    report = run(world, "measure", warmup=2, repeat=4).reports[1]
    assert report["results"] == {"index": 3}
    times = dict(report["gpu_ms"])
    assert list(times) == ["before", "forward", "forward/attend"] and times["forward"] >= times["forward/attend"] >= 1
    assert [(stage, len(samples)) for stage, samples in report["samples"]] == [("forward", 4)]
    assert report["checks"] == [{"tensor": "out", "against": "reference", "rank": 1, "max_abs_err": 0.5, "rel_err": pytest.approx(0.5 / 5**0.5 * 2 / 2, rel=0.2),
                                 "tolerance": 0.6, "ok": True}]
    assert [len(samples) for _, samples in run(world, "measure", sampling=True).reports[0]["samples"]] == [6]
    assert run(world, "measure", checks=False).reports[0]["checks"] == []


def test_a_check_that_does_not_hold(world):
    outcome = run(world, "wrong")
    assert (outcome.status, outcome.kind) == ("failed", "mismatch")
    assert outcome.error.startswith("the check of out against reference does not hold: max_abs_err nan")
    assert outcome.reports[0]["checks"][0]["max_abs_err"] == "nan"
    assert [check["ok"] for check in outcome.reports[0]["checks"]] == [False, False, True, False]
    assert [check.get("bad") for check in outcome.reports[0]["checks"]] == [1, 1, None, 2]
    assert outcome.reports[0]["checks"][0]["worst"] == {"index": [1], "got": "nan", "wanted": 2.0}
    assert outcome.reports[0]["checks"][3]["worst"] == {"index": [1, 1], "got": 5.0, "wanted": 7.0}


@pytest.mark.parametrize("function, kwargs, status, error", [
    ("unsendable", {"what": "file"}, "error", "the result 'it' cannot be sent as JSON: Object of type TextIOWrapper"),
    ("unsendable", {"what": "big"}, "error", "an integer of more than 64 bits"), ("unsendable", {"what": "deep"}, "error", "nested more than 60 deep"),
    ("unsendable", {"what": "long"}, "error", "more than 1048576 bytes with 'it'"), ("skips", {}, "skipped", "not on a Sunday"),
    ("takes_no_world", {}, "error", "the arguments do not fit takes_no_world(a, b=2): missing a required argument: 'a'"),
    ("takes_no_world", {"a": 1, "c": 2}, "error", "got an unexpected keyword argument 'c'")])
def test_ends_of_a_case(world, function, kwargs, status, error):
    outcome = run(world, function, kwargs=kwargs)
    assert outcome.status == status and error in outcome.error


@pytest.mark.parametrize("target, error", [
    (f"{CASES}:pases", "has no function pases; did you mean passes?"), (f"{CASES}:coroutine", "a coroutine or a generator"),
    (f"{CASES}:not_callable", "no function but int"), ("/nonexistent/case.py:f", "there is no file /nonexistent/case.py")])
def test_what_cannot_be_loaded(world, target, error):
    outcome = world.load(function=target)
    assert (outcome.status, outcome.kind) == ("error", "invalid_request") and error in outcome.error
    assert run(world, "passes").status == "passed"


@pytest.mark.parametrize("name, shown", [("wrapped_coroutine", "coroutine"), ("wrapped_generator",) * 2, ("wrapped_async_generator",) * 2,
                                         ("async_callable", "AsyncCallable")])
def test_what_would_pass_without_having_run(world, name, shown):
    outcome = run(world, name)
    assert (outcome.status, outcome.kind) == ("error", "invalid_request") and f"{shown} is a coroutine or a generator" in outcome.error, outcome.error
    assert not any("never awaited" in each for each in outcome.output)


def test_kwargs_and_value(world):
    assert run(world, "takes_no_world", kwargs={"a": 5}).reports[0]["value"] == 7


def test_cancel(world, tmp_path):
    world.load(function=f"{CASES}:fault")
    for rank in world.ranks:
        rank.send("run", id=100, kwargs={"kind": "thread", "folder": str(tmp_path / "gone")})  # fails at once
    for _ in range(4):  # a mark and a report of each
        assert "No such file" in world.frames.get(timeout=LIMIT)[1]["error"]
    rank = world.ranks[0]
    for number, asked in ((101, 100), (102, 102)):
        folder = tmp_path / str(number)
        folder.mkdir()
        rank.send("run", id=number, kwargs={"kind": "thread", "folder": str(folder)})
        assert eventually(lambda: rank.stage()[1] == "first")
        rank.send("cancel", id=asked)
        if asked != number:  # ignored
            for step in ("first", "second"):
                (folder / f"{step} 1").touch()
            assert world.frames.get(timeout=LIMIT)[1]["status"] == "passed"
    assert world.frames.get(timeout=LIMIT)[1]["kind"] == "cancelled"
    assert world.frames.get(timeout=LIMIT)[1]["frame"] == "report"
    rank.send("cancel", id=102)  # has ended
    assert run(world, "passes").status == "passed"


class TestCode:
    @pytest.fixture
    def write(self, tmp_path):
        def write(**files):
            for name, text in files.items():
                (tmp_path / f"{name}.py").write_text(text)
                os.utime(tmp_path / f"{name}.py", (1, 1))  # the same second: a .pyc file could not tell the difference
            return str(tmp_path)
        return write

    def value(self, world, folder, name="case:f", **members):
        file, _, function = name.partition(":")
        loaded = world.load(function=f"{folder}/{file}.py:{function}", **members)
        return loaded.reports[0]["reloaded"] if loaded.status == "passed" else None, world.run(kwargs={}).reports[0].get("value")

    def test_changed_code_is_loaded_anew(self, world, write):
        folder = write(helper="def g(): return 1", case="import helper\nkept = helper.g\ndef f(): return kept()")
        assert self.value(world, folder) == ([], 1)
        assert self.value(world, folder) == ([], 1)
        write(helper="def g(): return 2")
        reloaded, value = self.value(world, folder)
        assert {"case", "helper"} <= set(reloaded) and value == 2
        assert not list(pathlib.Path(folder).glob("__pycache__"))

    def test_changed_code_of_the_caller_is_loaded_anew(self, world, tmp_path):
        """On its sys.path and below its folder; what is installed there is no code of the user."""
        library = tmp_path / "folder" / "venv" / "lib" / "python3.9" / "site-packages"
        folders = {"case": tmp_path / "case", "of_path": tmp_path / "path", "of_folder": tmp_path / "folder" / "below", "of_library": library}
        for folder in folders.values():
            folder.mkdir(parents=True)
        (folders["case"] / "case.py").write_text(f"import sys\nsys.path += [{str(folders['of_folder'])!r}, {str(library)!r}]\n"
                                                 "import of_path, of_folder, of_library\ndef f(): return [of_path.x, of_folder.x, of_library.x]")
        for value in (1, 2, 3):
            for name in ("of_path", "of_folder", "of_library")[:3 if value != 2 else 1]:
                (folders[name] / f"{name}.py").write_text(f"x = {value}")
            found = self.value(world, str(folders["case"]), path=[str(folders["of_path"])], cwd=str(tmp_path / "folder"))[1]
            assert found == [value, 3 if value == 3 else 1, 1]

    def test_changed_module_that_is_preloaded(self, tmp_path):
        """The old one stays in all that the same server forks: fresh ranks of another one are asked for."""
        for name, text in (("mine", "x = 1"), ("case", "import mine\ndef f(): return mine.x")):
            (tmp_path / f"{name}.py").write_text(text)
        server = Server(preload="mine", environment={"PYTHONPATH": str(tmp_path)})
        world = World(server, 1)
        assert self.value(world, str(tmp_path)) == ([], 1)
        (tmp_path / "mine.py").write_text("x = 22")
        for _ in range(2):
            outcome = world.load(function=f"{tmp_path}/case.py:f")
            assert outcome.reports[0]["replace"] == f"{tmp_path}/mine.py, which is preloaded, has changed"
            world.kill()
            world.fork()  # by the same server, which had imported it before the change
        world.kill()
        assert server.end() == 0

    def test_old_bytecode_is_not_read(self, world, write):
        folder = write(helper="def g(): return 1", case="import helper\ndef f(): return helper.g()")
        py_compile.compile(f"{folder}/helper.py")
        write(helper="def g(): return 2")
        assert self.value(world, folder)[1] == 2

    def test_syntax_error(self, world, write):
        folder = write(case="def f(: pass")
        outcome = world.load(function=f"{folder}/case.py:f")
        assert outcome.kind == "invalid_request" and f'File "{folder}/case.py", line 1' in outcome.error
        write(case="def f(): return 3")
        assert self.value(world, folder)[1] == 3

    def test_import_that_fails(self, world, write):
        folder = write(case="import nonexistent_module")
        outcome = world.load(function=f"{folder}/case.py:f")
        assert outcome.error == "ModuleNotFoundError: No module named 'nonexistent_module'"
        assert outcome.traceback.count("File") == 1
        assert "replace" in outcome.reports[0]  # perhaps it is the second import that fails

    def test_extension_that_was_built_again(self, world, write):
        extension = importlib.util.find_spec("_codecs_tw").origin  # of this Python: any that is not loaded
        folder = write(case="import _codecs_tw\ndef f(): return _codecs_tw.__file__")
        shutil.copy(extension, folder)
        assert self.value(world, folder)[1].startswith(folder)
        shutil.copy(extension, folder)
        outcome = world.load(function=f"{folder}/case.py:f")
        assert outcome.reports[0]["replace"].endswith("has been built again")
        world.kill()
        world.fork()
        assert self.value(world, folder)[1].startswith(folder)

    def test_files_of_one_name(self, world, write, tmp_path):
        folder = write(case="import helper\ndef f(): return helper.x", helper="x = 1")
        other = tmp_path / "other"
        other.mkdir()
        (other / "case.py").write_text("import helper\ndef f(): return helper.x")
        (other / "helper.py").write_text("x = 2")
        assert self.value(world, folder)[1] == 1
        assert self.value(world, str(other), roots=[str(tmp_path)])[1] == 2
        assert self.value(world, folder)[1] == 1

    def test_file_named_like_a_library(self, world, write):
        folder = write(json="def f():\n  import json\n  return json.dumps([1])")
        assert self.value(world, folder, "json:f")[1] == "[1]"

    def test_file_with_dots_in_its_name(self, world, write, tmp_path):
        folder = write(**{"case.v1": "def f(): return __name__"})
        assert self.value(world, folder, "case.v1:f")[1] == "case.v1"
        write(**{"case.v1": "def f(): return 2"})
        reloaded, value = self.value(world, folder, "case.v1:f")
        assert "case.v1" in reloaded and value == 2
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__init__.py").write_text("x = 3")
        (tmp_path / "package" / "case.v1.py").write_text("import package\ndef f(): return package.x")
        assert self.value(world, f"{folder}/package", "case.v1:f")[1] == 3

    def test_package_and_path(self, world, tmp_path):
        (tmp_path / "tests" / "deep").mkdir(parents=True)
        (tmp_path / "lib").mkdir()
        (tmp_path / "tests" / "__init__.py").write_text("")
        (tmp_path / "tests" / "deep" / "__init__.py").write_text("")
        (tmp_path / "tests" / "util.py").write_text("x = 5")
        (tmp_path / "lib" / "mine.py").write_text("y = 6")
        (tmp_path / "tests" / "deep" / "case.py").write_text("from ..util import x\nimport mine, os\ndef f(): return [__name__, x, mine.y, os.getcwd()]")
        assert self.value(world, str(tmp_path / "tests" / "deep"), path=[str(tmp_path / "lib")], cwd=str(tmp_path))[1] == [
            "tests.deep.case", 5, 6, str(tmp_path)]

    def test_a_folder_of_the_caller_that_is_named_python(self, world, write, tmp_path):
        """Only those of an installation, which have a version, are not taken from the caller's sys.path."""
        (tmp_path / "python").mkdir()
        (tmp_path / "python" / "beside.py").write_text("x = 7")
        folder = write(case="import sys, beside\ndef f(): return [beside.x, '/nonexistent/lib/python3.2' in sys.path]")
        assert self.value(world, folder, path=[str(tmp_path / "python"), "/nonexistent/lib/python3.2"])[1] == [7, False]

    def test_what_a_library_changes_at_each_import_is_its_own(self, world, write, tmp_path):
        library = tmp_path / "site-packages" / "lib"  # not of the user
        library.mkdir(parents=True)
        (library / "changes_the_limit.py").write_text("import sys\nsys.setrecursionlimit(sys.getrecursionlimit() + 1)")
        folder = write(case="import sys\ndef f():\n  import changes_the_limit\n  return sys.getrecursionlimit()\ndef forget(): del sys.modules['changes_the_limit']")
        first = self.value(world, folder, path=[str(library)])[1]
        self.value(world, folder, "case:forget", path=[str(library)])
        assert self.value(world, folder, path=[str(library)])[1] == first + 1
        assert self.value(world, folder, path=[str(library)])[1] == first + 1  # is there, and has not been put back

    def test_names_in_shared_memory_that_a_case_removes_are_no_harm(self, world, write):
        folder = write(case="import os\npid = str(os.getpid())\nopen(f'/dev/shm/of_{pid}', 'w').close()\n"
                            "def names(): return [name for name in os.listdir('/dev/shm') if pid in name]\n"
                            "def f():\n  for name in names(): os.unlink(f'/dev/shm/{name}')")
        assert len(self.value(world, folder, "case:names")[1]) == 2
        world.load(function=f"{folder}/case.py:f")
        outcome = world.run(kwargs={})
        assert outcome.status == "passed" and not outcome.left and not outcome.differed
        assert self.value(world, folder, "case:names")[1] == []

    @pytest.mark.parametrize("text, left, differed", [
        ("threading.Thread(target=time.sleep, args=[1000], daemon=True).start()", ["threads"], []), ("threading.Thread(target=mine, daemon=True).start()", ["threads"], []),
        ("threading.Timer(1000, functools.partial(mine)).start()", ["threads"], []), ("signal.signal(signal.SIGUSR1, mine)", [], ["signals"]),
        ("starts_a_thread.begin()", [], []), ("threading.excepthook = mine", [], ["threading"]), ("gc.callbacks.append(quiet)", [], ["gc"]),
        ("sys.unraisablehook = mine", [], ["sys hooks"]),
        ("resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))", [], ["limits"])])
    def test_a_first_import_excuses_only_libraries(self, world, write, tmp_path, text, left, differed):
        library = tmp_path / "site-packages" / "lib"  # not of the user
        library.mkdir(parents=True)
        (library / "starts_a_thread.py").write_text("import gc, signal, threading\nhold = threading.Event().wait\ndef wait(*_): hold()\ndef quiet(*_): pass\n"
                                                    "def begin():\n  threading.Thread(target=wait, daemon=True).start()\n  signal.signal(signal.SIGUSR2, wait)\n"
                                                    "  threading.excepthook = quiet\n  gc.callbacks.append(quiet)")
        folder = write(case="import functools, gc, os, resource, signal, sys, threading, time\ndef mine(*_): time.sleep(1000)\ndef quiet(*_): pass\n"
                            f"def f():\n  import starts_a_thread\n  {text}\n"
                            "def rest(): return [threading.active_count(), signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL]")
        world.kill()
        world.fork()
        before = self.value(world, folder, "case:rest")[1]
        world.load(function=f"{folder}/case.py:f", path=[str(library)])
        outcome = world.run(kwargs={})
        assert outcome.status == "passed" and list(outcome.left) == left and list(outcome.differed) == differed, outcome.reports
        accepted = "changed threading, gc, signals, threads" if "starts" in text else "changed"
        assert any(accepted in each for each in outcome.reports[0]["warnings"]) == ("starts" in text), outcome.reports
        after = self.value(world, folder, "case:rest", path=[str(library)])[1]
        assert after == [before[0] + ("starts" in text), True]
        assert not world.run(kwargs={}).left

    def test_script(self, world, tmp_path):
        script = tmp_path / "script.py"
        script.write_text("import sys, os\nif __name__ == '__main__':\n  print(sys.argv[1:], os.environ['RANK'])\n  sys.exit(int(sys.argv[2]))")
        world.load(script=str(script))
        assert world.run(argv=["--x", "0"]).status == "passed"
        assert eventually(lambda: "['--x', '0'] 1" in world.output(1))
        outcome = world.run(argv=["--x", "3"])
        assert (outcome.status, outcome.error) == ("error", "sys.exit(3)")


ITEMS = """
import os, pytest, threading, time
os.environ["KEPT"] = "1"

class ImportsAtItsEnd:
    def __del__(self): import colorsys

@pytest.fixture(scope="module")
def shared():
    os.environ["SHARED"] = "1"
    yield
    del os.environ["SHARED"]

@pytest.fixture(scope="module")
def changing():
    "Changes of each kind, all of which it takes back."
    import logging, signal, sys, warnings
    handler, before, signals = logging.NullHandler(), os.getcwd(), signal.getsignal(signal.SIGUSR1)
    kept = os.environ.pop("KEPT")
    os.environ["SHARED"] = "1"
    logging.getLogger().addHandler(handler)
    logging.getLogger("of_fixture").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="of_fixture")
    sys.path.insert(0, "of_fixture")
    os.chdir("/")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    def holds():
        return (os.environ.get("SHARED") == "1" and "KEPT" not in os.environ and handler in logging.getLogger().handlers and os.getcwd() == "/"
                and logging.getLogger("of_fixture").level == logging.ERROR and sys.path[0] == "of_fixture"
                and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
    yield holds
    assert holds()
    os.environ["KEPT"] = kept
    del os.environ["SHARED"]
    logging.getLogger().removeHandler(handler)
    logging.getLogger("of_fixture").setLevel(0)
    sys.path.remove("of_fixture")
    os.chdir(before)
    signal.signal(signal.SIGUSR1, signals)

def test_changing(changing): assert changing()
def test_changing_leaks(changing):
    os.environ["LEAK"], os.environ["SHARED"] = "1", "2"
def test_changing_again(changing): assert changing() and "LEAK" not in os.environ

@pytest.fixture(scope="module")
def with_thread():
    wanted = threading.Event()
    thread = threading.Thread(target=wanted.wait)
    thread.start()
    yield
    assert thread.is_alive()
    wanted.set()
    thread.join()

def test_with_thread(with_thread): pass
def test_after_thread(): pass
def test_fixture_of_pytest(tmp_path): os.environ["LEAK"] = "1"

class TestClass:
    @classmethod
    def setup_class(cls): os.environ["OF_CLASS"] = "1"
    @classmethod
    def teardown_class(cls): del os.environ["OF_CLASS"]
    def test_method(self): assert os.environ["OF_CLASS"] == "1"
    def test_method_again(self): assert os.environ["OF_CLASS"] == "1"

@pytest.mark.parametrize("n", [1, 2])
def test_parameter(world, n, tmp_path):
    assert world.size == 2 and n and tmp_path.exists()

def test_shared(shared): assert os.environ["SHARED"] == "1"
def test_shared_again(shared): assert os.environ["SHARED"] == "1"

@pytest.mark.skip(reason="no moon")
def test_skip(): pass

@pytest.mark.xfail
def test_expected(): assert 0

def test_leak(): os.environ["LEAK"] = "1"

def test_garbage(): each = ImportsAtItsEnd(); each.itself = each
def test_thread(): threading.Thread(target=time.sleep, args=[1000], name="left over", daemon=True).start()

def test_one_rank(world):
    number = world.rank
    assert number == 0

@pytest.fixture
def broken(): raise KeyError("broken fixture")
def test_broken(broken): pass
"""

CONFTEST = """
import logging, os, threading

handler = logging.NullHandler()

def pytest_configure(config):
    config.hook_before, threading.excepthook = threading.excepthook, lambda args: None
    os.environ["PYTEST_VERSION"] = "8.4"
    logging.getLogger().addHandler(handler)

def pytest_unconfigure(config):
    threading.excepthook = config.hook_before
    del os.environ["PYTEST_VERSION"]
    logging.getLogger().removeHandler(handler)
"""


class TestItems:
    @pytest.fixture
    def folder(self, world, tmp_path):
        (tmp_path / "test_items.py").write_text(ITEMS)
        self.load(world, tmp_path)
        return tmp_path

    def load(self, world, folder):
        loaded = world.load(pytest=["test_items.py"], cwd=str(folder), roots=[str(folder)])
        assert loaded.status == "passed", loaded.error
        assert loaded.reports[0]["collected"] == loaded.reports[1]["collected"] and loaded.reports[0]["digest"] == loaded.reports[1]["digest"]
        return loaded.reports[0]

    def item(self, world, name, following=None):
        return world.run(nodeid=f"test_items.py::{name}", next=following and f"test_items.py::{following}")

    def test_passes_and_skips(self, world, folder):
        for name, status in (("test_parameter[1]", "passed"), ("test_parameter[2]", "passed"), ("test_expected", "skipped"), ("test_skip", "skipped")):
            outcome = self.item(world, name)
            assert outcome.status == status and not outcome.differed
            assert outcome.reports[0]["pytest"]["reports"][0]["nodeid"] == f"test_items.py::{name}"
        assert outcome.error == "Skipped: no moon" and outcome.kind == "unsupported"
        assert "test session starts" not in world.output(0)

    def test_fixtures_of_a_module_live_on(self, world, folder):
        assert not self.item(world, "test_shared", "test_shared_again").differed
        outcome = self.item(world, "test_shared_again")
        assert outcome.status == "passed" and not outcome.differed  # the module's fixture has ended

    def test_what_a_fixture_has_changed_is_kept_and_all_else_put_back(self, world, folder):
        for name, following, differed in (("test_changing", "test_changing_leaks", {}),
                                          ("test_changing_leaks", "test_changing_again", {"environment": ["LEAK", "SHARED"]}),
                                          ("test_changing_again", None, {})):
            outcome = self.item(world, name, following)
            assert (outcome.status, outcome.error) == ("passed", "")
            assert {group: sorted(names) for group, names in outcome.differed.items()} == differed and not outcome.left

    def test_threads_of_a_fixture(self, world, folder):
        assert not self.item(world, "test_with_thread", "test_thread").left
        assert not self.item(world, "test_thread", "test_after_thread").left  # not known yet whose it is
        assert [name for name in self.item(world, "test_after_thread").left["threads"] if name.startswith("left over ")]

    def test_fixtures_of_pytest_hide_no_leak(self, world, folder):
        assert self.item(world, "test_fixture_of_pytest", "test_leak").differed == {"environment": ["LEAK"]}

    def test_setup_of_a_class(self, world, folder):
        for name, following in (("TestClass::test_method", "TestClass::test_method_again"), ("TestClass::test_method_again", None)):
            outcome = self.item(world, name, following)
            assert outcome.status == "passed" and not outcome.differed

    def test_state_is_put_back(self, world, folder):
        assert self.item(world, "test_leak").differed == {"environment": ["LEAK"]}

    def test_import_of_a_reset_excuses_no_later_item(self, world, folder):
        assert self.item(world, "test_garbage", "test_thread").status == "passed"
        outcome = self.item(world, "test_thread")
        assert [name for name in outcome.left["threads"] if name.startswith("left over ")], outcome.reports

    def test_failures(self, world, folder):
        outcome = self.item(world, "test_one_rank")
        assert (outcome.status, outcome.kind, outcome.culprit) == ("failed", "mismatch", 1)
        assert outcome.error == outcome.reports[1]["error"] == "AssertionError: assert 1 == 0"  # rewritten
        assert outcome.traceback.startswith(f"Traceback (most recent call last):\n  File \"{folder}/test_items.py\"")
        self.load(world, folder)
        outcome = self.item(world, "test_broken")
        assert outcome.status == "error" and outcome.error == "KeyError: 'broken fixture'"
        self.load(world, folder)
        assert "has collected no item test_items.py::test_other" in self.item(world, "test_other").error

    def test_session_is_kept_until_a_file_changes(self, world, folder):
        assert self.load(world, folder)["reloaded"] == []
        (folder / "test_items.py").write_text("def test_new(): pass")
        assert self.load(world, folder)["reloaded"] == ["test_items"]
        assert self.item(world, "test_new").status == "passed"
        assert run(world, "passes").status == "passed"  # another kind of target

    def test_fixture_that_is_alive_at_the_end_of_the_session(self, world, folder):
        self.item(world, "test_shared", "test_leak")
        assert self.item(world, "test_leak", "test_shared_again").differed == {"environment": ["LEAK"]}
        for name in ("SHARED", "LEAK"):
            assert run(world, "environment", kwargs={"name": name}).reports[0].get("value") is None

    @pytest.mark.parametrize("following", [None, "test_shared_again"])
    def test_what_a_session_has_of_its_own_ends_with_it(self, world, tmp_path, following):
        """As that of pytest 8.4 and later has hooks."""
        (tmp_path / "test_items.py").write_text(ITEMS)
        (tmp_path / "conftest.py").write_text(CONFTEST)
        script = tmp_path / "script.py"  # which imports nothing that would excuse a change
        script.write_text("import sys, threading\nthread = threading.Thread(target=int, args=sys.argv[1:])\nthread.start()\nthread.join()")
        self.load(world, tmp_path)
        assert self.item(world, "test_shared", following).status == "passed"
        for text in ("planted", "planted again"):
            assert not world.load(script=str(script)).differed
            outcome = world.run(argv=[text])
            assert outcome.status == "passed" and not outcome.differed
            assert eventually(lambda: f"ValueError: invalid literal for int() with base 10: '{text}'" in world.output(0))

    @pytest.mark.parametrize("text, error", [("import nonexistent_module", "No module named 'nonexistent_module'"), ("def f(: pass", "invalid syntax")])
    def test_collection_that_fails(self, world, folder, text, error):
        (folder / "test_items.py").write_text(text)
        outcome = world.load(pytest=["test_items.py"], cwd=str(folder), roots=[str(folder)])
        assert (outcome.status, outcome.kind) == ("error", "invalid_request") and error in outcome.error
        assert "exit code 4" in world.load(pytest=["--nonsense"], cwd=str(folder)).error
        assert run(world, "passes").status == "passed"


def test_preload(tmp_path):
    (tmp_path / "fine.py").write_text("import time\ntime.sleep(0.01)")
    (tmp_path / "threaded.py").write_text("import threading, time, os\nimporter = os.getpid()\n"
                                          "threading.Thread(target=time.sleep, args=[1000], daemon=True).start()")
    (tmp_path / "case.py").write_text("import fine, threaded, os\ndef f(): return [threaded.importer == os.getpid()]")
    server = Server(preload="fine,threaded", environment={"PYTHONPATH": str(tmp_path)})
    assert server.ready["preloaded"] == ["fine"] and server.ready["import_ms"][0][1] >= 10
    assert server.ready["deferred"][0]["module"] == "threaded" and "it starts threads" in server.ready["deferred"][0]["why"]
    assert eventually(lambda: "threaded cannot be imported before the fork" in server.text())
    world = World(server, 2)
    world.load(function=f"{tmp_path}/case.py:f")
    assert world.run(kwargs={}).reports[1]["value"] == [True]
    server.send("check")
    assert server.next("checked")["changed"] == []
    (tmp_path / "fine.py").write_text("x = 1")
    server.send("check")
    assert server.next("checked")["changed"] == [str(tmp_path / "fine.py")]
    assert server.end() == 0


@pytest.mark.parametrize("text, error", [("1 / 0", "ZeroDivisionError: division by zero"), (None, "No module named 'broken'")])
def test_preload_that_cannot_be_imported(tmp_path, text, error):
    if text:
        (tmp_path / "broken.py").write_text(text)
    server = Server(preload="broken", environment={"PYTHONPATH": str(tmp_path)})
    assert server.ready["module"] == "broken" and error in server.ready["error"] and sys.executable in server.ready["error"]
    assert server.process.wait(timeout=LIMIT) == 2


def test_no_nccl_is_loaded_for_its_version():
    """Where none is, torch tells the one that is part of it."""
    text = ("from types import SimpleNamespace as Fake\nfrom _ranks import group\n"
            "torch = Fake(distributed=Fake(is_nccl_available=lambda: True), cuda=Fake(nccl=Fake(version=lambda: (2, 1, 2))))\nprint(group.nccl_version(torch))")
    folder = os.path.dirname(ranks_parent.FOLDER)
    assert subprocess.run([sys.executable, "-c", text], cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout == "(2, 1, 2)\n"


def test_backend_without_torch(server):
    world = World.__new__(World)
    world.server, world.size, world.backend = server, 1, "gloo"
    with pytest.raises(AssertionError, match="the backend gloo needs torch, which is not preloaded: start with --preload torch"):
        world.fork()
    assert server.next("ended")["status"] == 2 << 8


def test_broken_frames_end_the_receiver(world):
    world.ranks[0].reader.channel.socket.sendall(b"nonsense\n")
    assert world.server.next("ended")["status"] == 2 << 8
    assert eventually(lambda: "no frame: b'nonsense'" in world.output(0))
    world.ranks.pop(0)
    world.kill()
    world.fork()
    server = Server()
    server.send("dance")
    assert server.process.wait(timeout=LIMIT) == 2 and eventually(lambda: "unknown frame 'dance'" in server.text())


def test_frames_of_many_bytes(world):
    text = "x" * 1_000_000
    outcome = run(world, "takes_no_world", kwargs={"a": text, "b": ""})
    assert outcome.status == "passed" and (outcome.reports[0]["value"], outcome.reports[0]["warnings"]) == (text, [])
    with pytest.raises(ranks_parent.frames.BrokenFrame, match="more than 4194304 bytes"):
        channel = ranks_parent.frames.Channel(None)
        channel._partial, channel._size = [b"x"], 1 << 23
        ranks_parent.socket.recv_fds, kept = (lambda *_: (b"x", [], 0, None)), ranks_parent.socket.recv_fds
        try:
            channel.receive()
        finally:
            ranks_parent.socket.recv_fds = kept


def test_what_is_returned_and_the_results_have_a_limit(world):
    sent = 500_000
    room = (1 << 20) - len('"it": "", ') - sent - len('""')
    report = run(world, "send_and_return", kwargs={"sent": sent, "returned": room}).reports[0]
    assert (len(report["results"]["it"]), len(report["value"]), report["warnings"]) == (sent, room, [])
    report = run(world, "send_and_return", kwargs={"sent": sent, "returned": room + 1}).reports[0]
    assert report["status"] == "passed" and len(report["results"]["it"]) == sent and "value" not in report
    assert report["warnings"] == ["what the function returned is left out: 1048577 bytes with the results, of at most 1048576"]


def test_replaced_worlds_leave_nothing_in_the_server(server):
    def held():
        return len(os.listdir(f"/proc/{server.process.pid}/fd")), len(os.listdir(f"/proc/{server.process.pid}/task"))
    before = held()
    for _ in range(10):
        world = World(server, 2)
        assert run(world, "passes").status == "passed"
        world.kill()
    assert held() == before
