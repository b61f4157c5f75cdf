"""Cases in Python with torch and gloo through the daemon, and `cppool torchrun`. torch_ranks_test.py tests the Python half."""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import time

import cppool
import pytest

from support import BUILD, launcher, serving
from torch_ranks_test import HAS_TORCH, PYTHON

CASES = str(pathlib.Path(__file__).with_name("torch_cases.py"))
TOO_BUSY = "it does not answer"  # a rank has 0.12 s for it, which it may not have beside a load
COMMAND = os.path.join(BUILD, "bin", "cppool")
pytestmark = pytest.mark.skipif(not HAS_TORCH, reason=f"{PYTHON} has no torch, which `scripts/setup --torch` installs")


@pytest.fixture(scope="module", params=["here", "agents"])  # of two agents, with gloo between them
def pools(request, tmp_path_factory):
    launch = launcher(tmp_path_factory.mktemp("launch")) if request.param == "agents" else None
    with cppool.Pools(python=PYTHON, preload=["torch"], backend="host", start_limit=120.0, grace=30.0, launch=launch,
                      environment={"CPPOOL_HEAD_ADDRESS": "127.0.0.1"}) as pools:
        yield pools


@pytest.fixture(params=[1, 2, 4, 8])
def pool(pools, request):
    if request.param in (1, 8) and pools.at(2).hello().get("nodes"):
        pytest.skip("one rank is not for two agents, and eight processes are those of one machine")
    return pools.at(request.param)


def call(pool, name, kwargs=None, **options):
    return pool.call(f"{CASES}:{name}", kwargs, **options)


def test_reduce(pool):
    result = call(pool, "reduce")
    assert result.ok and result.ranks[0].extra["value"] == ["cpu", True] and "reduce" in result.ranks[0].gpu_ms, result.describe()
    assert pool.hello()["transport"] == "gloo" and pool.hello()["python"]["torch"]


