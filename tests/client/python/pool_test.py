"""The Python client against the fake daemon, and with the real one on the host backend."""
import copy
import gc
import importlib.metadata
import json
import math
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

import cppool
from support import BUILD, FAKE, FAKE_DRIVER, MODULE, NAIVE, do, eventually, fake_pool, is_running, serving


def pid_of(pool):
    return pool.run(do("echo")).json["surroundings"]["pid"]


def test_outcomes():
    with fake_pool() as pool:
        passed = pool.run(do("pass"))
        assert (passed.status, passed.ok, passed.error, passed.failure, passed.fatal) == ("passed", True, "", None, False)
        assert (passed.wall_ms, passed.seed, passed.tflops, passed.attempts) == (1.5, 1234, {"forward": 2.0}, 1)
        assert passed.stages == {"forward": [3.0]}
        failed = pool.run(do("fail"))
        assert (failed.status, failed.ok, failed.error) == ("failed", False, "because of mismatch")
        assert failed.failure == cppool.Failure("mismatch", 1, "forward", "detail")
        bad, good = failed.checks
        assert isinstance(bad, cppool.Check)
        assert (bad.tensor, bad.against, bad.rank, bad.rel_err, bad.tolerance, bad.ok) == ("dq", "oracle", 1, 0.5, 0.01, False)
        assert math.isnan(bad.max_abs_err) and bad.ratio is None and good.ok
        assert pool.run(do("skip")).status == "skipped"
        assert pool.run(do("error")).failure.kind == "internal"
        fatal = pool.run(do("fatal"))
        assert fatal.fatal and fatal.status == "error"
        assert pool.run(do("pass")).ok  # of the next daemon
        assert pool.run(do("more_members")).json["new"] == {"a": [1, 2]}


def test_request_is_what_was_asked_for(tmp_path):
    with fake_pool() as pool:
        request = pool.run(do("echo"), case="sum", deadline=1.5, warmup=2, repeat=3, checks=False, perturb=7, dump=tmp_path / "out",
                           inputs="in", trace="t.json", kernels="cudnn").json["request"]
        assert {key: request[key] for key in ("case", "deadline_ms", "warmup", "repeat", "checks", "perturb")} == {
            "case": "sum", "deadline_ms": 1500, "warmup": 2, "repeat": 3, "checks": False, "perturb": 7}
        assert request["kernels"] == "cudnn"
        assert request["dump"] == str(tmp_path / "out") and request["inputs"] == os.path.abspath("in")
        assert request["trace"] == os.path.abspath("t.json")
        assert pool.run({"do": "echo", "window_size": (-1, 0), "softmax_scale": None}).json["request"]["params"] == {
            "do": "echo", "window_size": [-1, 0], "softmax_scale": None}


def test_no_answer():
    with fake_pool() as pool:
        with pytest.raises(cppool.PoolError) as died:
            pool.run(do("die"))
        assert died.value.kind == "died" and died.value.attempts == 1
        assert "the last words" in died.value.stderr_tail and str(died.value).endswith("the last words\n")
        assert died.value.command == f"cppool run --world-size 2 --daemon {FAKE} --param do=die"
        assert "the last words" in pool.stderr_tail()
        pickled = pickle.loads(pickle.dumps(died.value))  # as multiprocessing does
        assert (str(pickled), pickled.kind, pickled.command) == (str(died.value), "died", died.value.command)
        with pytest.raises(cppool.PoolError) as hung:
            pool.run(do("spin"), deadline=0.3)
        assert hung.value.kind == "timeout" and "running" in hung.value.diagnosis and hung.value.diagnosis in str(hung.value)
        assert died.value.crash is None
        with pytest.raises(cppool.PoolError) as crashed:
            pool.run(do("crash"))
        assert crashed.value.crash == {"error": "rank 1 crashed", "rank": 1, "stage": "forward/attend", "case": None, "library": None,
                                       "stack": ["Attend", "Run"]}
        with pytest.raises(cppool.PoolError) as garbage:
            pool.run(do("garbage"))
        assert garbage.value.kind == "protocol"
        assert pool.run(do("pass")).ok
        assert pool.run(do("pass"), kernels="cppool").command.endswith(" --kernels cppool --param do=pass")
        library = [pathlib.Path("/a/case.so")]
        assert pool.run(do("pass"), case="mine", load=library).command.endswith(" --case mine --daemon " + FAKE + " --load /a/case.so --param do=pass")
        assert "--load" not in pool.run(do("pass"), load=library).command  # attention is in no library


