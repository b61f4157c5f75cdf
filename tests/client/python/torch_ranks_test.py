"""Python ranks with torch and gloo, without a daemon: faults around collectives, the group that is lent, torch's state."""
import os
import pathlib
import signal
import subprocess

import pytest

from ranks_parent import LIMIT, Server, World
from support import ROOT, eventually

PYTHON = str(ROOT / "build" / "torch-venv" / "bin" / "python")
CASES = str(pathlib.Path(__file__).with_name("torch_cases.py"))
HAS_TORCH = os.path.exists(PYTHON) and subprocess.run([PYTHON, "-c", "import torch"], stderr=subprocess.DEVNULL, check=False).returncode == 0
pytestmark = pytest.mark.skipif(not HAS_TORCH, reason=f"{PYTHON} has no torch, which `scripts/setup --torch` installs")


@pytest.fixture(scope="module")
def server():
    server = Server(PYTHON, preload="torch", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert server.ready["preloaded"] == ["torch"] and not server.ready["deferred"]
    yield server
    assert server.end() == 0


@pytest.fixture(scope="module")
def worlds(server):
    made = {}
    yield lambda size: made.setdefault(size, None) or made.update({size: World(server, size)}) or made[size]
    for each in made.values():
        each.kill()


@pytest.fixture(params=[2, 4])
def world(worlds, request):
    return worlds(request.param)


def run(world, function, **members):
    loaded = world.load(function=f"{CASES}:{function}")
    assert loaded.status == "passed", loaded.traceback
    return world.run(**{"kwargs": {}, **members})


def test_the_group_is_there(world):
    outcome = run(world, "reduce")
    assert outcome.status == "passed" and not outcome.differed
    assert [report["value"] for report in outcome.reports.values()] == [["cpu", True]] * world.size
    assert world.ready[0]["backend"] == "gloo" and world.ready[0]["device"] is None


@pytest.mark.parametrize("kind, text", [("exception", "ValueError: planted"), ("assertion", "assert torch.equal(torch.ones(2), torch.zeros(2))"),
                                        ("exit", "sys.exit(3)"), ("_exit", "died"), ("abort", "died"), ("segmentation fault", "died")])
def test_the_rank_at_fault_is_named(world, kind, text):
    outcome = run(world, "fault", kwargs={"kind": kind})
    assert outcome.culprit == world.size - 1 and text in outcome.error
    assert all(report["culprit"] is None for rank, report in outcome.reports.items() if rank != world.size - 1)
    assert run(world, "reduce").status == "passed"


@pytest.mark.parametrize("function, kwargs", [("fault", {"kind": "sleep"}), ("fault", {"kind": "GIL"}), ("fault", {"kind": "stop"}), ("group_of_one_rank", {})])
def test_hang_in_a_collective(world, function, kwargs):
    last = world.size - 1
    world.load(function=f"{CASES}:{function}")
    for rank in world.ranks:
        rank.send("run", id=1000, kwargs=kwargs)
    assert eventually(lambda: world.ranks[last].stage()[1] == "fault")
    for rank in range(world.size - 1):
        def waits():
            world.ranks[rank].send("stacks")
            answer = world.frames.get(timeout=LIMIT)[1]
            return answer if any(each["name"] == "gloo:all_reduce" and each["state"] != "completed" for each in answer["collectives"]) else None
        assert eventually(waits)
        answer = waits()
        assert [each["group"] for each in answer["collectives"]] == ["0"]
        main = next(thread for thread in answer["threads"] if thread["name"] == "MainThread")
        assert any("torch_cases.py" in frame for frame in main["frames"])
    assert {frame["status"] for frame in world.kill().values()} == {signal.SIGKILL}
    world.fork()
    assert run(world, "reduce").status == "passed"


def test_init_and_destroy_are_lent(world):
    for _ in range(3):
        outcome = run(world, "lent")
        assert outcome.status == "passed", outcome.traceback
        assert outcome.reports[0]["value"] == 3 * world.size and not outcome.differed
    assert run(world, "reduce").status == "passed"


def test_a_preloaded_module_that_has_imported_the_functions(tmp_path):
    (tmp_path / "mine.py").write_text("from torch.distributed import init_process_group, destroy_process_group\n"
                                      "class Lazy:\n  __slots__ = ()\nimport sys\nsys.modules['lazy of mine'] = Lazy()\n")
    (tmp_path / "case.py").write_text("import mine, torch, torch.distributed as dist\ndef f():\n  mine.init_process_group('gloo')\n"
                                      "  dist.all_reduce(torch.ones(1))\n  mine.destroy_process_group()\n  assert not dist.is_initialized()")
    server = Server(PYTHON, preload="mine", environment={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)})
    world = World(server, 2)
    for _ in range(2):
        world.load(function=f"{tmp_path}/case.py:f")
        outcome = world.run(kwargs={})
        assert outcome.status == "passed" and not outcome.left, outcome.traceback
    world.kill()
    assert server.end() == 0


@pytest.mark.parametrize("arguments, error", [
    ({"backend": "nccl"}, "asks for the backend nccl, and the warm group has gloo"), ({"backend": "gloo", "world_size": 3, "rank": 0}, "own_group"),
    ({"backend": "gloo", "world_size": 1}, "asks for the world_size 1"), ({}, "trying to initialize the default process group twice!")])
