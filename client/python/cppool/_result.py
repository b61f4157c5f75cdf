"""What a daemon answers to `run`."""
from __future__ import annotations

import math
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

from ._library import call, text_of


class Check(NamedTuple):
    """One compared tensor of one rank. Numbers that are not finite are NaN."""

    tensor: str  #: "out", "dq", ...
    against: str  #: "no_cp", "oracle", ...
    rank: int
    max_abs_err: float  #: the largest error of an element
    rel_err: float  #: RMS of the error over RMS of the reference
    tolerance: float  #: absolute part of the limit on each element's error
    ok: bool
    ratio: Optional[float] = None  #: against the oracle: the largest error over plain attention's in the same dtype
    #: of a check that does not hold, where it is known: the element that is furthest off, {"index", "got", "wanted"},
    worst: Optional[Mapping[str, Any]] = None
    bad: Optional[int] = None  #: how many elements are further off than they may be,
    where: str = ""  #: and what these share: "head 3, sequence 0, tokens 0 to 63"


class Rank(NamedTuple):
    """What one rank reported."""

    rank: int
    ok: bool
    error: str  #: empty when it is ok
    gpu_ms: Mapping[str, float]  #: by stage
    extra: Mapping[str, Any]  #: what the case reported beside these; of a function in Python "value" is what it returned
    traceback: str = ""  #: of a case in Python that failed on this rank
    output: str = ""  #: the end of what this rank has written, of a case in Python


class Failure(NamedTuple):
    """Why a case did not pass, for programs. The kinds are listed in protocol/README.md."""

    kind: str  #: "mismatch", "timeout", "out_of_memory", ...
    rank: Optional[int]
    stage: Optional[str]
    detail: str
    node: Optional[str] = None  #: of the rank, where ranks are on several machines


class LostAttempt(NamedTuple):
    """A daemon that was asked before the last one. It died or broke the protocol."""

    kind: str  #: "died" or "protocol"
    error: str  #: for people: how it ended, with all that is known of a crash
    crash: Optional[Mapping[str, Any]]  #: as PoolError has it
    stderr_tail: str  #: at most 4000 characters

    @classmethod
    def all_of(cls, json: Mapping[str, Any]) -> "list[LostAttempt]":
        return [cls(lost["kind"], lost["error"], lost.get("crash"), lost["stderr_tail"]) for lost in json.get("lost", ())]


def attempts(flaky: str, lost: Sequence[LostAttempt]) -> list[str]:
    """That a request is flaky, and how the daemons before the last one ended, as lines."""
    return [flaky, *(f"attempt {number}: {attempt.error}" for number, attempt in enumerate(lost, 1))] if flaky else []


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _check(json: Mapping[str, Any]) -> Check:
    ratio = json.get("ratio")
    return Check(json["tensor"], json["against"], json["rank"], _number(json.get("max_abs_err")), _number(json.get("rel_err")),
                 _number(json.get("tolerance")), json["ok"], None if ratio is None else float(ratio), json.get("worst"), json.get("bad"), json.get("where", ""))


_LOCATED = ["worst at", "got", "wanted", "bad", "where"]


def _located(check: Check) -> list[str]:
    """The columns of a table on where it does not hold."""
    worst = check.worst or {}
    index = worst.get("index", "")
    place = ", ".join(f"{name} {value}" for name, value in index.items()) if isinstance(index, dict) else str(index)
    return [place, *(_short(_number(worst[name])) if worst else "" for name in ("got", "wanted")), "" if check.bad is None else str(check.bad), check.where]


def _rank(json: Mapping[str, Any]) -> Rank:
    extra = {key: value for key, value in json.items() if key not in ("rank", "ok", "error", "gpu_ms", "traceback", "output")}
    return Rank(json["rank"], json["ok"], json.get("error") or "", json.get("gpu_ms") or {}, extra, json.get("traceback", ""), json.get("output", ""))


def _short(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.4g}"


