"""Reads the folders that `dump` writes."""
from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Union

if TYPE_CHECKING:
    import numpy


class Dump(Mapping[str, "numpy.ndarray[Any, Any]"]):
    """The tensors of a case by name: "q", "out", "dq", "out_no_cp", ... Each is read when it is asked for."""

    def __init__(self, folder: Union[str, "os.PathLike[str]"]):
        self.folder = os.fspath(folder)
        path = os.path.join(self.folder, "index.json")
        try:
            with open(path, encoding="utf-8") as file:
                self.index: dict[str, Any] = json.load(file)  #: parameters, cu_seqlens_*, world size, and each file's shape and axes
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not there: {self.folder} is no folder that a run's `dump` has written whole") from None

    def __getitem__(self, name: str) -> "numpy.ndarray[Any, Any]":
        if name not in self:
            raise KeyError(f"{name!r} is not in {self.folder} (there are: {', '.join(self)})")
        import numpy

        array: "numpy.ndarray[Any, Any]" = numpy.load(os.path.join(self.folder, name + ".npy"), allow_pickle=False)
        return array

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        return (file[:-len(".npy")] if file.endswith(".npy") else file for file in self.index["files"])

    def __len__(self) -> int:
        return len(self.index["files"])


def load_dump(folder: Union[str, "os.PathLike[str]"]) -> Dump:
    """A folder that `run(dump=folder)` has written. Needs NumPy when a tensor is read."""
    return Dump(folder)