def test_start_failures():
    with pytest.raises(cppool.PoolError) as missing:
        fake_pool(daemon="/nonexistent/cppoold").hello()
    assert missing.value.kind == "start" and "/nonexistent/cppoold" in str(missing.value)
    with pytest.raises(cppool.PoolError) as refused:
        fake_pool(arguments=["--start", "start_line"]).hello()
    assert refused.value.start_failure["devices"] == 2 and refused.value.start_failure["kind"] == "out_of_memory"
    assert refused.value.command == ""


@pytest.mark.skipif(not os.path.exists(MODULE), reason="a build without CUDA")
def test_driver_that_is_too_old():
    with pytest.raises(cppool.PoolError) as refused:
        cppool.Pool(2, environment={"LD_LIBRARY_PATH": FAKE_DRIVER, "FAKE_CU_VERSION": "9020", "FAKE_CU_COUNT": "2"}).hello()
    assert refused.value.kind == "start" and refused.value.start_failure["kind"] == "cuda"
    assert re.search(r"driver is for CUDA 9\.2, and this CUDA module was built with CUDA \d+\.\d+: install ", str(refused.value))


@pytest.mark.parametrize("options, words", [
    ({"world_size": 0}, "from 1 to 64"), ({"world_size": 65}, "from 1 to 64"), ({"world_size": 2.5}, "from 1 to 64"),
    ({"grace": -1}, "grace is a number of seconds"), ({"start_limit": math.nan}, "start_limit is a number of seconds"),
    ({"retries": -1}, "retries"), ({"backend": 3}, "backend"), ({"environment": {"A=B": "c"}}, "environment")])
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        cppool.Pool(**options)
    assert cppool.Pools(backend="host").at(2).world_size == 2
    with pytest.raises(ValueError, match="from 1 to 64"):
        cppool.Pools().at(65)


@pytest.mark.parametrize("params, error, words", [
    ({"softmax_scale": math.nan}, ValueError, r"params\['softmax_scale'\] is nan"),
    ({"a": {"b": [1.0, -math.inf]}}, ValueError, r"params\['a'\]\['b'\]\[1\] is -inf"),
    ({"scale": object()}, TypeError, r"params\['scale'\] is a builtins.object"),
    ({"a": {(7, 8): 1}}, TypeError, r"has the key \(7, 8\)"),
    (["p2p"], TypeError, "params is a dict"),
    ({"text": "\ud800"}, ValueError, "UTF-8|not JSON")])
def test_params_that_json_cannot_express(params, error, words):
    with fake_pool() as pool, pytest.raises(error, match=words):
        pool.run({7: 1} if params is None else params)


@pytest.mark.parametrize("options", [{"devices": "0,1"}, {"devices": 0}, {"case_files": "mine.so"}, {"arguments": "--allow-faults"}])
def test_options_that_are_no_lists(options):
    (name, value), = options.items()
    with pytest.raises(TypeError, match=f"^{name} is a list, not {value!r}$"):
        cppool.Pool(2, **options)


def test_arguments_that_are_no_lists_or_dicts():
    with fake_pool() as pool:
        for call in pool.run, pool.validate:
            with pytest.raises(TypeError, match="^load is a list, not 'mine.so'$"):
                call(load="mine.so")
    with pytest.raises(TypeError, match="^params is a dict of parameters, not str$"):
        cppool.bench("cp_comm_type")
    with pytest.raises(TypeError, match="^devices is a list, not '0'$"):
        cppool.bench(devices="0")
    with pytest.raises(TypeError, match="^world_size is a list, not '24'$"):
        cppool.bench(world_size="24")
    with pytest.raises(TypeError, match="^filters is a list, not 3$"):
        cppool.suite("smoke", filters=3)


def test_nesting_has_a_limit():
    deep = []
    for _ in range(100000):
        deep = [deep]
    with fake_pool() as pool:
        with pytest.raises((ValueError, RecursionError), match="nested"):
            pool.run({"deep": deep})
        assert pool.run(do("pass")).ok


def test_run_options_out_of_range():
    with fake_pool() as pool:
        with pytest.raises(ValueError, match='unknown key "warm" .* did you mean "warmup"'):
            pool.run(do("pass"), warm=3)
        for deadline in 0, 0.0004, -1, 86401, math.nan, True:
            with pytest.raises(ValueError, match="^deadline is a number of seconds from 0.001 to 86400, not "):
                pool.run(do("pass"), deadline=deadline)
        assert pool.run(do("echo"), deadline=0.001).json["request"]["deadline_ms"] == 1
        for options in ({"repeat": 0}, {"warmup": -1}, {"checks": 3}, {"perturb": -1}, {"case": ""},
                        {"fault": {"kind": "throw", "rang": 1}}):
            with pytest.raises(ValueError):
                pool.run(do("pass"), **options)
        with pytest.raises(ValueError, match="give one"):
            pool.run(do("pass"), kwargs={"dtype": "bf16"})
        with pytest.raises(ValueError, match="is for 4 ranks"):
            pool.run(cppool.Cell("a", world_size=4))


