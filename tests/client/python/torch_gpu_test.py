"""Python ranks with torch and NCCL on GPUs, through the daemon: as many ranks as there are GPUs, and one."""
import ctypes
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import cppool
import pytest

from support import gpus

CASES = str(pathlib.Path(__file__).with_name("torch_gpu_cases.py"))
GPUS = gpus()
pytestmark = pytest.mark.skipif(GPUS == 0 or importlib.util.find_spec("torch") is None, reason="there is no GPU, or no torch")


@pytest.fixture(scope="module")
def pools():
    with cppool.Pools(python=True, preload=["torch"], backend="cuda", start_limit=120.0) as pools:
        yield pools


@pytest.fixture(params=sorted({1, GPUS}))
def pool(pools, request):
    return pools.at(request.param)


def call(pool, name, kwargs=None, **options):
    return pool.call(f"{CASES}:{name}", kwargs, **options)


def test_the_world(pool):
    hello = pool.hello()
    assert (hello["ranks"], hello["backend"], hello["transport"]) == ("processes", "cuda", "nccl") and hello["python"]["torch"]
    assert hello["python"]["preloaded"] == ["torch"] and not hello["python"]["deferred"]
    assert all(device["ordinal"] == device["rank"] and device["total_bytes"] > 1 << 30 for device in hello["devices"])
    print(hello["init_ms"])
    memory = pool.stats()["memory"]
    assert [each["rank"] for each in memory] == [each["device"] for each in memory] == list(range(pool.world_size))
    assert all(1 << 20 <= each["free_bytes"] <= device["total_bytes"] for each, device in zip(memory, hello["devices"]))


def test_reduce(pool):
    result = call(pool, "reduce", warmup=1, repeat=5)
    assert result.ok and not result.replaced and result.checks, result.describe()
    assert [rank.extra["value"] for rank in result.ranks] == [[f"cuda:{rank}", "nccl", True] for rank in range(pool.world_size)]
    assert 0 < result.ranks[0].gpu_ms["reduce"] < 100 and len(result.json["ranks"][0]["samples"]["reduce"]) == 5
    results = [call(pool, "reduce") for _ in range(20)]
    print("a warm case:", sorted(result.wall_ms for result in results)[10], "ms, its reset:", sorted(result.ranks[0].extra["reset_ms"] for result in results)[10], "ms")


def test_timeline(pool, tmp_path):
    file = tmp_path / "trace.json"
    result = call(pool, "reduce", warmup=1, repeat=3, trace=file)
    assert result.ok, result.describe()
    timeline = json.loads(file.read_text())
    assert timeline["otherData"]["backend"] == "cuda" and all(0 < error < 1000 for error in timeline["otherData"]["clock_error_us"])
    for rank in range(pool.world_size):
        events = [event for event in timeline["traceEvents"] if event["ph"] == "X" and event["pid"] == 2 + rank]
        stream = [event for event in events if event["name"] == "reduce" and "stage" in event["args"]]
        host = [event for event in events if event["name"] == "reduce" and "stage" not in event["args"]]
        assert [event["args"]["iteration"] for event in stream] == ["warmup", 0, 1, 2] and len(host) == 4
        # The stream begins a stage after the host has, and its times are those of the answer.
        error = timeline["otherData"]["clock_error_us"][rank]
        assert all(work["ts"] >= call["ts"] - error - 1 for work, call in zip(stream, host))
        assert sorted(event["dur"] for event in stream[1:])[1] == pytest.approx(result.ranks[rank].gpu_ms["reduce"] * 1e3, rel=0.5)


def test_the_group_is_lent(pool):
    result = call(pool, "lent")
    assert result.ok and result.ranks[0].extra["value"] == pool.world_size, result.describe()


def test_device_memory_that_is_left(pool):
    for _ in range(2):  # of the block before nothing is said any more
        result = call(pool, "keeps_memory")
        warning, = [warning for warning in result.warnings if "device memory" in warning][:1]
        assert result.ok and "4194304 bytes" in warning and warning.count("torch_gpu_cases.py") == 1 and warning.endswith(" keeps_memory"), warning
    for kind, text in {"keeps_a_graph": " keeps_a_graph", "keeps_a_pool": "still reserved, and not allocated"}.items():
        result = call(pool, kind)
        assert result.ok and any("device memory are" in warning and text in warning for warning in result.warnings), result.warnings
    result = call(pool, "multiplies")
    assert result.ok and not result.warnings, result.warnings  # no workspace of cuBLAS stays


def test_verdict_on_device_memory(pool):
    assert call(pool, "keeps_most_memory", fresh=True).ok
    result = call(pool, "needs_most_memory")
    assert (result.status, result.failure.kind) == ("failed", "polluted") and "torch_gpu_cases.py:keeps_most_memory" in result.error, result.describe()
    assert call(pool, "needs_most_memory").ok


