"""Warm pools of GPUs for tests and benchmarks.

    import cppool

    with cppool.Pools() as pools:
        for world_size in (2, 4):
            result = pools.at(world_size).run({"cp_comm_type": "p2p", "num_gqa_groups": 2})
            print(world_size, result.status, result.error)

Importing it loads nothing but Python; CUDA is never loaded into this process. For pytest it brings the fixture `cppool`.
"""
from typing import Any

from ._bench import bench
from ._dump import Dump, load_dump
from ._pool import CaseFailed, CompileError, Pool, PoolError, Pools, call
from ._result import Check, Failure, LostAttempt, Rank, Result
from ._library import prefix, version
from ._suite import Cell, suite

__all__ = ["CaseFailed", "Cell", "Check", "CompileError", "Dump", "Failure", "LostAttempt", "Pool", "PoolError", "Pools", "Rank", "Result",
           "bench", "call", "load_dump", "prefix", "ranks", "suite"]
__version__: str


def ranks(*world_sizes: int, **options: Any) -> Any:
    """A mark for a pytest test that runs with its fixtures on every rank of warm Python processes: one test for each world size.

    options: deadline (seconds), fresh, own_group, verdict, env and seed, as `call` has them. The fixture `world` has rank, size, device,
    group, stage(), check(), iterations() and result().
    """
    import pytest

    return pytest.mark.cppool_ranks(*world_sizes, **options)


def __getattr__(name: str) -> str:
    """`__version__`, for which the library is loaded: importing the package does not."""
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'cppool' has no attribute {name!r}")
