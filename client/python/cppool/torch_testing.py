"""`pytest -p cppool.torch_testing`: the tests of torch's MultiProcContinuousTest on warm ranks, which all classes of a run share.

A class starts no processes and waits for none: each test is a case on Python ranks that have torch imported and whose process group is lent, and
a failure is that of the rank that caused it. Tests after one that failed run. https://github.com/pytorch/pytorch,
torch/testing/_internal/common_distributed.py.
"""
from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import queue
import sys
import tempfile
import unittest
from typing import Any, Optional

import pytest

from ._pool import PoolError, Pools, caller, shared_pools


class _Process:
    """In place of a worker, for the checks of its state."""

    exitcode = None

    def is_alive(self) -> bool:
        return True

    def join(self) -> None:
        pass


class _Tasks:
    """A worker's queue: the last one's test is run on all ranks, and its outcome is put for each."""

    def __init__(self, test: type, world_size: int, completions: list["queue.Queue[Any]"], is_last: bool):
        self._test, self._world_size, self._completions, self._is_last = test, world_size, completions, is_last

    def put(self, test_id: Optional[str]) -> None:
        if self._is_last and test_id is not None:
            outcome = _outcome(self._test, self._world_size, test_id)
            for completion in self._completions:
                completion.put(outcome)


def _pools(test: Any, world_size: int) -> Pools:
    """Throws SkipTest. More ranks than GPUs are for classes on the host, unless this NCCL has ranks that share a GPU."""
    cuda = sys.modules["torch"].cuda
    count, of_nccl = cuda.device_count(), "nccl" in (test.backend_str() or "")
    crowded = 0 < count < world_size
    if crowded and of_nccl and cuda.nccl.version() < (2, 30):
        raise unittest.SkipTest(f"{world_size} ranks on {count} GPUs need NCCL 2.30")
    return shared_pools(preload=["torch.testing._internal.common_distributed"], backend="host" if crowded and not of_nccl else "auto")


def _outcome(test: type, world_size: int, test_id: str) -> Any:
    """As a worker puts it: the test's id, or an exception."""
    file = inspect.getfile(test)
    case = {"function": f"{os.path.abspath(__file__)}:run_on_rank", "roots": [os.path.dirname(os.path.abspath(file))], **caller(),
            "kwargs": {"module": test.__module__, "file": os.path.abspath(file), "name": test.__name__, "test_id": test_id}}
    try:
        pool = _pools(test, world_size).at(world_size)
        # Options and backends that the warm group was made without.
        own_group = test.opts() is not None or test.backend_str() not in (None, pool.hello()["transport"])  # type: ignore[attr-defined]
        result = pool.run_python(case, deadline=float(test.timeout.total_seconds()), own_group=own_group)  # type: ignore[attr-defined]
    except unittest.SkipTest as skip:
        return skip
    except PoolError as error:
        return RuntimeError(str(error))
    if result.status == "skipped":
        return unittest.SkipTest(result.error)
    return test_id if result.ok else RuntimeError(result.describe().partition("\nrepeat: ")[0])


def run_on_rank(world: Any, module: str, file: str, name: str, test_id: str) -> None:
    """The test of the class on one rank, as MultiProcContinuousTest's own worker runs it."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    sys.path.insert(0, os.path.dirname(file))
    if module == "__main__":
        module = os.path.splitext(os.path.basename(file))[0]
    test = getattr(importlib.import_module(module), name)
    test.rank, test.world_size = world.rank, world.size
    try:
        # _init_pg makes a FileStore, which the lent group has no use for.
        folder = tempfile.gettempdir()
        test._init_pg(world.rank, world.size, os.path.join(folder, f"cppool_{os.environ['MASTER_PORT']}_{world.id}"))
        test._run_test_given_id(test_id)
    except SystemExit as end:
        skip = next((skip for skip in TEST_SKIPS.values() if skip.exit_code == end.code), None)
        if skip is None:
            raise
        raise unittest.SkipTest(skip.message) from None


def _spawn_processes(cls: Any, world_size: int) -> None:
    completions: list["queue.Queue[Any]"] = [queue.Queue() for _ in range(world_size)]
    cls.processes, cls.completion_queues, cls.rdvz_file = [_Process()] * world_size, completions, ""
    cls.task_queues = [_Tasks(cls, world_size, completions, rank == world_size - 1) for rank in range(world_size)]


def pytest_configure(config: pytest.Config) -> None:
    from torch.testing._internal.common_distributed import MultiProcContinuousTest

    set_up = MultiProcContinuousTest.setUp

    def without_poison(self: Any) -> None:
        type(self).poison_pill = False  # ranks that a failure has hurt are replaced
        set_up(self)

    MultiProcContinuousTest.setUp = without_poison
    MultiProcContinuousTest._spawn_processes = classmethod(_spawn_processes)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the daemons of all classes beside the first test."""
    from torch.testing._internal.common_distributed import MultiProcContinuousTest

    if session.config.option.collectonly:
        return
    for test in {item.cls for item in session.items if inspect.isclass(getattr(item, "cls", None))}:
        if issubclass(test, MultiProcContinuousTest):
            size = inspect.getattr_static(test, "world_size")
            size = size.fget(object.__new__(test)) if isinstance(size, property) else size
            if size > 0:  # else it is the number of devices
                with contextlib.suppress(unittest.SkipTest):
                    _pools(test, size).warm([size])