def test_device_and_stream_are_put_back(pool):
    def unchanged():
        return [rank.extra["value"] for rank in call(pool, "device_and_stream").ranks] == [[rank, True] for rank in range(pool.world_size)]

    result = call(pool, "changes_stream")
    assert result.ok and not result.replaced and result.differed == {"torch cuda": ["stream"]} and unchanged(), result.describe()
    if pool.world_size > 1:
        result = call(pool, "changes_device")
        assert result.ok and result.differed == {"torch cuda": ["device", "stream"]} and unchanged(), result.describe()
        assert "threads (cuda" in result.replaced  # a context on another rank's GPU ends with its process alone


@pytest.mark.parametrize("kind, text", [("exception", "ValueError: planted"), ("assertion", "torch.equal"), ("exit", "sys.exit(3)"),
                                        ("_exit", "exited with code 5"), ("abort", "killed by signal 6"), ("segmentation fault", "killed by signal 11"),
                                        ("memory", "can't allocate memory"), ("out of memory", "OutOfMemoryError"), ("assertion on the device", "device-side assert")])
def test_the_cause_comes_first(pool, kind, text):
    begin = time.monotonic()
    result = call(pool, "fault", {"kind": kind}, verdict=False)
    answered = time.monotonic()
    assert not result.ok and result.failure.rank == pool.world_size - 1 and text in result.describe(), result.describe()
    assert call(pool, "reduce").ok
    print(f"{kind}: answered after {answered - begin:.2f} s, the next case after {time.monotonic() - answered:.2f} s more")


@pytest.mark.parametrize("kind, text", [("sleep", "torch_gpu_cases.py"), ("kernel that does not end", "torch_gpu_cases.py"), ("GIL", "it does not answer"),
                                        ("stop", "it is stopped")])
def test_a_hang(pool, kind, text):
    result = call(pool, "fault", {"kind": kind}, deadline=5)
    assert (result.failure.kind, result.failure.rank) == ("timeout", pool.world_size - 1) and text in result.describe(), result.describe()
    if pool.world_size > 1:
        assert "has not entered" in result.ranks[0].error, result.describe()
    assert call(pool, "reduce").ok


@pytest.mark.parametrize("kind, left", [("great flood", []), ("thread", ["threads"]), ("child", ["children"]), ("orphan", ["children"]), ("setsid orphan", ["children"])])
def test_what_a_rank_does_beside_its_group(pool, tmp_path, kind, left):
    result = pool.call(f"{pathlib.Path(CASES).with_name('ranks_cases.py')}:fault", {"folder": str(tmp_path), "kind": kind})
    assert result.ok and list(result.left or ()) == left and bool(result.replaced) == bool(left), result.describe()
    assert call(pool, "reduce").ok


def test_more_ranks_than_gpus():
    """NCCL 2.30 and later let two share one."""
    import torch  # not before the tests are chosen, which takes seconds; it loads NCCL
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
    with cppool.Pool(GPUS + 1, python=True, preload=["torch"], backend="cuda", start_limit=120.0) as pool:
        if version.value >= 23000:
            assert [device["ordinal"] for device in pool.hello()["devices"]] == [*range(GPUS), 0]
            result = call(pool, "reduce")
            assert result.ok, result.describe()
            return
        with pytest.raises(cppool.PoolError) as caught:
            pool.hello()
    assert caught.value.kind == "start" and f"{GPUS + 1} ranks on {GPUS} GPUs need NCCL 2.30" in str(caught.value), caught.value


def test_a_module_that_opens_cuda_at_import(tmp_path):
    (tmp_path / "opens_cuda.py").write_text("import os, torch\ntorch.cuda.init()\nimported_by = os.getpid()\n")
    (tmp_path / "case.py").write_text("import os, opens_cuda\ndef who(): return [opens_cuda.imported_by, os.getpid()]\n")
    with cppool.Pool(GPUS, python=True, preload=["torch", "opens_cuda"], backend="cuda", environment={"PYTHONPATH": str(tmp_path)}, start_limit=120.0) as pool:
        python = pool.hello()["python"]
        assert python["preloaded"] == ["torch"] and [each["module"] for each in python["deferred"]] == ["opens_cuda"], python
        assert all(value[0] == value[1] for value in (rank.extra["value"] for rank in pool.call(f"{tmp_path}/case.py:who").ranks))
        assert call(pool, "reduce").ok


def test_on_the_host():
    with cppool.Pool(2, python=True, preload=["torch"], backend="host", start_limit=120.0) as pool:
        assert pool.hello()["transport"] == "gloo"
        begin = time.monotonic()
        times = [pool.call(str(pathlib.Path(CASES).with_name("torch_cases.py")) + ":reduce").wall_ms for _ in range(20)]
        print("gloo, W = 2: a warm case", sorted(times)[10], "ms;", time.monotonic() - begin, "s")


def test_marked_tests(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import cppool, torch, torch.distributed as dist\n@cppool.ranks(1)\ndef test_sum(world):\n    one = torch.ones(1, device=world.device)\n"
        "    dist.all_reduce(one)\n    assert one.item() == world.size\n")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-o", "cppool_preload=torch", "test_it.py"], cwd=tmp_path, env=os.environ,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert "1 passed" in done.stdout, done.stdout