def test_digests_do_not_depend_on_the_number_of_processes(tmp_path):
    digests = []
    for agents in (1, 2, 4):
        with cppool.Pool(4, python=PYTHON, preload=["torch"], backend="host", start_limit=120.0, launch=launcher(tmp_path, agents),
                         environment={"CPPOOL_HEAD_ADDRESS": "127.0.0.1"}) as pool:
            assert [len(node["ranks"]) for node in pool.hello()["nodes"]] == [4 // agents] * agents
            digests.append([rank.extra["value"] for rank in call(pool, "digest").ranks])
    assert digests[0] == digests[1] == digests[2] and len(set(digests[0])) == 4, digests


def test_lent_and_own(pool):
    assert call(pool, "lent").ranks[0].extra["value"] == 3 * pool.world_size
    assert call(pool, "own", own_group=True).ranks[0].extra["value"] == pool.world_size
    assert call(pool, "reduce").ok


def test_another_torch_than_the_preloaded_one(pool, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    result = call(pool, "reduce")
    assert result.failure.kind == "invalid_request" and f"{tmp_path}/torch/__init__.py is another torch than the one that is preloaded" in result.error
    monkeypatch.undo()
    assert call(pool, "reduce").ok


@pytest.mark.parametrize("kind, text", [("exception", "ValueError: planted"), ("assertion", "torch.equal"), ("memory", "can't allocate memory"), ("exit", "sys.exit(3)"),
                                        ("_exit", "exited with code 5"), ("abort", "killed by signal 6"), ("segmentation fault", "killed by signal 11")])
def test_the_cause_comes_first(pool, kind, text):
    result = call(pool, "fault", {"kind": kind}, verdict=False)
    assert result.failure.rank == pool.world_size - 1 and text in result.error and result.failure.stage == "fault", result.describe()
    assert (result.failure.kind == "out_of_memory") == (kind == "memory") and call(pool, "reduce").ok


@pytest.mark.parametrize("kind", ["sleep", "GIL", "stop"])
def test_who_has_not_entered_the_collective(pools, kind):
    """At all world sizes at once, since each waits for its deadline."""
    sizes = [2, 4] if pools.at(2).hello().get("nodes") else [1, 2, 4, 8]
    for size in sizes:
        assert call(pools.at(size), "reduce").ok
    with concurrent.futures.ThreadPoolExecutor() as threads:
        results = list(threads.map(lambda size: call(pools.at(size), "fault", {"kind": kind}, deadline=3), sizes))
    for size, result in zip(sizes, results):
        culprit = size - 1
        assert (result.failure.kind, result.failure.rank) == ("timeout", culprit), result.describe()
        for rank in result.ranks[:-1]:
            assert TOO_BUSY in rank.error or ("all_reduce" in rank.error and f"rank {culprit} has not entered" in rank.error), result.describe()
        assert culprit == 0 or f"others wait for rank {culprit}" in result.error
        assert "gloo:" not in result.ranks[-1].error, result.describe()  # it has returned from the one before
        assert call(pools.at(size), "reduce").ok


@pytest.mark.parametrize("others", ["finish", "wait"])
def test_who_has_not_entered_the_collective_of_a_group(pools, others):
    pool = pools.at(4)
    for _ in range(9):
        assert call(pool, "lent").ok  # with a group of the same name, whose numbers do not count
        result = call(pool, "hang_in_a_group", {"others": others}, deadline=3)
        if TOO_BUSY not in result.error:
            break
    assert (result.failure.kind, result.failure.rank) == ("timeout", 1), result.describe()
    assert "in gloo:all_reduce (number 1 of group 1), which rank 1 has not entered" in result.ranks[0].error, result.describe()
    assert [rank.ok for rank in result.ranks] == [False, False] + [others == "finish"] * 2
    if others == "wait":
        assert all("which ranks 0 and 1 have not entered" in rank.error for rank in result.ranks[2:]), result.describe()


@pytest.mark.parametrize("kind", ["great flood", "thread", "child", "orphan", "setsid orphan"])
def test_what_a_rank_does_beside_its_group(pool, tmp_path, kind):
    result = pool.call(f"{pathlib.Path(CASES).with_name('ranks_cases.py')}:fault", {"folder": str(tmp_path), "kind": kind})
    assert result.ok and list(result.left or ()) == {"great flood": [], "thread": ["threads"]}.get(kind, ["children"]), result.describe()
    assert bool(result.replaced) == (kind != "great flood") and call(pool, "reduce").ok


@pytest.mark.parametrize("kind, what", [("dtype", "torch defaults (dtype)"), ("variable", "environment (OF_LIBRARY)"), ("group", "process groups ("),
                                        ("hook", "torch hooks (_global_forward_hooks")], ids=["dtype", "variable", "group", "hook"])
def test_the_verdict_on_a_leak(pools, kind, what):
    """The reset puts it back; what a library keeps of it fails the next case, which tells what was changed."""
    pool, (group, name) = pools.at(2), what.rstrip(")").split(" (")
    result = call(pool, "leaks", {"kind": kind, "keep": False}, fresh=True)
    assert result.ok and not result.left and list(result.differed) == [group], result.describe()
    assert any(each.startswith(name) for each in result.differed[group]), result.differed
    result = call(pool, "needs_no_leak")
    assert result.ok and not result.replaced, result.describe()
    assert call(pool, "leaks", {"kind": kind, "keep": True}, fresh=True).ok
    result = call(pool, "needs_no_leak")
    assert (result.status, result.failure.kind) == ("failed", "polluted"), result.describe()
    assert f"these had run torch_cases.py:leaks, which changed {what}" in result.error and call(pool, "needs_no_leak").ok


def test_a_group_that_a_library_holds(pools):
    """Its threads go on, so that the ranks are replaced."""
    result = call(pools.at(2), "holds_a_group")
    assert result.ok and "process groups" in result.differed and "gloo" in str(result.left["threads"]), result.describe()
    assert "left what cannot be put back" in result.replaced and call(pools.at(2), "needs_no_leak").ok


def test_marked_tests(tmp_path):
    """With the pytest that is beside torch, a later one than the other tests run with."""
    (tmp_path / "test_marked.py").write_text(
        "import cppool, pytest, torch, torch.distributed as dist\n"
        "@cppool.ranks(2)\n@pytest.mark.parametrize('n', [2, 3])\ndef test_sum(world, n):\n"
        "    one = torch.ones(1)\n    dist.all_reduce(one, group=world.group)\n    assert one.item() == n\n")
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "cppool_preload=torch", "test_marked.py"], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": os.path.join(BUILD, "python")}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert "1 failed, 1 passed" in done.stdout and "E       assert 2.0 == 3" in done.stdout, done.stdout


CLASSES = """
import datetime, unittest, torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class TwoRanks(MultiProcContinuousTest):
    world_size = 2
    timeout = datetime.timedelta(seconds=60)
    @classmethod
    def backend_str(cls): return "gloo"
    def test_group(self):
        one = torch.ones(1)
        dist.all_reduce(one, group=dist.new_group(list(range(self.world_size))))
        self.assertEqual(one.item(), self.world_size)
    def test_one_raises(self):
        if self.rank == 1: raise ValueError("planted")
        dist.all_reduce(torch.ones(1))
    def test_skip(self): raise unittest.SkipTest("no moon")
    def test_z_after(self): self.assertTrue(dist.is_initialized())

class FourRanks(TwoRanks):
    world_size = 4

class AnotherBackend(MultiProcContinuousTest):
    world_size = 2
    timeout = datetime.timedelta(seconds=60)
    @classmethod
    def backend_str(cls): return "cpu:gloo"
    def test_group(self): self.assertEqual(dist.get_backend_config(), "cpu:gloo")
"""


def test_torchs_continuous_tests(tmp_path):
    (tmp_path / "test_classes.py").write_text(CLASSES)
    if subprocess.run([PYTHON, "-c", "import pytest, expecttest"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        pytest.skip("pytest and expecttest are not in the Python with torch")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.path.join(BUILD, "python")}
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "cppool.torch_testing", "test_classes.py"], cwd=tmp_path,
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert "2 failed, 5 passed, 2 skipped" in done.stdout, done.stdout
    # And the tests after it ran.
    assert "ValueError: planted" in done.stdout and ("which rank 1 has not entered" in done.stdout or TOO_BUSY in done.stdout)


# As a machine with two GPUs and an NCCL whose ranks cannot share one.
MORE_RANKS_THAN_GPUS = """
import os, torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest
torch.cuda.device_count, torch.cuda.nccl.version = lambda: 2, lambda: (2, 28, 9)
class OnTheHost(MultiProcContinuousTest):
    world_size = 4
    @classmethod
    def backend_str(cls): return "gloo"
    def test_group(self): self.assertEqual((dist.get_world_size(), os.environ["CUDA_VISIBLE_DEVICES"]), (4, ""))
class OnGpus(OnTheHost):
    @classmethod
    def backend_str(cls): return "nccl"
"""


def test_torchs_continuous_tests_of_more_ranks_than_gpus(tmp_path):
    (tmp_path / "test_classes.py").write_text(MORE_RANKS_THAN_GPUS)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1", "PYTHONPATH": os.path.join(BUILD, "python")}
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "cppool.torch_testing", "test_classes.py"], cwd=tmp_path,
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert "1 passed, 1 skipped" in done.stdout and "4 ranks on 2 GPUs need NCCL 2.30" in done.stdout, done.stdout