def interrupt_after(seconds, number):
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(threading.main_thread().ident, number))
    timer.start()
    return timer


def test_ctrl_c_ends_a_wait():
    with fake_pool() as pool:
        pid = pid_of(pool)
        interrupt_after(0.2, signal.SIGINT)
        before = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pool.run(do("hang"), deadline=60)
        assert time.monotonic() - before < 30  # far from the deadline
        assert not is_running(pid)
        assert pool.run(do("pass")).ok


def request_is_sent(pool):
    """To the fake daemon, which has no `status`; an idle pool answers it itself."""
    try:
        return not pool.status()
    except cppool.PoolError as error:
        return "has no feature `status`" in str(error)


def test_cancel_and_status_from_another_thread():
    with cppool.Pool(2, backend="host") as pool:
        assert pool.status()["text"] == "nothing runs" and not pool.cancel()
        before, seen = pool.hello()["pid"], []

        def cancel():
            eventually(lambda: (pool.status()["running"] or {}).get("iteration", 0) > 0)
            seen.append(pool.status())
            seen.append(pool.cancel())

        thread = threading.Thread(target=cancel)
        thread.start()
        result = pool.run({"max_seqlen_q": 64, "num_heads": 4}, repeat=10000)
        thread.join()
        assert result.status == "error" and result.failure.kind == "cancelled"
        assert len(seen[0]["ranks"]) == 2 and seen[1] is True
        assert pool.hello()["pid"] == before
    with fake_pool() as pool:
        thread = threading.Thread(target=lambda: pool.run(do("late", ms=3000)))
        thread.start()
        assert eventually(lambda: request_is_sent(pool))
        with pytest.raises(cppool.PoolError, match="has no feature `cancel`"):
            pool.cancel()
        thread.join()


def test_ctrl_c_says_where_the_ranks_are_and_leaves_the_daemon_warm(capfd):
    with cppool.Pool(2, backend="host") as pool:
        before = pool.hello()["pid"]
        interrupt_after(0.5, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            pool.run({"max_seqlen_q": 64, "num_heads": 4}, repeat=10000)
        assert pool.hello()["pid"] == before
    assert "cppool: rank 0: " in capfd.readouterr().err


class Stop(Exception):
    pass


def test_signal_handlers_run_in_a_wait():
    def stop(*_):
        raise Stop("from a handler")

    calls = []
    with fake_pool() as pool:
        before = signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert pool.run(do("late", ms=600)).ok and calls == [1]  # the call goes on
            signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Stop, match="from a handler"):
                pool.run(do("hang"))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert pool.run(do("pass")).ok


def test_ctrl_c_ends_the_wait_for_another_thread():
    with fake_pool() as pool:
        pool.hello()
        results = []
        thread = threading.Thread(target=lambda: results.append(pool.run(do("late", ms=3000))))
        thread.start()
        assert eventually(lambda: request_is_sent(pool))
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(0.2, signal.SIGINT)
            pool.run(do("pass"))
        thread.join()
        assert results[0].ok  # the other thread's call is left alone