class Result:
    """A daemon's answer, whatever its outcome. In a notebook it shows itself as tables of its checks and stages."""

    def __init__(self, json: dict[str, Any], attempts: int = 1, command: Callable[[], str] = lambda: "", *, flaky: str = "",
                 lost: Sequence[LostAttempt] = ()):
        self.json = json  #: the whole answer
        self.attempts = attempts  #: daemons that were asked, this one included
        self.flaky = flaky  #: "flaky (passed at attempt 2)" when daemons were lost before this one: it ended differently in two; else ""
        self.lost = list(lost)  #: these daemons, in order
        self._command = command

    @property
    def status(self) -> str:
        """"passed", "failed" (a check does not hold), "skipped" or "error"."""
        return str(self.json.get("status", "passed" if self.json.get("ok") else "error"))

    @property
    def ok(self) -> bool:
        return self.status == "passed"

    @property
    def error(self) -> str:
        """For people; empty when passed."""
        return self.json.get("error") or ""

    @property
    def failure(self) -> Optional[Failure]:
        """Present when not passed."""
        failure = self.json.get("failure")
        if failure is None:
            return None
        return Failure(failure["kind"], failure.get("rank"), failure.get("stage"), failure.get("detail") or "", failure.get("node"))

    @property
    def fatal(self) -> bool:
        """The daemon ended with this answer; the next call starts another."""
        return bool(self.json.get("fatal", False))

    @property
    def ranks(self) -> list[Rank]:
        return [_rank(rank) for rank in self.json.get("ranks", ())]

    @property
    def checks(self) -> list[Check]:
        return [_check(check) for check in self.json.get("checks", ())]

    @property
    def warnings(self) -> list[str]:
        """What the daemon remarks on a case, whatever its status: that nothing was compared, that a file was not written, ..."""
        return list(self.json.get("warnings", ()))

    @property
    def leaks(self) -> dict[str, int]:
        """What the case has left behind in the daemon: "allocations", "device_bytes", "host_bytes", "threads", "fds" and "processes", as far as above 0."""
        return dict(self.json.get("leaks", {}))

    @property
    def replaced(self) -> str:
        """Why fresh ranks have taken the place of those that ran this case in Python; empty: they have not."""
        return str(self.json.get("replaced", ""))

    @property
    def differed(self) -> dict[str, list[str]]:
        """State that a case in Python has changed and that has been put back: names by group."""
        return dict(self.json.get("differed", {}))

    @property
    def left(self) -> dict[str, list[str]]:
        """Likewise what could not be put back."""
        return dict(self.json.get("left", {}))

    @property
    def tflops(self) -> dict[str, float]:
        """TFLOP/s per GPU, by stage."""
        return dict(self.json.get("tflops", {}))

    @property
    def wall_ms(self) -> float:
        return float(self.json.get("wall_ms", 0.0))

    @property
    def seed(self) -> Optional[int]:
        return self.json.get("seed")

    @property
    def command(self) -> str:
        """The shell command that does the same again."""
        return self._command()

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: what makes the command stays here, its text goes along."""
        return _unpickled, (self.json, self.attempts, self.command, self.flaky, self.lost)

    @property
    def stages(self) -> dict[str, list[Optional[float]]]:
        """Milliseconds of each rank by stage, in the order of `ranks`; None where a rank did not reach the stage."""
        ranks = self.ranks
        names = dict.fromkeys(stage for rank in ranks for stage in rank.gpu_ms)
        return {name: [rank.gpu_ms.get(name) for rank in ranks] for name in names}

    def describe(self) -> str:
        """Status, error, lost attempts, warnings, the checks that do not hold, the times of the stages if it passed, the ranks that failed
        and the command that repeats it, as text."""
        lost = [{"kind": attempt.kind, "error": attempt.error} for attempt in self.lost]
        result = {"answer": self.json, "flaky": self.flaky, "lost": lost, "command": self.command}
        return str(call("cppool_client_describe", text_of(result, "the result"))["text"])

    def __repr__(self) -> str:
        return f"<cppool.Result {self.status} in {self.wall_ms:.1f} ms{': ' + self.error if self.error else ''}{', ' + self.flaky if self.flaky else ''}>"

    def _stage_rows(self) -> list[list[str]]:
        rates = self.tflops
        return [["stage", *(f"rank {rank.rank} (ms)" for rank in self.ranks), "TFLOP/s per GPU"],
                *([name, *map(_short, times), _short(rates.get(name))] for name, times in self.stages.items())]

    def _repr_html_(self) -> str:
        from html import escape as text

        parts = [f"<p><b>{text(self.status)}</b> in {self.wall_ms:.1f} ms {text(self.error)}</p>"]
        parts += [f"<p>{text(self.flaky)}</p>"] if self.flaky else []
        parts += [f"<p>warning: {text(warning)}</p>" for warning in self.warnings]

        def table(header: list[str], rows: list[list[str]]) -> None:
            head = "".join(f"<th>{text(cell)}</th>" for cell in header)
            body = "".join("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
            parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

        if self.checks:
            located = _LOCATED if any(c.worst or c.bad is not None for c in self.checks) else []
            table(["tensor", "against", "rank", "max_abs_err", "rel_err", "tolerance", "ratio", "ok", *located],
                  [[c.tensor, c.against, str(c.rank), _short(c.max_abs_err), _short(c.rel_err), _short(c.tolerance), _short(c.ratio),
                    "yes" if c.ok else "NO", *(_located(c) if located else [])] for c in self.checks])
        if self.stages:
            header, *rows = self._stage_rows()
            table(header, rows)
        if not self.ok and self.command:
            parts.append(f"<pre>{text(self.command)}</pre>")
        return "".join(parts)


def _unpickled(json: dict[str, Any], attempts: int, command: str, flaky: str, lost: list[LostAttempt]) -> Result:
    return Result(json, attempts, lambda: command, flaky=flaky, lost=lost)