# As much of DeepSpeed and of its tests/unit/common.py as its tests need.
DEEPSPEED = """
import torch.distributed as dist
seen = []
def init_distributed(rank, world_size):
    if not dist.is_initialized(): dist.init_process_group("gloo", rank=rank, world_size=world_size)
"""
ACCELERATOR = """
class Cpu:
    def is_available(self): return True
    def device_count(self): return 4
def get_accelerator(): return Cpu()
"""
COMMON = """
import os, deepspeed, deepspeed.accelerator, pytest
from _pytest.outcomes import Skipped
class DistributedExec:
    world_size, init_distributed, set_dist_env, non_daemonic_procs, reuse_dist_env, exec_timeout = 2, True, True, False, False, 60
    def _launch_procs(self, num_procs, init_method): raise NotImplementedError("processes")
    def _dist_run(self, local_rank, num_procs, master_port, init_method, skip_msg=""):
        if self.init_distributed: deepspeed.init_distributed(local_rank, num_procs)
        try: self.run(**self.kwargs)
        except Skipped as skip: return skip.msg
        return skip_msg
class DistributedTest(DistributedExec):
    is_dist_test = True
    def run(self, **kwargs): getattr(self, self.name)(**kwargs)
    def __call__(self, request):
        self.name, self.kwargs = request.function.__name__, {name: request.getfixturevalue(name) for name in request.fixturenames if name == "number"}
        mark = request.node.get_closest_marker("world_size")
        self._launch_procs(mark.args[0] if mark else self.world_size, None)
"""
DEEPSPEED_CONFTEST = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True
"""
DEEPSPEED_TESTS = """
import deepspeed, os, pytest, torch, torch.distributed as dist
from common import DistributedTest
class TestLent(DistributedTest):
    @pytest.mark.parametrize("number", [5, 6])
    def test_reduce(self, number):
        total = torch.ones(1) * number
        dist.all_reduce(total)
        assert total.item() == 2 * number
    @pytest.mark.world_size(4)
    def test_four(self): assert dist.get_world_size() == 4
    @pytest.mark.world_size(5)
    def test_five(self): assert False
    def test_one_fails(self):
        if dist.get_rank() == 1: raise ValueError("planted")
        dist.all_reduce(torch.ones(1))
    def test_skip(self): pytest.skip("no moon")