def test_threads_run_during_a_wait():
    counts, ending = [0], threading.Event()

    def count():
        while not ending.is_set():
            counts[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    with fake_pool() as pool:
        pool.hello()
        before = counts[0]
        pool.run(do("late", ms=500))
        during = counts[0] - before
    ending.set()
    thread.join()
    assert during > 20


def test_forked_child_has_its_own_daemon():
    with fake_pool() as pool:
        mine = pid_of(pool)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.write(writing, json.dumps(pid_of(pool)).encode())
                pool.stop()
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            theirs = json.loads(pipe.read())
        assert os.waitpid(child, 0)[1] == 0
        assert theirs != mine and eventually(lambda: not is_running(theirs))
        assert pid_of(pool) == mine


def test_daemon_ends_with_its_pool():
    pool = fake_pool()
    pid = pid_of(pool)
    del pool
    gc.collect()
    assert eventually(lambda: not is_running(pid))


def test_flaky_results(tmp_path):
    with fake_pool(retries=1) as pool:
        passed = pool.run(do("crash_once", marker=str(tmp_path / "passed")))
        assert passed.ok and passed.attempts == 2 and passed.flaky == "flaky (passed at attempt 2)"
        [lost] = passed.lost
        assert lost.kind == "died" and lost.crash["rank"] == 1 and lost.crash["stage"] == "forward/attend"
        assert lost.crash["stack"] == ["Attend", "Run"] and "the fake daemon has started" in lost.stderr_tail
        crash = "exited with code 3: rank 1 crashed in stage 'forward/attend', stack: Attend < Run"
        assert lost.error.endswith(crash) and passed.describe().splitlines()[:2] == ["passed", "  flaky (passed at attempt 2)"]
        assert passed.describe().splitlines()[2].startswith("  attempt 1: cppoold ") and crash in passed.describe()
        assert "flaky (passed at attempt 2)" in repr(passed) and "flaky (passed at attempt 2)" in passed._repr_html_()
        failed = pool.run(do("die_once", then="fail", marker=str(tmp_path / "failed")))
        assert failed.flaky == "flaky (failed at attempt 2)" and failed.lost[0].crash is None
        with pytest.raises(cppool.PoolError) as hung:
            pool.run(do("crash_once", then="hang", marker=str(tmp_path / "hung")), deadline=0.2)
        assert hung.value.flaky == "flaky (timeout at attempt 2)" and [lost.crash["rank"] for lost in hung.value.lost] == [1]
        assert pickle.loads(pickle.dumps(hung.value)).lost == hung.value.lost
        with pytest.raises(cppool.PoolError) as died:
            pool.run(do("die"))
        assert died.value.flaky == "" and [lost.kind for lost in died.value.lost] == ["died"]  # it ended as the one before
        steady = pool.run()
        assert steady.flaky == "" and steady.lost == [] and "flaky" not in steady.describe() + repr(steady) + steady._repr_html_()


def test_daemon_ends_with_the_process():
    program = ("import sys\nfrom support import *\n"
               "pool = fake_pool(on_stderr=lambda line: print(line, file=sys.stderr))\n"
               "print(pool.run(do('echo')).json['surroundings']['pid'], flush=True)\n")
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    pid = int(done.stdout.split()[0])
    assert eventually(lambda: not is_running(pid))


def test_lines_reach_python():
    errors, log = [], []
    with fake_pool(on_stderr=errors.append, log=log.append, retries=1) as pool:
        with pytest.raises(cppool.PoolError):
            pool.run(do("die"))
    assert errors.count("the last words") == 2
    assert any("is sent to a new daemon" in line for line in log)


def in_python(program):
    """What a program writes to stdout. It hangs or is aborted where a rule of these tests does not hold."""
    done = subprocess.run([sys.executable, "-c", "import cppool, os, signal, sys, threading, time\nfrom support import *\n" + program],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize("where", ["handler", "log", "on_stderr"])
def test_a_pool_in_its_own_callbacks(where):
    """Each use is refused at once, and the call that goes on is answered."""
    output = in_python("""
refused = []
def use(*_):
    for call in pool.stop, pool.stderr_tail, pool.hello, lambda: pool.run(do("pass")), lambda: pool.compile("a.c"):
        try:
            call()
        except RuntimeError as error:
            refused.append(str(error))
signal.signal(signal.SIGALRM, use)
pool = fake_pool(**({} if WHERE == "handler" else {WHERE: use}))
pool.hello()
if WHERE == "handler":
    signal.setitimer(signal.ITIMER_REAL, 0.1)
assert pool.run(do("late", ms=600) if WHERE == "handler" else do("stale") if WHERE == "log" else do("say", text="a line\\n")).ok
assert eventually(lambda: len(refused) >= 5)  # for on_stderr: with no call going on
assert pool.run(do("pass")).ok
print(set(refused))
""".replace("WHERE", repr(where)))
    assert output.count("cannot be used in its own log or on_stderr") == 1, output


@pytest.mark.parametrize("when", ["afterwards", "inside"])
def test_ctrl_c_with_a_callback_that_uses_another_pool(when):
    """It ends the call whose callback that is, also when it comes in the other pool's call."""
    output = in_python("""
def log(line):
    if line.startswith("noise"):
        other.run(do("pass"))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        if INSIDE:
            other.run(do("hang"))
signal.signal(signal.SIGALRM, signal.default_int_handler)
with fake_pool() as other, fake_pool(log=log) as pool:
    try:
        pool.run(do("noise_and_hang"))
    except KeyboardInterrupt:
        print("interrupted")
    print(pool.run(do("pass")).ok, other.run(do("pass")).ok)
""".replace("INSIDE", str(when == "inside")))
    assert output == "interrupted\nTrue True\n"


@pytest.mark.parametrize("what", ["hang", "flood_stderr_for_ever", "noise_for_ever", "pass"])
def test_daemon_threads_at_the_interpreters_exit(what):
    """They end without a word, and so do their daemons."""
    output = in_python(f"""
def ask():
    while True:
        pool.run(do("{what}"))
pool = fake_pool(on_stderr=len, log=len)
print(pool.run(do("echo")).json["surroundings"]["pid"])
for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.3)
""")
    assert eventually(lambda: not is_running(int(output)))


def test_on_stderr_may_drop_the_pool():
    output = in_python("""
outside = threading.Event()
def drop(line):
    if line == "a line":
        outside.wait()  # then this is the last reference
        pools.clear()
pools = [fake_pool(on_stderr=drop)]
print(pools[0].run(do("echo")).json["surroundings"]["pid"])
pools[0].run(do("say", text="a line\\nanother\\n"))
outside.set()
assert eventually(lambda: not pools)
""")
    assert eventually(lambda: not is_running(int(output)))


def test_environment_and_devices():
    with fake_pool(environment={"FAKE_VARIABLE": "7"}, devices=[1, "GPU-2"]) as pool:
        surroundings = pool.run(do("echo")).json["surroundings"]
        assert surroundings["environment"]["FAKE_VARIABLE"] == "7"
        assert surroundings["environment"]["CUDA_VISIBLE_DEVICES"] == "1,GPU-2"
        assert surroundings["open"] == [0, 1, 2]
        assert pool.run(do("pass")).command.startswith("env FAKE_VARIABLE=7 cppool run --world-size 2 --devices 1,GPU-2")


def test_nothing_of_cuda_is_loaded():
    """Also when a daemon has run: not in this process, nor among what the library needs."""
    program = ("import sys\nimport cppool\nassert 'numpy' not in sys.modules\n"
               "assert 'libcppool_client' not in open('/proc/self/maps').read()\n"
               "pool = cppool.Pool(2, backend='host')\nassert pool.run({'max_seqlen_q': 64}).ok\n"
               "maps = open('/proc/self/maps').read()\nassert 'libcppool_client' in maps\n"
               "for name in ('libcuda', 'libnccl', 'libcudart', 'libcppool_cuda', 'libstdc++'):\n    assert name not in maps, name\n"
               "print('none')\n")
    done = subprocess.run([sys.executable, "-S", "-c", "import sys; sys.path[:0] = sys.argv[1].split(':'); exec(sys.argv[2])",
                           os.environ["PYTHONPATH"], program], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.stdout == "none\n"


def test_exported_symbols():
    library = os.path.join(BUILD, "lib", "libcppool_client.so")
    symbols = subprocess.run(["nm", "-D", "--defined-only", "--format=posix", library], stdout=subprocess.PIPE, text=True, check=True)
    names = {line.split()[0] for line in symbols.stdout.splitlines()}
    assert names == {"cppool_client_" + name for name in ("command", "describe", "find_daemon", "free", "suite", "version")} | {
        "cppool_pool_" + name for name in ("ask", "cancel", "compile", "create", "free", "interrupt", "status", "stderr_tail", "stop")}


def test_sources(tmp_path, monkeypatch):
    """A kernel is compiled with its folders of headers and runs. The cache is tested with the library."""
    monkeypatch.setenv("CPPOOL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "scale.h").write_text("int cppool_scale(void) { return 1; }\n")
    source = tmp_path / "mine.c"
    source.write_text('#include "scale.h"\n' + NAIVE.read_text(encoding="utf-8"))
    with cppool.Pool(1, backend="host") as pool:
        library = pool.compile(source, [folder])
        result = pool.run({"max_seqlen_q": 32, "num_heads": 2}, kernels=library)
        assert result.ok and result.json["kernels"]["file"] == library
        assert pool.compile(str(source), [str(folder)]) == library
        source.write_text("int broken(\n")
        with pytest.raises(cppool.CompileError, match="does not compile") as error:
            pool.compile(source)
        assert str(source) in str(error.value) and "broken" in str(error.value)
        with pytest.raises(cppool.CompileError, match="no source"):
            pool.compile(tmp_path / "mine.so")


def test_ctrl_c_ends_a_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 100\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    (tmp_path / "mine.c").write_text("")
    with fake_pool() as pool:
        interrupt_after(0.3, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            pool.compile(tmp_path / "mine.c")
        assert pool.run(do("pass")).ok


def test_what_a_pool_returns_and_throws_can_be_pickled(tmp_path):
    """As multiprocessing and pytest-xdist need it. Errors: test_no_answer."""
    with fake_pool(retries=1) as pool:
        results = [pool.run(do(what)) for what in ("pass", "fail", "skip")]
        results.append(pool.run(do("die_once", marker=str(tmp_path / "marker"))))
    for result in results:
        for copied in pickle.loads(pickle.dumps(result)), copy.deepcopy(result):
            assert vars(copied).keys() == vars(result).keys()
            assert (copied.json, copied.attempts, copied.flaky, copied.lost, copied.command, copied.describe()) == (
                result.json, result.attempts, result.flaky, result.lost, result.command, result.describe())
            assert copied.command.startswith("cppool run ")
        assert pickle.loads(pickle.dumps(result.checks)) == result.checks or math.isnan(result.checks[0].max_abs_err)
    assert results[3].flaky and results[3].lost
    cell = cppool.suite("smoke")[0]
    assert pickle.loads(pickle.dumps(cell)).params == cell.params


def test_version():
    assert cppool.__version__ == importlib.metadata.version("cppool")
    with pytest.raises(AttributeError, match="'cppool' has no attribute '__versions__'"):
        cppool.__versions__


def test_describe_and_html():
    with fake_pool() as pool:
        failed = pool.run(do("fail"))
        text = failed.describe()
        assert "failed: because of mismatch" in text and "dq" in text and "nan" in text and "1 of 2 checks hold" in text
        assert text.endswith(f"repeat: cppool run --world-size 2 --daemon {FAKE} --param do=fail")
        page = failed._repr_html_()
        assert "<td>dq</td><td>oracle</td><td>1</td><td>nan</td>" in page and "<td>NO</td>" in page
        located = ["head 3, token 17", "nan", "1.5", "64", "head 3"]
        assert "  ".join(located) in re.sub("   *", "  ", text) and "".join(f"<td>{cell}</td>" for cell in located) in page
        assert failed.checks[0].worst["index"] == {"head": 3, "token": 17} and failed.checks[0].bad == 64 and failed.checks[1].worst is None
        passed = pool.run(do("pass"))
        assert "<th>rank 0 (ms)</th>" in passed._repr_html_()
        assert "  stage    rank 0 (ms)" in passed.describe() and "rank 0 (ms)" not in text
        marked = cppool.Result({"status": "error", "error": "<script>", "ranks": [], "checks": []})
        assert "<script>" not in marked._repr_html_()


def test_suites(tmp_path):
    cells = cppool.suite("smoke")
    assert len(cells) == 20 and [cell.world_size for cell in cells] == sorted(cell.world_size for cell in cells)
    assert len({cell.name for cell in cells}) == 20 and str(cells[0]) == cells[0].name
    assert len(cppool.suite("essential")) == 120 and len(cppool.suite("matrix")) == 4608
    some = cppool.suite("matrix", filters=["cp_comm_type=a2a", "dtype=bf16"], max_seqlen=96)
    assert some and all(cell.params["cp_comm_type"] == "a2a" and cell.params["max_seqlen_q"] <= 96 for cell in some)
    fp8 = cppool.suite("matrix", filters=["dtype=fp8", "scaling_mode=mxfp8", "world_size=2"], max_seqlen=96)
    assert len(fp8) == 24 * 3 * 3 * 2 and all(cell.params["max_seqlen_q"] == 128 for cell in fp8)
    own = tmp_path / "own.json"
    own.write_text('{"case": "mine", "cells": [{"world_size": [4, 2], "product": {"seed": [1, 2]}}]}')
    assert [(cell.case, cell.world_size, cell.params, cell.suite) for cell in cppool.suite(str(own), filters="seed!=1")] == [
        ("mine", 2, {"seed": 2}, "own"), ("mine", 4, {"seed": 2}, "own")]
    with pytest.raises(ValueError, match='did you mean "smoke"'):
        cppool.suite("smoke_")
    with pytest.raises(ValueError, match="no cell has dtype=fp9"):
        cppool.suite("smoke", filters="dtype=fp9")


def test_pools():
    with cppool.Pools(backend="host") as pools:
        assert pools.at(2) is pools.at(2)
        hello = pools.at(2).hello()
        assert (hello["world_size"], hello["backend"]) == (2, "host")
        assert "attention" in [case["name"] for case in pools.at(2).cases()]
        assert pools.at(2).stats()["requests"] >= 2 and "validate" in pools.at(2).features()
        assert pools.run({"max_seqlen_q": 64}).ok
        cell = cppool.suite("smoke", filters=["world_size=4", "cp_comm_type=a2a+p2p"])[0]
        assert pools.run(cell).ok and pools.at(4).validate(cell).ok
        assert not pools.at(2).validate({"cp_comm_type": "a2b"}).ok


def repeated(command):
    """What a command that repeats a request prints."""
    path = os.path.join(BUILD, "bin") + os.pathsep + os.environ["PATH"]
    return subprocess.run(["bash", "-c", command + " 2>/dev/null"], env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True,
                          check=True).stdout


def test_command_with_several_libraries():
    first, second = (os.path.join(BUILD, "lib", f"libcppool_test_{name}.so") for name in ("odd", "littering"))
    for loaded, files in ([], [first, second]), ([first, second], []), ([second], [first]):
        with cppool.Pool(2, backend="host", case_files=files) as pool:
            result = pool.run(case="odd", load=loaded)
            assert result.ok, result.describe()
            assert '"status":"passed"' in repeated(result.command), result.command
    with cppool.Pool(2, backend="host", case_files=[first]) as pool:
        assert "1 passed" in repeated(pool.run(case="odd").command)


def test_command_for_what_cppool_run_has_no_options_for():
    with cppool.Pool(2, backend="host", arguments=["--allow-faults", "--log-level", "debug"]) as pool:
        result = pool.run({"max_seqlen_q": 64}, warmup=1, repeat=2, checks=False, fault={"kind": "throw", "rank": 1, "count": 3})
        assert result.json["failure"]["rank"] == 1
        assert json.loads(repeated(result.command))["failure"] == result.json["failure"]
        assert result.command.endswith(" --log-level debug")


def test_transformer_engines_form():
    with cppool.Pool(2, backend="host") as pool:
        kwargs = {"dtype": "bf16", "model": "cp_2_0", "qkv_format": "bshd", "kernel_backend": "FlashAttention", "cp_comm_type": "p2p",
                  "max_seqlen_q": "64", "max_seqlen_kv": "64", "fa_pad_between_seqs": "False", "fp8_mha": "False", "log_level": "30"}
        result = pool.run(kwargs=kwargs)
        assert result.ok, result.describe()
        assert result.command.startswith("printf '%s\\n' '{") and result.command.endswith("cppoold --world-size 2 --backend host --sentinel ''")
        assert json.loads(repeated(result.command))["status"] == "passed"
        with pytest.raises(ValueError, match="string"):
            pool.run(kwargs={"dtype": 16})


def test_dump(tmp_path):
    numpy = pytest.importorskip("numpy")
    with cppool.Pool(2, backend="host") as pool:
        result = pool.run({"max_seqlen_q": 64, "num_heads": 2}, dump=tmp_path / "dump")
        assert result.ok, result.describe()
    dump = cppool.load_dump(tmp_path / "dump")
    assert {"q", "k", "v", "out", "lse", "dq", "out_no_cp"} <= set(dump) and len(dump) == len(list(dump))
    assert dump["q"].shape == (2, 64, 2, 64) and dump["q"].dtype == numpy.float32
    assert numpy.abs(dump["out"] - dump["out_no_cp"]).max() < 0.1
    assert dump.index["world_size"] == 2
    with pytest.raises(KeyError, match="there are: "):
        dump["quux"]
    with pytest.raises(FileNotFoundError, match="no folder that a run's `dump` has written"):
        cppool.load_dump(tmp_path)


def test_bench_files(tmp_path):
    options = dict(world_size=1, backend="host", time=0.2, precision=50.0)
    file = tmp_path / "saved"
    first = cppool.bench({"max_seqlen_q": [16, 32]}, save=file, **options)
    assert [row["max_seqlen_q"] for row in first] == [16, 32] and "verdict" not in first[0]
    assert all(row["forward_samples"] >= 10 for row in first)

    resumed = cppool.bench({"max_seqlen_q": [16, 32]}, resume=file, **options)
    assert [row["forward_ms"] for row in resumed] == [row["forward_ms"] for row in first]

    compared = cppool.bench({"max_seqlen_q": [32, 64]}, baseline=file, **options)
    assert compared[0]["verdict"] in ("faster", "same", "slower")
    assert compared[0]["forward_now_then_low"] <= compared[0]["forward_now_then"] <= compared[0]["forward_now_then_high"]
    assert "verdict" not in compared[1]
    saved = json.loads(file.read_text())
    for row in saved["rows"]:  # as if it had been a hundred times as fast
        for stage in row["measured"]["stages"].values():
            stage["rounds"] = [ms / 100 for ms in stage["rounds"]]
    file.write_text(json.dumps(saved))
    assert cppool.bench({"max_seqlen_q": 16}, baseline=file, **options)[0]["verdict"] == "slower"
    assert cppool.bench({"max_seqlen_q": 48}, baseline=file, **options)[0]["error"] == ""

    with pytest.raises(ValueError, match="--repeat"):
        cppool.bench(repeat=3, **options)
    with pytest.raises(ValueError, match="is not a file that `cppool bench --save` has written"):
        file.write_text("{}")
        cppool.bench(baseline=file, **options)


def test_bench():
    rows = cppool.bench({"cp_comm_type": ["p2p", "a2a"], "max_seqlen_q": 64, "window_size": (-1, -1)}, world_size=[1, 2], backend="host",
                        warmup=0, repeat=2)
    assert [(row["world_size"], row["cp_comm_type"]) for row in rows] == [(1, "p2p"), (1, "a2a"), (2, "p2p"), (2, "a2a")]
    for row in rows:
        assert row["error"] == "" and row["forward_ms"] > 0 and row["backward_tflops"] > 0 and row["window_size"] == [-1, -1]
        assert row["together_efficiency"] > 0 and row["command"].startswith(os.path.join(BUILD, "python"))
    with pytest.raises(ValueError, match='unknown case "nothing"'):
        cppool.bench({"num_heads": 7}, backend="host", case="nothing")
    with pytest.raises(ValueError, match="--backend"):
        cppool.bench(backend="cud")
    with pytest.raises(ValueError, match=r"params\['softmax_scale'\]\[1\] is nan"):
        cppool.bench({"softmax_scale": [1.0, math.nan]})


def test_a_server(tmp_path):
    with serving(tmp_path) as socket:
        with fake_pool(attach=socket) as one, fake_pool(attach=socket) as other:
            assert one.run(do("pass")).ok
            pid = one.hello()["pid"]
            assert other.hello()["pid"] == pid
            with pytest.raises(cppool.PoolError) as lost:
                one.run(do("die"))
            assert lost.value.kind == "died" and "the last words" in lost.value.stderr_tail
            assert other.hello()["pid"] != pid
        with fake_pool(attach=socket, queue_limit=0.05) as late, fake_pool(attach=socket) as one:
            late.hello()
            running = threading.Thread(target=lambda: one.run(do("late", ms=2000)))
            running.start()
            with pytest.raises(cppool.PoolError) as queued:
                while running.is_alive():
                    late.run(do("pass"))
            assert queued.value.kind == "queue" and "queue_limit" in str(queued.value)
            running.join()
    with pytest.raises(cppool.PoolError, match="there is no server at"):
        fake_pool(attach=socket).hello()
    with pytest.raises(ValueError, match="neither .default. nor the path"):
        fake_pool(attach="elsewhere")
    with pytest.raises(ValueError, match="idle_exit cannot be given with attach"):
        fake_pool(attach=socket, idle_exit=1.0)


@pytest.mark.skipif(not os.path.exists(os.path.join(BUILD, "lib/libcppool_gloo.so")), reason="built without gloo")
def test_ranks_of_several_processes(tmp_path):
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\nfor i in 0 1; do CPPOOL_AGENTS=2 CPPOOL_AGENT_INDEX=$i "$@" & done; wait\n')
    launcher.chmod(0o700)
    with cppool.Pool(4, backend="host", launch=f"'{launcher}'", arguments=["--allow-faults"],
                     environment={"CPPOOL_HEAD_ADDRESS": "127.0.0.1"}) as pool:
        nodes = pool.hello()["nodes"]
        assert [node["ranks"] for node in nodes] == [[0, 1], [2, 3]]
        failed = pool.run({"max_seqlen_q": 128, "num_heads": 4}, fault={"kind": "segfault", "rank": 3})
        assert failed.fatal and (failed.failure.rank, failed.failure.node) == (3, nodes[1]["node"])
        assert pool.run({"max_seqlen_q": 128, "num_heads": 4}).ok  # of a fresh world
        assert pool.hello()["nodes"][1]["pid"] != nodes[1]["pid"]
    with cppool.Pool(4, backend="host", launch="no-such-launcher") as pool, pytest.raises(cppool.PoolError, match="no program no-such-launcher"):
        pool.hello()
