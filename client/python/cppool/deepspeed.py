"""`pytest -p cppool.deepspeed`: DeepSpeed's DistributedTest and DistributedFixture on warm ranks.

A test launches no Python: it is a case on ranks that were forked with torch and deepspeed imported and whose process group is lent, and a failure
is that of the rank that caused it. A test that hangs fails at its limit, and the tests after it run. Only classes with `reuse_dist_env = True`
get ranks that have run other tests: DeepSpeed keeps groups in its modules. Those with `init_distributed = False`, `set_dist_env = False` or
`non_daemonic_procs = True` get ranks without a group.
https://github.com/deepspeedai/DeepSpeed, tests/unit/common.py.
"""
from __future__ import annotations

import inspect
import os
import pickle
import sys
import tempfile
import unittest
from typing import Any, Optional

import pytest

from ._pool import PoolError, Pools, caller, shared_pools

_root = ""  # of the tests, whose changed files are loaded anew


def _pools() -> Pools:
    library = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["deepspeed"].__file__ or "")))
    if os.pathsep in library:
        raise pytest.UsageError(f"deepspeed is in {library}, which cannot be in PYTHONPATH, whose entries end at a colon: move it")
    return shared_pools(preload=["torch", "deepspeed"], environment={"PYTHONPATH": os.pathsep.join(filter(None, [library, os.environ.get("PYTHONPATH")]))})


def run_on_rank(world: Any, path: str) -> None:
    """The test or fixture that was pickled into the file, on one rank."""
    with open(path, "rb") as file:
        test = pickle.load(file)
    test.non_daemonic_procs = False  # it returns why it was skipped, and needs no queue
    if not test.set_dist_env:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    reason = test._dist_run(world.rank, world.size, os.environ.get("MASTER_PORT"), None)
    if reason:
        raise unittest.SkipTest(reason)


def _launch_procs(self: Any, num_procs: int, init_method: Optional[str]) -> None:
    accelerator = sys.modules["deepspeed.accelerator"].get_accelerator()
    if accelerator.is_available() and accelerator.device_count() < num_procs:
        pytest.skip(f"it needs {num_procs} devices, and there are {accelerator.device_count()}")
    fresh = not self.reuse_dist_env or os.environ.get("DS_DISABLE_REUSE_DIST_ENV") == "1"
    alone = not self.init_distributed or not self.set_dist_env or self.non_daemonic_procs
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps(self))
        file.flush()
        case = {"function": f"{os.path.abspath(__file__)}:run_on_rank", "kwargs": {"path": file.name}, **caller(),
                "roots": [_root], "env": {"LOCAL_SIZE": str(num_procs)}}
        try:
            result = _pools().at(num_procs).run_python(case, deadline=float(self.exec_timeout), fresh=fresh or alone, own_group=alone)
        except PoolError as error:
            pytest.fail(str(error), pytrace=False)
    if result.status == "skipped":
        pytest.skip(result.error)
    if not result.ok:
        pytest.fail(result.describe().partition("\nrepeat: ")[0], pytrace=False)


def pytest_collection_finish(session: pytest.Session) -> None:
    global _root
    _root = str(session.config.rootpath)
    for module in list(sys.modules.values()):
        harness = getattr(module, "__dict__", {}).get("DistributedExec")
        if inspect.isclass(harness) and hasattr(harness, "_launch_procs"):
            harness._launch_procs = _launch_procs
    sizes = set()
    for item in session.items:
        if getattr(getattr(item, "cls", None), "is_dist_test", False):
            mark = item.get_closest_marker("world_size")
            size = mark.args[0] if mark is not None and mark.args else item.cls.world_size  # type: ignore[attr-defined]
            sizes.update([size] if isinstance(size, int) else size)
    if sizes:
        _pools().warm(sorted(sizes))
