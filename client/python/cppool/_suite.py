"""The suites of cppool, as cells for pytest's `parametrize` or a loop."""
from __future__ import annotations

from typing import Any, Iterable, Optional

from ._library import call, entries, text_of


class Cell:
    """A case with its parameters on a number of ranks. `Pool.run` and the fixture `cppool` take it in place of parameters."""

    __slots__ = ("name", "suite", "rows", "essential", "world_size", "case", "params")

    def __init__(self, name: str, *, world_size: int = 2, case: str = "attention", params: Optional[dict[str, Any]] = None,
                 suite: str = "", rows: Iterable[str] = (), essential: bool = False):
        self.name = name  #: unique in its suite: "flash:cp_1_0 bf16 bshd p2p W=2"
        self.world_size = world_size
        self.case = case
        self.params = dict(params or {})
        self.suite = suite  #: "matrix", "own", "smoke", ...
        self.rows = tuple(rows)  #: the rows of the suite's tables that have these parameters
        self.essential = essential

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<cppool.Cell {self.name}>"


def suite(name: str, *, filters: Iterable[str] = (), max_seqlen: Optional[int] = None) -> list[Cell]:
    """The cells of a suite, by world size: "smoke", "essential", "matrix", or a file (client/README.md has its format). No daemon is
    started.

    `filters` ("key=value", "key!=value") and `max_seqlen` are those of `cppool run`. Throws ValueError for an unknown name or key, a
    file that is not a suite, and when no cell matches.
    """
    selection: dict[str, Any] = {"suite": name, "filters": [filters] if isinstance(filters, str) else entries(filters, "filters")}
    if max_seqlen is not None:
        selection["max_seqlen"] = max_seqlen
    return [Cell(**cell) for cell in call("cppool_client_suite", text_of(selection, "suite"))["cells"]]