class TestAlone(DistributedTest):
    init_distributed = set_dist_env = False
    def test(self): assert not dist.is_initialized() and "RANK" not in os.environ
@pytest.fixture
def variable(monkeypatch): monkeypatch.setenv("OF_TEST", "1")
class TestVariable(DistributedTest):
    @pytest.mark.usefixtures("variable")
    def test(self): assert os.environ["OF_TEST"] == "1"
    def test_after(self): assert "OF_TEST" not in os.environ
class TestSeesNoOther(DistributedTest):
    @pytest.mark.parametrize("number", [1, 2])
    def test_seen(self, number):
        assert not deepspeed.seen
        deepspeed.seen.append(number)
class TestReuses(DistributedTest):
    reuse_dist_env = True
    @pytest.mark.parametrize("number", [1, 2])
    def test_seen(self, number):
        if number == 2: assert deepspeed.seen[-1] == 1
        deepspeed.seen.append(number)
"""


def test_deepspeeds_tests(tmp_path):
    for name, text in {"deepspeed/__init__.py": DEEPSPEED, "deepspeed/accelerator.py": ACCELERATOR, "common.py": COMMON, "conftest.py": DEEPSPEED_CONFTEST,
                       "test_suite.py": DEEPSPEED_TESTS, "pytest.ini": "[pytest]\nmarkers = world_size: of the test\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.path.join(BUILD, "python")}
    done = subprocess.run([PYTHON, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "cppool.deepspeed", "test_suite.py"], cwd=tmp_path,
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert "1 failed, 10 passed, 2 skipped" in done.stdout, done.stdout
    assert "ValueError: planted" in done.stdout and "no moon" in done.stdout and "it needs 5 devices, and there are 4" in done.stdout


def torchrun(*arguments, **environment):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CPPOOL_PYTHON": PYTHON, **environment}
    return subprocess.run([COMMAND, "torchrun", *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
import helper
dist.init_process_group("gloo")
total = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("sum", total[0].item(), sys.argv[1:], os.environ["OF_CALLER"], helper.value)
if sys.argv[1:] == ["fail"] and dist.get_rank() == 1:
    raise ValueError("planted")
dist.all_reduce(total)
dist.destroy_process_group()
"""


