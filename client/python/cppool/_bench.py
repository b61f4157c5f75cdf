"""Sweeps: what `cppool bench` measures, as rows."""
from __future__ import annotations

import json
import os
from typing import Any, Mapping, Optional, Sequence, Union

from ._library import entries, prefix, text_of

_Path = Union[str, "os.PathLike[str]"]


def _text(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, allow_nan=False, separators=(",", ":"))


def _row(point: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": point["case"], "world_size": point["world_size"], **point["params"],
                           **({"kernels": point["kernels"]} if point.get("kernels") else {})}
    for prefix, measured in (("", point.get("measured", {})), ("one_gpu_", point.get("one_gpu", {}))):
        for stage, timing in {**measured.get("stages", {}), "together": measured.get("together", {})}.items():
            for name, value in timing.items():
                row[f"{prefix}{stage}_{name}"] = value
    for stage, share in point.get("efficiency", {}).items():
        row[f"{stage}_efficiency"] = share
    for stage, ratio in (point.get("ratio") or {}).items():
        row[f"{stage}_ratio"], row[f"{stage}_ratio_low"], row[f"{stage}_ratio_high"] = ratio["value"], ratio["low"], ratio["high"]
    baseline = point.get("baseline") or {}
    for stage, ratio in baseline.get("ratio", {}).items():
        row[f"{stage}_now_then"], row[f"{stage}_now_then_low"], row[f"{stage}_now_then_high"] = ratio["value"], ratio["low"], ratio["high"]
    if baseline:
        row["verdict"] = baseline["verdict"]
    row["error"] = point.get("measured", {}).get("error", "")
    row["command"] = point.get("command", "")
    return row


def bench(params: Optional[Mapping[str, Any]] = None, *, world_size: Union[int, Sequence[int]] = 2, case: str = "attention",
          warmup: int = 3, repeat: Optional[int] = None, precision: Optional[float] = None, time: Optional[float] = None,
          save: Optional[_Path] = None, resume: Optional[_Path] = None, baseline: Optional[_Path] = None, deadline: float = 300.0, backend: str = "auto", transport: str = "auto",
          devices: Sequence[Union[int, str]] = (), daemon: Optional[str] = None, case_files: Sequence[str] = (),
          kernels: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Times a case over every combination of world sizes and parameters, with the command `cppool bench`, which verifies each point first.

    A list in `params` gives several values; a value that is a list itself is a tuple: {"cp_comm_type": ["p2p", "a2a"],
    "window_size": (512, 0)}. kernels: what `Pool.run` takes, each; they are timed in turn, and compared with the first.

    A row is timed until half the 95 % confidence interval of each stage's median is at most `precision` percent of it (0.5), for at most
    `time` seconds (3); or in exactly `repeat` iterations. save: a file that gets the rows; baseline: such a file, which each row is
    compared with; resume: such a file, whose points are not measured again, and which gets each point as it is done.

    Returns a row per point, for `pandas.DataFrame(rows)`: the parameters, and by stage (and "together") `forward_ms`, `forward_tflops`
    (per GPU), `forward_efficiency` (against the same problem on one GPU, whose own columns begin with `one_gpu_`), `forward_ratio` (the time over that of the first kernels,
    with its 95 % interval from `forward_ratio_low` to `forward_ratio_high`), with a baseline `forward_now_then` (the time over that of then, with its
    interval likewise) and `verdict` ("faster", "same", "slower"; none for a row that the baseline lacks), ... A point that could
    not be measured has a text in `error`. Throws ValueError for arguments that the command refuses, RuntimeError when it measures nothing.
    """
    import subprocess  # takes as long to import as the package

    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"params is a dict of parameters, not {type(params).__name__}")
    text_of({"params": dict(params or {})}, "params")  # names what JSON cannot express
    sizes = [world_size] if isinstance(world_size, int) else entries(world_size, "world_size")
    own = os.path.join(prefix(), "bin", "cppool")
    words = [own if os.path.exists(own) else "cppool", "bench", "--json", "--case", case, "--world-size", ",".join(map(str, sizes)),
             "--warmup", str(warmup), "--deadline", repr(float(deadline)), "--backend", backend, "--transport",
             transport]
    for key, value in (params or {}).items():
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(f"params[{key!r}] has no value")
        words += ["--param", f"{key}=" + ",".join(map(_text, values))]
    for option, number in (("--repeat", repeat), ("--precision", precision), ("--time", time)):
        if number is not None:
            words += [option, repr(number)]
    for option, file in (("--save", save), ("--resume", resume), ("--baseline", baseline)):
        if file is not None:
            words += [option, os.fspath(file)]
    if gpus := entries(devices, "devices"):
        words += ["--devices", ",".join(map(str, gpus))]
    if daemon is not None:
        words += ["--daemon", os.fspath(daemon)]
    if kernels:
        words += ["--kernels", ",".join([kernels] if isinstance(kernels, str) else map(os.fspath, kernels))]
    for file in entries(case_files, "case_files"):
        words += ["--load", os.path.abspath(file)]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate()
    except BaseException:  # Ctrl-C, above all
        process.terminate()
        process.wait()
        raise
    rows = [_row(point) for point in map(json.loads, out.splitlines()) if "case" in point]
    if process.returncode == 2:
        raise ValueError(err.strip())
    if not rows or process.returncode not in (0, 1, 3, 4):  # 3: a row is slower, 4: none could be compared
        raise RuntimeError(f"cppool bench ended with code {process.returncode}: {err.strip()}")
    return rows