def test_init_that_does_not_fit(world, arguments, error):
    outcome = run(world, "init_with", kwargs=arguments)
    assert outcome.status == "error" and error in outcome.error


def test_own_group(world):
    for _ in range(2):
        outcome = run(world, "own", group="own")
        assert outcome.status == "passed", outcome.traceback
        assert outcome.reports[0]["value"] == world.size
        assert outcome.differed["process groups"] == ["0", "1"] and not outcome.left
        assert run(world, "lent").status == "passed"


def test_groups_left_behind_are_destroyed(world):
    for _ in range(10):
        outcome = run(world, "leaves_groups")
        assert outcome.differed == {"process groups": ["1", "2", "3"]} and not outcome.left  # always the names of a fresh process


def test_state_is_put_back(world):
    before = run(world, "draws").reports[0]["results"]
    outcome = run(world, "changes_state")
    assert outcome.status == "passed" and not outcome.left, outcome.left
    assert {name: names for name, names in outcome.differed.items() if name.startswith("torch")} == {
        "torch defaults": ["dtype", "device", "threads"], "torch determinism": ["algorithms"], "torch matmul": ["fp32_precision"], "torch cudnn": ["benchmark"],
        "torch sdp": ["flash"], "torch libraries": ["blas"], "torch modes": ["grad", "anomaly", "autocast cpu", "autocast cache"],
        "torch hooks": ["_global_forward_hooks"]}
    after = run(world, "draws")
    assert after.reports[0]["results"] == after.reports[1]["results"] == before
    largest = [run(world, "draws", seed=2**64 - 1) for _ in range(2)]  # torch takes it whole, NumPy would refuse it
    assert largest[0].status == "passed" and largest[0].reports[0]["results"] == largest[1].reports[0]["results"] != before
    assert run(world, "leaves_a_mode_open").left == {"torch open modes": ["dispatch modes"]}
    assert run(world, "leaves_hooks_open").left == {"torch open modes": ["saved tensor hooks"]}
    assert run(world, "gradient").reports[0]["value"] == [2, False]


def test_settings_of_the_allocator_replace_the_ranks(world, tmp_path):
    """With a rank that believes that it has a GPU, where they matter."""
    (tmp_path / "of_gpu.py").write_text("import torch\ntorch.cuda.is_initialized = lambda: True\n"
                                        "def sets(world): torch.cuda.memory._set_allocator_settings('max_split_size_mb:100')\n"
                                        "def imports(world):\n    import wave\n    sets(world)\n"
                                        "def passes(world): pass\n")
    for function, left in (("passes", {}), *(each for name in ("sets", "imports") for each in ((name, {"torch allocator": ["settings"]}), ("passes", {})))):
        assert world.load(function=f"{tmp_path}/of_gpu.py:{function}").status == "passed"
        assert world.run(kwargs={}).left == left
    world.kill()
    world.fork()


def test_autocast_left_open_is_closed(world):
    assert run(world, "cast_twice").reports[0]["value"] == [8, 16]
    outcome = run(world, "leaves_autocast_open")
    assert outcome.differed == {"torch modes": ["autocast cpu", "autocast nesting"]} and not outcome.left
    assert outcome.reports[0]["value"] == [8, 8]  # the first cast is kept until the outermost context ends
    assert run(world, "cast_twice").reports[0]["value"] == [8, 16]


def test_settings_of_the_compiler_are_put_back():
    server = Server(PYTHON, preload="torch,torch._dynamo.config,torch._inductor.config", environment={"CUDA_VISIBLE_DEVICES": ""})
    world = World(server, 1)
    before = run(world, "compiler_settings").reports[0]["value"]
    for _ in range(2):
        outcome = run(world, "changes_compiler_settings")
        assert outcome.status == "passed" and not outcome.left and outcome.differed == {
            "torch._dynamo.config": ["recompile_limit"], "torch._inductor.config": ["max_autotune"]}
        assert run(world, "compiler_settings").reports[0]["value"] == before
    world.kill()
    assert server.end() == 0


def test_checks_of_tensors(world):
    outcome = run(world, "wrong")
    assert outcome.status == "failed" and outcome.error.startswith("the check of out against no_cp does not hold: max_abs_err 0.25,")
    assert [(check["max_abs_err"], check["ok"]) for check in outcome.reports[0]["checks"]] == [(0.25, False), ("nan", False)]


def test_script(world):
    world.load(script=str(pathlib.Path(CASES).with_name("torch_script.py")))
    for _ in range(2):
        assert world.run(argv=[]).status == "passed"
    assert eventually(lambda: world.output(0).count(f"sum {float(world.size)}") == 2)
    assert world.run(argv=["--code", "4"]).error == "sys.exit(4)"


def test_one_rank_and_gpus_that_are_not_there(server, worlds):
    assert run(worlds(1), "lent").reports[0]["value"] == 3
    world = World.__new__(World)
    world.server, world.size, world.backend = server, 2, "nccl"
    with pytest.raises(AssertionError, match="the backend nccl needs a GPU, and torch sees none here: gloo works without"):
        world.fork()
    world.kill()
