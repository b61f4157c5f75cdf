"""Cases in Python through the daemon: `Pool.call`, `cppool.call`, the protocol over a pipe. The Python half is tested in ranks_test.py."""
import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest

import cppool
import pytest

import support
from support import BUILD, children_of, eventually, is_running

CASES = str(pathlib.Path(__file__).with_name("ranks_cases.py"))


@pytest.fixture(scope="module", params=["here", "agents"])  # of an agent for each rank
def pools(request, tmp_path_factory):
    launch = support.launcher(tmp_path_factory.mktemp("launch")) if request.param == "agents" else None
    with cppool.Pools(python=True, backend="host", start_limit=60.0, launch=launch, environment={"CPPOOL_HEAD_ADDRESS": "127.0.0.1"}) as pools:
        yield pools


@pytest.fixture
def pool(pools):
    return pools.at(2)


def function(name):
    return f"{CASES}:{name}"


def test_hello(pool):
    hello = pool.hello()
    assert hello["ranks"] == "processes" and hello["world_size"] == 2 and hello["backend"] == "host"
    assert hello["python"]["path"] == sys.executable and hello["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert {"python", "fresh", "own_group", "verdict", "sampling", "progress"} <= set(hello["features"]) and "kernels" not in hello["features"]
    assert pool.cases() == [] and pool.stats()["memory"] == []


@pytest.fixture(params=[1, 2, 4, 8])
def size(request, pools):
    if request.param in (1, 8) and pools.at(2).hello().get("nodes"):
        pytest.skip("one rank is not for two agents, and eight processes are those of one machine")
    return request.param


def test_passes(pools, size):
    result = pools.call(function("passes"), {"text": "hi"}, world_size=size)
    assert result.ok and [rank.extra["value"] for rank in result.ranks] == list(range(size)), result.describe()
    assert not result.replaced and not result.warnings


def test_times_checks_results(pool):
    result = pool.call(function("measure"), warmup=1, repeat=3)
    assert result.ok and result.checks[0].max_abs_err == 0.5 and result.ranks[1].extra["index"] == 2, result.describe()
    assert result.ranks[0].gpu_ms["forward"] >= 1 and result.ranks[0].gpu_ms["forward/attend"] >= 1
    assert len(result.json["ranks"][0]["samples"]["forward"]) == 3


def slices(file, rank, stage):
    """Of the stages: [(name, iteration, begin, end)] in microseconds."""
    timeline = json.loads(file.read_text())
    events = [event for event in timeline["traceEvents"] if event["ph"] == "X" and event["pid"] == 2 + rank and ("stage" in event["args"]) == stage]
    return timeline["otherData"], [(event["args"].get("stage", event["name"]), event["args"].get("iteration"), event["ts"], event["ts"] + event["dur"])
                                   for event in events]


def test_timeline(pool, tmp_path):
    file = tmp_path / "trace.json"
    nodes = [node["node"] for node in pool.hello().get("nodes", ())]

    def of(rank):  # a file for each node
        return file.with_name(f"trace.{nodes[rank].replace(':', '-')}.json") if nodes else file
    result = pool.call(function("measure"), warmup=1, repeat=2, trace=file)
    assert result.ok and not result.warnings, result.describe()
    for rank in range(2):
        about, stages = slices(of(rank), rank, True)
        assert about["world_size"] == 2 and about["dropped_slices"] == [0, 0] and about["backend"] == "host"
        assert [(name, iteration) for name, iteration, _, _ in stages] == [
            ("before", None), *[(name, iteration) for iteration in ("warmup", 0, 1) for name in ("forward", "forward/attend")]]
        _, calls = slices(of(rank), rank, False)
        assert [name for name, *_ in calls] == ["load", "wait for all ranks", "run case"]
        (_, _, case_begin, case_end), = calls[2:]
        slack = about.get("clock_offset_error_ns", 0) / 1000  # the calls are those of the head's thread for the rank
        for (_, _, begin, end), (_, _, inner_begin, inner_end) in zip(stages[1::2], stages[2::2]):
            assert case_begin - slack <= begin <= inner_begin and inner_end <= end <= case_end + slack and inner_end - inner_begin >= 1000
        assert all(before[3] <= after[2] for before, after in zip(stages[1::2], stages[3::2]))
    assert pool.call(function("passes"), trace=file).ok and slices(of(0), 0, True)[1] == []
    # Also of a case that has failed; and an iteration without a stage is one.
    result = pool.call(function("traced_failure"), repeat=3, trace=file)
    assert result.status == "failed"
    assert [name for name, *_ in slices(of(1), 1, True)[1]] == ["iteration", "iteration", "last"]
    result = pool.call(function("many_stages"), {"count": 20000}, trace=file)
    assert result.ok and any("lacks 23615 of rank 0" in warning for warning in result.warnings), result.warnings
    result = pool.call(function("measure"), trace=tmp_path / "none" / "trace.json")
    assert result.failure.kind == "invalid_request" and "there is no folder" in result.error


def test_sampling(pool):
    request = {"op": "run", "sampling": {"precision": 1, "max_ms": 1000}, "python": {"function": function("measure")}}
    result = pool._result(json.dumps(request).encode())
    assert result.ok and result.json["stopped"] == "precision", result.describe()


def test_a_check_that_does_not_hold(pool):
    result = pool.call(function("wrong"), verdict=False)
    assert (result.status, result.failure.kind) == ("failed", "mismatch") and [check.ok for check in result.checks[:3]] == [False, False, True]
    assert not result.replaced  # no rank waits for another
    assert pool.call(function("wrong")).replaced.startswith("to see whether")


# The table of faults: every kind at every world size. W = 1: no other rank waits.
FAULTS = [("exception", "error", "internal", "ValueError: planted"), ("assertion", "failed", "mismatch", "assert out == 3"),
          ("memory", "error", "out_of_memory", "MemoryError"), ("exit", "error", "internal", "sys.exit(3)"),
          ("_exit", "error", "internal", "exited with code 5"), ("abort", "error", "internal", "killed by signal 6"),
          ("segmentation fault", "error", "internal", "killed by signal 11")]


@pytest.mark.parametrize("kind, status, failure, text", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_the_cause_comes_first(pools, tmp_path, size, kind, status, failure, text):
    """The last rank fails while the others wait for it: the answer names it, and the next case passes."""
    result = pools.call(function("fault"), {"folder": str(tmp_path), "kind": kind}, world_size=size, verdict=False)
    assert (result.status, result.failure.kind, result.failure.rank) == (status, failure, size - 1), result.describe()
    assert text in result.error and result.failure.stage == "fault" and result.replaced
    nodes = pools.at(size).hello().get("nodes")
    assert result.failure.node == (nodes[-1]["node"] if nodes else None)
    for rank in result.ranks[:-1]:
        assert "second" in rank.error and any("ranks_cases.py" in frame for frame in rank.extra["stack"])
    assert bool(result.ranks[-1].traceback) == (kind != "_exit"), "a traceback, or faulthandler's text"
    assert pools.call(function("passes"), world_size=size).ok


@pytest.mark.parametrize("kind, text", [("sleep", "ranks_cases.py"), ("GIL", "it does not answer"), ("stop", "it is stopped")])
def test_a_hang(pools, tmp_path, kind, text):
    """At all world sizes at once, since each waits for its deadline."""
    def hang(size):
        folder = tmp_path / str(size)
        folder.mkdir()
        return pools.call(function("fault"), {"folder": str(folder), "kind": kind}, world_size=size, deadline=3)
    sizes = [2, 4] if pools.at(2).hello().get("nodes") else [1, 2, 4, 8]
    for size in sizes:
        assert pools.call(function("passes"), world_size=size).ok
    with concurrent.futures.ThreadPoolExecutor() as threads:
        results = dict(zip(sizes, threads.map(hang, sizes)))
    for size, result in results.items():
        assert (result.status, result.failure.kind) == ("error", "timeout") and not result.fatal, result.describe()
        assert text in result.ranks[-1].error and "fault" in result.ranks[-1].error
        assert all("second" in rank.error for rank in result.ranks[:-1])
        assert result.replaced == "the deadline has passed" and pools.call(function("passes"), world_size=size).ok


@pytest.mark.parametrize("kind", ["sleep", "GIL"])
def test_the_stacks_of_a_hang(pool, tmp_path, kind):
    """Of a rank that does not answer by a signal. A busy machine may not have them in time."""
    for number in range(9):
        (tmp_path / str(number)).mkdir()
        result = pool.call(function("fault"), {"folder": str(tmp_path / str(number)), "kind": kind}, deadline=2)
        lines = ["\n".join(rank.extra.get("stack", ())) for rank in result.ranks]
        if "meet" in lines[0] and "<lambda>" in lines[1]:
            break
    else:
        pytest.fail(result.describe())
    assert result.failure.kind == "timeout" and all("ranks_cases.py" in each for each in lines), result.describe()


def test_an_output_flood(pools, tmp_path, size):
    """More than 64 MiB is cut, and told."""
    result = pools.call(function("fault"), {"folder": str(tmp_path), "kind": "great flood"}, world_size=size)
    assert result.ok and not result.replaced, result.describe()
    told = f"(more than {64 << 20} bytes of output: the rest of this case's is dropped)"
    assert eventually(lambda: f"[rank {size - 1}] {told}" in pools.at(size).stderr_tail())
    assert pools.call(function("passes"), world_size=size).ok


@pytest.mark.parametrize("kind", ["thread", "child", "orphan", "setsid orphan"])
def test_what_is_left_behind_replaces_the_ranks(pools, tmp_path, size, kind):
    result = pools.call(f"{CASES}:fault", {"folder": str(tmp_path), "kind": kind}, world_size=size)
    assert result.ok and list(result.left) == ["threads" if kind == "thread" else "children"], result.describe()
    assert "left what cannot be put back" in result.replaced and pools.call(function("passes"), world_size=size).ok
    pid = tmp_path / "pid"
    assert pid.exists() == (kind != "thread")
    if pid.exists():
        assert eventually(lambda: not is_running(int(pid.read_text())))


def test_state_is_put_back_and_told(pool):
    result = pool.call(function("change_state"))
    assert result.ok and "SECRET_OF_TEST" in result.differed["environment"], result.describe()
    assert "hidden value" not in json.dumps(result.json)
    first, second = (pool.call(function("draw"), seed=7).json["ranks"] for _ in range(2))
    assert [rank["drawn"] for rank in first] == [rank["drawn"] for rank in second]


def test_environment(pool):
    assert pool.call(function("environment"), {"name": "OF_CASE"}, env={"OF_CASE": "1"}).ranks[0].extra["value"] == "1"
    assert "value" not in pool.call(function("environment"), {"name": "OF_CASE"}).ranks[0].extra


def test_environment_of_the_caller(pool, monkeypatch):
    """What has changed since the pool was made, whenever its daemon has started."""
    def values(of, **options):
        return {rank.extra.get("value") for rank in of.call(function("environment"), {"name": "OF_CALLER"}, **options).ranks}

    def forget(of):
        monkeypatch.delenv("OF_CALLER")
        assert values(of) == {None}
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OF_BYTES", "\udc80")
    monkeypatch.setenv("OF_CALLER", "1")
    assert values(pool) == {"1"} and values(pool, env={"OF_CALLER": "2"}) == {"2"} and values(pool, env={"OF_CALLER": None}) == {None}
    assert [rank.extra["value"] for rank in pool.call(function("environment"), {"name": "RANK"}).ranks] == ["0", "1"]
    forget(pool)
    with cppool.Pool(1, python=True, backend="host", environment={"OF_POOL": "1"}) as another:
        monkeypatch.setenv("OF_CALLER", "3")
        monkeypatch.setenv("OF_POOL", "3")
        assert values(another) == {"3"}
        assert another.call(function("environment"), {"name": "OF_POOL"}).ranks[0].extra["value"] == "1"
        forget(another)
    with cppool.Pool(1, python=True, backend="host") as another:
        monkeypatch.setenv("OF_CALLER", "4")
        another.hello()  # starts the daemon with it
        forget(another)
        monkeypatch.setattr(os, "environ", {**os.environ, "OF_CALLER": "5"})
        assert values(another) == {"5"}


def test_values_of_the_environment_are_told_nowhere(tmp_path):
    """Not in answers, repeat commands, timelines and logs, also where the case fails."""
    value, trace = "the value of a secret", tmp_path / "trace.json"
    lines = []
    with cppool.Pool(2, python=True, backend="host", environment={"OF_POOL": value}, on_stderr=lines.append, log_level="debug") as pool:
        for kind in ("thread", "exception", "abort"):
            (tmp_path / kind).mkdir()
            result = pool.call(function("fault"), {"folder": str(tmp_path / kind), "kind": kind}, env={"OF_CASE": value}, trace=trace)
            assert 'OF_POOL="${OF_POOL?}"' in result.command
            for text in (json.dumps(result.json), result.describe(), result.command, trace.read_text()):
                assert value not in text, text
        assert pool.call(function("environment"), {"name": "OF_POOL"}).ranks[0].extra["value"] == value
    assert lines and value not in "\n".join(lines)


def test_the_kernel_prefers_ranks_when_memory_is_short(pool, tmp_path):
    (tmp_path / "of_rank.py").write_text("def score(): return open('/proc/self/oom_score_adj').read().strip()\n")
    assert [rank.extra["value"] for rank in pool.call(f"{tmp_path}/of_rank.py:score").ranks] == ["500"] * 2
    with open("/proc/self/oom_score_adj", encoding="ascii") as of_test, open(f"/proc/{pool.hello()['pid']}/oom_score_adj", encoding="ascii") as of_daemon:
        assert of_test.read() == of_daemon.read() != "500\n"


def polluting(tmp_path):
    file = tmp_path / "polluted.py"
    file.write_text("import sys\nsys.modules.setdefault('of_case', []).append(1)\n"  # what no snapshot knows
                    "def leaves(): sys.modules['of_case'].append(2)\n"
                    "def fails_after(): assert 2 not in sys.modules['of_case'], 'polluted'\n"
                    "def fails(): assert 0\n")
    return str(file)


def test_a_rank_that_is_killed_while_it_waits(pool, tmp_path):
    (tmp_path / "of_rank.py").write_text("import os\ndef pid(): return os.getpid()\n")
    case = f"{tmp_path}/of_rank.py:pid"
    for _ in range(5):
        pids = [rank.extra["value"] for rank in pool.call(case).ranks]
        os.kill(pids[-1], signal.SIGKILL)
        result = pool.call(case)
        assert result.ok and "before the case" in result.replaced and "killed by signal 9" in result.replaced, result.describe()
        assert not {rank.extra["value"] for rank in result.ranks} & set(pids)


def test_an_import_that_ends_the_process(pool, tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(5)\ndef case(): pass\n")
    result = pool.call(f"{tmp_path}/ends.py:case")
    assert result.status == "error" and "while it loaded the case" in result.error and "exited with code 5" in result.error, result.describe()
    assert pool.call(function("passes")).ok


def test_verdict(pool, tmp_path):
    file = polluting(tmp_path)
    assert pool.call(f"{file}:leaves", fresh=True).ok
    result = pool.call(f"{file}:fails_after")
    assert (result.status, result.failure.kind) == ("failed", "polluted"), result.describe()
    assert "(polluted: it passes on fresh ranks; these had run polluted.py:leaves)" in result.error
    assert pool.call(function("change_state")).differed and pool.call(f"{file}:leaves").ok
    error = pool.call(f"{file}:fails_after").error
    assert "these had run 3 cases, last polluted.py:leaves, which changed " in error and "environment (" in error, error
    assert pool.call(f"{file}:leaves").ok
    assert pool.call(f"{file}:fails_after", verdict=False).failure.kind == "mismatch"
    pool.call(f"{file}:leaves")
    assert pool.call(f"{file}:fails").failure.kind == "mismatch"  # its own, on fresh ranks, too
    pool.call(f"{file}:leaves")
    result = pool.call(f"{file}:fails_after", fresh=True)
    assert result.ok and result.replaced == "fresh ranks were asked for"


def test_changed_code_is_loaded_anew(pool, tmp_path):
    file = tmp_path / "edited.py"
    for value in (1, 2):
        file.write_text(f"def value(): return {value}\n")
        assert pool.call(f"{file}:value").ranks[0].extra["value"] == value


def test_changed_code_beside_the_file_is_loaded_anew(pool, tmp_path, monkeypatch):
    """A module that the caller's sys.path finds in another folder."""
    for folder in ("library", "cases"):
        (tmp_path / folder).mkdir()
    monkeypatch.syspath_prepend(tmp_path / "library")
    (tmp_path / "cases" / "case.py").write_text("import on_path_of_caller\ndef value(): return on_path_of_caller.value\n")
    for value in (1, 2):
        (tmp_path / "library" / "on_path_of_caller.py").write_text(f"value = {value}\n")
        result = pool.call(f"{tmp_path}/cases/case.py:value")
        assert result.ranks[0].extra["value"] == value and not result.replaced, result.describe()


@pytest.mark.parametrize("on_agents", [False, True])
def test_changed_module_that_is_preloaded(tmp_path, on_agents):
    """Comes with another fork server, in the same daemon."""
    (tmp_path / "preloaded_module.py").write_text("value = 1\n")
    (tmp_path / "case.py").write_text("import preloaded_module\ndef value(): return preloaded_module.value\n")
    with cppool.Pool(2, python=True, preload=["preloaded_module"], backend="host", launch=support.launcher(tmp_path) if on_agents else None,
                     environment={"PYTHONPATH": str(tmp_path), "CPPOOL_HEAD_ADDRESS": "127.0.0.1"}) as pool:
        pid = pool.hello()["pid"]
        for value in (1, 22, 333):
            (tmp_path / "preloaded_module.py").write_text(f"value = {value}\n") if value > 1 else None
            for again in (False, True):
                result = pool.call(f"{tmp_path}/case.py:value")
                assert [rank.extra["value"] for rank in result.ranks] == [value] * 2, result.describe()
                assert bool(result.replaced) == (value > 1 and not again) and pool.hello()["pid"] == pid, result.describe()
                assert not result.replaced or result.replaced == f"{tmp_path}/preloaded_module.py, which is preloaded, has changed"


def test_script(pool, tmp_path):
    file = tmp_path / "script.py"
    file.write_text("import os, sys\nprint(sys.argv[1:], os.environ['RANK'])\nassert __name__ == '__main__'\nsys.exit(len(sys.argv) - 2)\n")
    assert pool.call(str(file), argv=["a"]).ok
    assert "sys.exit(1)" in pool.call(str(file), argv=["a", "b"]).error


@pytest.mark.parametrize("iterations", [False, True])
def test_a_report_that_is_too_long(pool, iterations):
    result = pool._result(json.dumps({"op": "run", "sampling": {"precision": 1}, "python": {
        "function": function("long_names"), "kwargs": {"iterations": iterations}}}).encode())
    assert result.status == "error" and "bytes, of at most 4194304" in result.error, result.describe()[:2000]
    assert pool.call(function("passes")).ok


def test_cancel(pool, tmp_path):
    folder = str(tmp_path)
    timer = threading.Thread(target=lambda: eventually(lambda: os.path.exists(f"{folder}/first 0") and pool.cancel()))
    timer.start()
    result = pool.call(function("fault"), {"folder": folder, "kind": "sleep"})
    timer.join()
    assert result.failure.kind == "cancelled" and not result.fatal, result.describe()
    assert pool.call(function("passes")).ok


def test_status(pool, tmp_path):
    def ask():
        """The pool's status once the ranks wait, which takes them a while."""
        def waits():
            seen.append(pool.status())
            return [rank["stage"] for rank in seen[-1]["ranks"]] == ["second", "fault"] and "ranks_cases.py" in seen[-1]["text"]
        waited.append(eventually(lambda: os.path.exists(f"{tmp_path}/second 0")) and eventually(waits))
        pool.cancel()
    seen, waited = [], []
    thread = threading.Thread(target=ask)
    thread.start()
    pool.call(function("fault"), {"folder": str(tmp_path), "kind": "sleep"})
    thread.join()
    assert waited == [True], seen[-1:]


def test_call(tmp_path):
    assert cppool.call(function("passes"), world_size=2).ok
    with pytest.raises(cppool.CaseFailed, match="(?s)ValueError: planted.*ranks_cases.py"):
        cppool.call(function("fault"), {"folder": str(tmp_path), "kind": "exception"})
    with pytest.raises(unittest.SkipTest, match="Sunday"):
        cppool.call(function("skips"))


STAND_IN = """
import os, sys
sys.modules["_cppool_ranks"].rank.Rank.device = lambda rank: {
    "name": "stand-in", "uuid": os.environ["CPPOOL_STAND_IN"], "ordinal": 0, "capability": "9.0", "total_bytes": 1 << 30}
"""
HOLDS = """
import os, time
def holds(world, folder, until):
    if world.rank == 0:
        os.close(os.open(f"{folder}/in_use", os.O_CREAT | os.O_EXCL))
        while not os.path.exists(until):
            time.sleep(0.005)
        os.remove(f"{folder}/in_use")
"""


def test_runs_of_one_session_that_share_gpus_go_in_turn(tmp_path):
    """Pools of both kinds and of several world sizes, whose daemons name the same device: a run that is not alone on it fails."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "case.py").write_text(HOLDS)
    gpu, until = tmp_path / "gpu", tmp_path / "until"
    gpu.mkdir()
    (gpu / "of the fake daemon").touch()  # which fails beside another file
    with support.serving(tmp_path) as socket:
        def processes(uuid, size):
            return cppool.Pool(size, python=True, preload=["stand_in"], backend="host", attach=socket, start_limit=60.0,
                               environment={"PYTHONPATH": str(tmp_path), "CPPOOL_STAND_IN": uuid})

        def works():
            listed = subprocess.run([os.path.join(BUILD, "bin", "cppool"), "ps", "--json", "--socket", socket], stdout=subprocess.PIPE, check=True)
            return [(pool["running"] is not None, len(pool["waiting"])) for pool in json.loads(listed.stdout)["pools"]]

        hold, results = (f"{tmp_path}/case.py:holds", {"folder": str(gpu), "until": str(until)}), {}
        with processes("GPU-a", 1) as first, processes("GPU-a", 2) as second, processes("GPU-b", 1) as elsewhere, \
                support.fake_pool(attach=socket, arguments=["--start", "GPU-a"]) as of_threads:
            assert [pool.hello()["devices"][0]["uuid"] for pool in (first, second, of_threads, elsewhere)] == ["GPU-a"] * 3 + ["GPU-b"]
            threads = [threading.Thread(target=lambda name=name, run=run: results.update({name: run()})) for name, run in {
                "first": lambda: first.call(*hold),
                "second": lambda: second.call(*hold),
                "threads": lambda: of_threads.run({"do": "alone", "folder": str(gpu)})}.items()]
            threads[0].start()
            assert eventually(lambda: (gpu / "in_use").exists())
            for thread in threads[1:]:
                thread.start()
            assert eventually(lambda: sorted(works()) == [(False, 0), (False, 1), (False, 1), (True, 0)]), works()
            assert elsewhere.call(function("passes")).ok  # on another device
            assert not results and sorted(works()) == [(False, 0), (False, 1), (False, 1), (True, 0)]
            until.touch()
            for thread in threads:
                thread.join()
    assert all(result.ok for result in results.values()), [result.describe() for result in results.values()]


def test_preload_is_imported_once(tmp_path):
    (tmp_path / "slow_module.py").write_text("import os\nimported_by = os.getpid()\n")
    (tmp_path / "case.py").write_text("import os, slow_module\ndef who(): return slow_module.imported_by, os.getpid()\n")
    with cppool.Pool(2, python=True, preload=["slow_module"], backend="host", environment={"PYTHONPATH": str(tmp_path)}) as pool:
        assert pool.hello()["python"]["preloaded"] == ["slow_module"]
        values = [rank.extra["value"] for rank in pool.call(f"{tmp_path}/case.py:who").ranks]
        assert values[0][0] == values[1][0] and values[0][0] not in (values[0][1], values[1][1])


SHARED = """
import os, subprocess, time
with open(os.environ["IMPORTS"], "a") as file:
    file.write(f"{os.getpid()}\\n")
def place(world): return os.getppid(), os.environ["CUDA_VISIBLE_DEVICES"], world.size
def orphan(world, folder):
    pid = subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    with open(f"{folder}/new{world.rank}", "w") as file:
        file.write(str(pid))
    os.rename(f"{folder}/new{world.rank}", f"{folder}/orphan{world.rank}")
    time.sleep(1000)
"""


class Sharing:
    """Pools of several world sizes of this process, whose module notes each import."""

    def __init__(self, folder):
        self.folder, self.imports = folder, folder / "imports"
        (folder / "shared_module.py").write_text(SHARED)
        self.case = f"{folder}/case.py:place"
        (folder / "case.py").write_text("from shared_module import orphan, place\n")
        self.pools = self.make()

    def make(self, **environment):
        return cppool.Pools(python=True, preload=["shared_module"], start_limit=60.0,
                            environment={"PYTHONPATH": str(self.folder), "IMPORTS": str(self.imports), "CUDA_VISIBLE_DEVICES": "", **environment})

    def imported_by(self):
        return [int(line) for line in self.imports.read_text().split()]

    def server(self, size, pools=None):
        result = (pools or self.pools).call(self.case, world_size=size)
        assert result.ok and [rank.extra["value"][1:] for rank in result.ranks] == [["", size]] * size, result.describe()
        return result.ranks[0].extra["value"][0]


@pytest.fixture
def sharing(tmp_path):
    sharing = Sharing(tmp_path)
    with sharing.pools:
        yield sharing
    assert eventually(lambda: not any(map(is_running, sharing.imported_by())))


def test_pools_of_several_world_sizes_import_once(sharing):
    sizes, found = (1, 2, 4), {}
    threads = [threading.Thread(target=lambda size=size: found.update({size: sharing.server(size)})) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    template, = sharing.imported_by()
    assert sorted(children_of(template)) == sorted(found.values()) and len(set(found.values())) == 3
    # The daemon that has started it ends, and a pool with another environment comes.
    first, = [size for size in sizes if template in children_of(sharing.pools.at(size).hello()["pid"])]
    sharing.pools.at(first).stop()
    assert eventually(lambda: not is_running(found[first])) and is_running(template)
    assert {size: sharing.server(size) for size in sizes if size != first} == {size: found[size] for size in sizes if size != first}
    with sharing.make(OTHER="1") as others:
        assert sharing.server(1, others) not in children_of(template) and len(sharing.imported_by()) == 2
    assert sharing.server(first) in children_of(template) and sharing.imported_by()[0] == template
    # Changed files are imported anew, once for what is started since and for the others' next cases.
    (sharing.folder / "shared_module.py").write_text(SHARED + "changed = True\n")
    sharing.pools.at(first).stop()
    assert sharing.server(first) in children_of(sharing.imported_by()[-1]) and len(sharing.imported_by()) == 3
    assert all(sharing.server(size) in children_of(sharing.imported_by()[-1]) for size in sizes) and len(sharing.imported_by()) == 3


@pytest.mark.parametrize("killed", ["template", "server", "daemon", "daemon and server", "all"])
def test_pools_that_share_go_on_whatever_is_killed(sharing, killed):
    servers = {size: sharing.server(size) for size in (2, 1)}
    daemons = {size: sharing.pools.at(size).hello()["pid"] for size in (2, 1)}
    template, = sharing.imported_by()
    ranks = [rank for server in servers.values() for rank in children_of(server)]
    left = [sharing.folder / f"orphan{rank}" for rank in range(2)]

    def leave():
        with contextlib.suppress(cppool.PoolError):
            assert not sharing.pools.call(sharing.case.replace("place", "orphan"), {"folder": str(sharing.folder)}, world_size=2, verdict=False).ok

    caller = threading.Thread(target=leave)
    caller.start()
    assert eventually(lambda: all(file.exists() for file in left))
    orphans = [int(file.read_text()) for file in left]
    assert all(map(is_running, orphans))
    for pid in {"template": [template], "server": [servers[2]], "daemon": [daemons[2]], "daemon and server": [daemons[2], servers[2]],
                "all": [daemons[2], servers[2], template]}[killed]:
        os.kill(pid, signal.SIGKILL)
    template_too = killed in ("template", "all")
    assert eventually(lambda: not any(map(is_running, ranks if template_too else ranks[:2]))) and len(ranks) == 3
    if not template_too:  # else by the next one
        assert eventually(lambda: not any(map(is_running, orphans)))
    caller.join()
    for size in (1, 2):
        assert (sharing.server(size) == servers[size]) == (size == 1 and not template_too)
    assert len(sharing.imported_by()) == 1 + template_too
    assert not any(map(is_running, orphans))
    assert {size: sharing.pools.at(size).hello()["pid"] == daemons[size] for size in (1, 2)} == {1: True, 2: killed in ("template", "server")}


@pytest.mark.parametrize("way", ["stdin", "SIGKILL", "server", "template"])
def test_nothing_outlives_the_daemon(way, tmp_path):
    command = [os.path.join(BUILD, "bin", "cppoold"), "--world-size", "2", "--python", sys.executable, "--backend", "host", "--sentinel", ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as daemon:
        daemon.stdin.write(b'{"op": "hello"}\n')
        daemon.stdin.flush()
        daemon.stdout.readline()
        template, = children_of(daemon.pid)
        server, = children_of(template)
        ranks = children_of(server)
        assert len(ranks) == 2
        if way in ("server", "template"):  # the next run starts another one
            os.kill({"server": server, "template": template}[way], 9)
            assert eventually(lambda: not any(map(is_running, [template, server, *ranks])))  # the template has no other daemon
            daemon.stdin.write(json.dumps({"op": "run", "python": {"function": function("passes")}}).encode() + b"\n")
            daemon.stdin.flush()
            answers = [json.loads(daemon.stdout.readline())]
            assert answers[0]["ok"] and "before the case" in answers[0]["replaced"], answers
            template, = children_of(daemon.pid)
        if way == "SIGKILL":
            daemon.kill()
        daemon.stdin.close()
        daemon.wait()
        assert eventually(lambda: not any(map(is_running, [template, server, *ranks])))


def test_many_cases_leave_nothing(pool):
    pool.call(function("passes"))
    before = pool.stats()
    for number in range(40):
        result = pool.call(function("leave_cycle" if number % 10 else "leave_file"))
        assert result.ok, result.describe()
    pool.call(function("passes"))
    after = pool.stats()
    assert (after["threads"], after["fds"]) == (before["threads"], before["fds"])
    assert after["resident_bytes"] < before["resident_bytes"] + (4 << 20)


def held_by(pid):
    """Descriptors, threads and resident memory in KiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        status = dict(line.split(":", 1) for line in file)
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["VmRSS"].split()[0])


def test_two_thousand_cases_with_faults(pool, tmp_path):
    kinds = ["exception", "assertion", "exit", "_exit", "abort", "segmentation fault", "orphan", "setsid orphan", "thread"]
    hello = pool.hello()
    daemon, agents = hello["pid"], [node["pid"] for node in hello.get("nodes", ())]
    servers = sorted({rank.extra["value"] for rank in pool.call(function("server")).ranks})
    assert len(servers) == len(agents or [daemon])

    def run(cases):
        wrong, faults = [], 0
        for number in range(cases):
            if number % 20 == 7:
                kind = kinds[faults % len(kinds)]
                faults += 1
                folder = tmp_path / str(number % 1000 + cases)
                folder.mkdir(exist_ok=True)
                result = pool.call(function("fault"), {"folder": str(folder), "kind": kind}, verdict=False)
                if result.ok != (kind in ("orphan", "setsid orphan", "thread")) or not (result.ok or result.failure.rank == 1):
                    wrong.append(f"{kind}: {result.describe()}")
            elif (result := pool.call(function("takes_no_world"), {"a": number})).ranks[0].extra.get("value") != number + 2:
                wrong.append(result.describe())
        return wrong, faults

    assert run(200) == ([], 10)
    before = [held_by(pid) for pid in (daemon, *agents, *servers)]
    assert run(400 if agents else 1800) == ([], 20 if agents else 90)
    after = [held_by(pid) for pid in (daemon, *agents, *servers)]
    print(before, after)
    for then, now in zip(before, after):
        assert now[:2] == then[:2] and now[2] < then[2] + 4096
    assert pool.hello()["pid"] == daemon and sum(len(children_of(server)) for server in servers) == 2


def test_call_on_agents(tmp_path, monkeypatch):
    monkeypatch.setenv("CPPOOL_HEAD_ADDRESS", "127.0.0.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch = support.launcher(tmp_path)
    result = cppool.call(function("passes"), {"text": "hi"}, launch=launch)
    assert [rank.extra["value"] for rank in result.ranks] == [0, 1]
    with pytest.raises(cppool.CaseFailed) as failed:
        cppool.call(function("fault"), {"folder": str(tmp_path), "kind": "_exit"}, launch=launch)
    assert failed.value.result.failure.node