def test_torchrun(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("value = 'helped'\n")
    script = str(tmp_path / "script.py")
    with serving(tmp_path) as socket:
        attached = {"CPPOOL_ATTACH": socket, "OF_CALLER": "here"}
        done = torchrun("--standalone", "--nproc_per_node=2", script, "a", "--b", **attached)
        assert done.returncode == 0 and done.stdout.splitlines() == ["sum 3.0 ['a', '--b'] here helped"] * 2, done
        begin = time.monotonic()
        done = torchrun("--nproc-per-node", "2", script, "fail", **attached)
        assert done.returncode == 1 and "rank 1: ValueError: planted" in done.stderr and "all_reduce" in done.stderr, done
        assert time.monotonic() - begin < 60  # and no time-out of gloo
        shims = subprocess.run([COMMAND, "shims"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        done = subprocess.run(["torchrun", "--nproc-per-node=2", script], env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "CPPOOL_PYTHON": PYTHON, **attached,
                              "PATH": shims + os.pathsep + os.environ["PATH"]}, stdout=subprocess.PIPE, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.count("sum 3.0") == 2
    done = torchrun("--nproc-per-node", "2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script, OF_CALLER="there")
    assert done.returncode == 0 and "is for the real torchrun" in done.stderr and done.stdout.count("there") == 2, done


WRITES_ITS_ENVIRONMENT = """
import json, os, sys, torch.distributed as dist
with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    json.dump({**os.environ, "launched": str(dist.is_torchelastic_launched())}, file)
"""


def test_the_environment_is_torchruns(tmp_path):
    """Where both were started by another torchrun, whose variables are not the script's."""
    (tmp_path / "script.py").write_text(WRITES_ITS_ENVIRONMENT)
    outer = {name: "of another" for name in ("GROUP_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
                                             "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE")}
    environments = []
    for name, options in (("real", ["--rdzv-backend=static", "--master-port=0"]), ("warm", [])):
        done = torchrun("--nproc-per-node=2", *options, str(tmp_path / "script.py"), str(tmp_path / name), **outer)
        assert done.returncode == 0 and ("is for the real torchrun" in done.stderr) == (name == "real"), done
        environments.append([json.loads((tmp_path / f"{name}.{rank}").read_text()) for rank in range(2)])
    for real, warm in zip(*environments):
        differing = {name for name in {**real, **warm} if real.get(name) != warm.get(name)} - {"_", "PYTEST_CURRENT_TEST"}
        assert differing == {
            "MASTER_PORT",  # of the ranks' own store
            "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # torchrun's alone
            "CPPOOL_PARENT_PID", "CPPOOL_RANKS_OF", "GLOO_SOCKET_IFNAME", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_NCCL_DUMP_ON_TIMEOUT"}, (real, warm)
        assert "TORCHELASTIC_USE_AGENT_STORE" not in warm and "TORCHELASTIC_ERROR_FILE" not in warm


@pytest.mark.parametrize("arguments, text", [((), "needs a script"), (("--nproc-per-node",), "has no value"), (("--nproc-per-node", "0", "x.py"), "from 1 to 64"),
                                             (("--nproc-per-node=2",), "needs a script after"), (("--deadline", "x", "x.py"), "a number of seconds")])
def test_wrong_torchrun(arguments, text):
    done = torchrun(*arguments)
    assert done.returncode == 2 and text in done.stderr, done
