"""Tests that run on every rank of a warm world of Python processes: `@cppool.ranks(2, 4)` and `pytest --cppool-ranks N`."""
from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import warnings
from typing import Any, Callable, Iterable, Iterator, Optional

import _pytest.config
import pytest

from ._pool import PoolError, Pools, caller
from ._result import Result

OPTIONS = ("deadline", "fresh", "own_group", "verdict", "env", "seed")  # of the marker
# Of pytest's own options: the others choose items, or are of this process.
CARRIED = ("runxfail", "tbstyle", "showlocals", "fulltrace", "verbose", "log_level", "log_format", "log_date_format", "log_auto_indent", "logger_disable",
           "setupshow", "setuponly", "setupplan")
SIZE = "cppool_world_size"  # the parameter that makes one test for each world size
NO_SIZE = ("cppool.ranks marks functions and methods of plain classes, where they are written, and not methods of unittest.TestCase or other "
           "items: make it a function, or run it with `pytest --cppool-ranks N` and without the mark")


def sizes_of(definition: Any) -> tuple[int, ...]:
    """The world sizes of the marker; empty: there is none. Throws pytest's UsageError."""
    marker = definition.get_closest_marker("cppool_ranks")
    if marker is None:
        return ()
    unknown = sorted(set(marker.kwargs) - set(OPTIONS))
    if unknown:
        raise pytest.UsageError(f"{definition.nodeid}: cppool.ranks takes world sizes and {', '.join(OPTIONS)}, not {', '.join(unknown)}")
    if not marker.args or any(isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 64 for size in marker.args):
        raise pytest.UsageError(f"{definition.nodeid}: cppool.ranks takes world sizes from 1 to 64, not {marker.args}")
    return marker.args


def parametrize(metafunc: pytest.Metafunc) -> None:
    """As the ranks do, so that both know a test by the same name."""
    sizes = sizes_of(metafunc.definition)
    if sizes:
        metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, sizes, ids=[f"W{size}" for size in sizes])


def options_of(config: pytest.Config) -> list[str]:
    """The arguments that give the ranks' pytest the plugins and options of this one, wherever they were set."""
    own = vars(_pytest.config.get_config()._parser.parse_known_args([]))
    values = {}
    for name, value in vars(config.option).items():
        if name in CARRIED or (name not in own and not name.startswith("cppool")):
            try:
                values[name] = json.loads(json.dumps(value))
            except (TypeError, ValueError):  # nothing that a command line gave
                pass
    plugins = [name for name in config.option.plugins if not name.startswith(("cppool", "no:cppool", "no:terminal", "no:capture"))]
    return ["-o", "addopts=", *(each for name in plugins for each in ("-p", name)), *(each for pair in config.option.override_ini or [] for each in ("-o", pair)),
            *(each for text in config.option.pythonwarnings or [] for each in ("-W", text)), f"--cppool-options={json.dumps(values, sort_keys=True)}"]


def _show(line: str) -> None:
    """A line of the daemon's stderr, on another thread."""
    if line.startswith("[rank "):
        print(line)


@contextlib.contextmanager
def as_rank_0(size: Optional[int]) -> Iterator[None]:
    """Of how many ranks the items are, for conftest files and modules that choose tests by it, as under `torchrun -m pytest`. None: no change."""
    values = {} if size is None else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) != values[name]:
                continue  # what the suite has set itself stays
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def nothing() -> None:
    """A case, for which ranks end their session of pytest."""


class RanksPlugin:
    """Runs the items that are for ranks in place of pytest, and hands it their reports."""

    def __init__(self, config: pytest.Config, options: Callable[[], dict[str, Any]]):
        """options: of the pools, when the first item needs them; fails the item where it has none."""
        self._config = config
        self._everywhere: Optional[int] = config.getoption("--cppool-ranks")
        self._options = options
        self._pools: Optional[Pools] = None  # from the first item on
        self._arguments: list[str] = []
        self._next: dict[pytest.Item, Optional[str]] = {}  # the item after it on the same ranks
        self._open: set[int] = set()  # worlds whose fixtures wait for an item
        self._live = config.getoption("capture", "no") == "no"  # -s: what ranks write is shown as it comes
        self._interrupted = False

    def _size(self, item: Any) -> Optional[int]:
        """None: the item runs in this process, or has the mark and cannot run."""
        if item.get_closest_marker("cppool_ranks"):
            return item.callspec.params.get(SIZE) if hasattr(item, "callspec") else None
        return self._everywhere if isinstance(item, pytest.Function) else None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with as_rank_0(self._everywhere):
            yield

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        files = dict.fromkeys(str(item.path) for item in session.items if self._size(item))
        later: dict[Optional[int], str] = {}
        for item in reversed(session.items):
            self._next[item] = later.get(self._size(item))
            later[self._size(item)] = item.nodeid
        config = self._config
        folders = getattr(config, "_tmp_path_factory", None) if files and not config.option.collectonly else None
        self._arguments = [*files, f"--rootdir={config.rootpath}", *(["-c", str(config.inipath)] if config.inipath else []),
                           f"--import-mode={config.getoption('importmode')}", *options_of(config),
                           *([f"--cppool-tmp={folders.getbasetemp()}"] if folders else []),
                           *([f"--cppool-cache={config.cache._cachedir}"] if getattr(config, "cache", None) else [])]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: Optional[pytest.Item]) -> Optional[bool]:
        size, marker = self._size(item), item.get_closest_marker("cppool_ranks")
        if size is None and marker is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            for report in [self._failed(item, f"{item.nodeid}: {NO_SIZE}")] if size is None else self._run(item, nextitem, size, marker):
                item.ihook.pytest_runtest_logreport(report=report)
        finally:
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: Optional[pytest.Item], size: int, marker: Optional[pytest.Mark]) -> Iterable[pytest.TestReport]:
        options = {"deadline": self._config.getoption("--cppool-deadline"), **(marker.kwargs if marker else {})}
        following = self._next.get(item)
        if hasattr(self._config, "workerinput"):  # of pytest-xdist, which gives a worker one item after the other
            following = nextitem.nodeid if nextitem is not None and self._size(nextitem) == size else None
        case = {"pytest": self._arguments, "nodeid": item.nodeid, "next": following,
                "roots": [str(self._config.rootpath)], **caller(), "cwd": str(self._config.invocation_params.dir),
                **{name: options.pop(name) for name in ("env", "seed") if name in options}}
        try:
            self._pools = self._pools or Pools(python=True, preload=self._config.getini("cppool_preload"),
                                               on_stderr=_show if self._live else None, **self._options())
            pool = self._pools.at(size)
            result = pool.run_python(case, **options)
            if self._live:
                pool.stderr_tail()  # all that was written has been shown then
            (self._open.add if following else self._open.discard)(size)
        except PoolError as error:
            self._open.discard(size)
            return [self._failed(item, f"{error.kind}: {error}")]
        except pytest.fail.Exception as error:
            return [self._failed(item, str(error))]
        except (ValueError, TypeError) as error:  # of an option
            what = f"cppool.ranks with {', '.join(marker.kwargs)}" if marker and marker.kwargs else "the ranks"
            return [self._failed(item, f"{item.nodeid}: {what}: {error}")]
        return self._reports(item, result)

    def _reports(self, item: pytest.Item, result: Result) -> Iterator[pytest.TestReport]:
        """Raises the pytest.exit of a rank, after the reports of a failure."""
        culprit = result.failure.rank if result.failure and result.failure.rank is not None else 0
        ranks = sorted(result.ranks, key=lambda rank: rank.rank != culprit)
        # A copy: pytest makes objects of what is in it, and the Result is JSON.
        of_pytest = {rank.rank: copy.deepcopy(rank.extra["pytest"]) for rank in ranks if "pytest" in rank.extra}
        for key, text in of_pytest.get(0, {}).get("cache", {}).items():
            self._never_an_error(item, self._config.cache.set, key, json.loads(text))
        self._warn(item, [warning for each in of_pytest.values() for warning in each["warnings"]])
        for warning in result.warnings:
            self._never_an_error(item, item.warn, pytest.PytestWarning(f"cppool: {warning}"))
        exits = [pytest.exit.Exception(*end["exit"]) for end in of_pytest.values() if "exit" in end]
        if exits and result.status not in ("failed", "error"):
            raise exits[0]
        for end in of_pytest.values():
            for name in {"shouldstop", "shouldfail"} & set(end):
                setattr(item.session, name, end[name])
        reported = [of_pytest[rank.rank]["reports"] if rank.rank in of_pytest else [] for rank in ranks]
        # A rank that failed as expected says more than one that skipped or passed; a strict success that no rank's failure excuses than a plain one.
        outcome = {"skipped": ("skipped", True), "passed": ("failed", False)}.get(result.status)
        of_rank = next((each for each in reported if any((data["outcome"], "wasxfail" in data) == outcome for data in each)), reported[0] if reported else [])
        reports = [self._config.hook.pytest_report_from_serializable(config=self._config, data=data) for data in of_rank]
        for report in reports:
            if isinstance(report.longrepr, list):  # a tuple, before it was JSON
                report.longrepr = tuple(report.longrepr)
            report.sections += [(f"{title} of rank {rank}", text) for rank, each in of_pytest.items() if each["reports"] is not of_rank
                                for data in each["reports"] if data["when"] == report.when for title, text in data["sections"] if title.startswith("Captured log")]
        told = any(report.failed for report in reports)
        if result.status == "passed" and reports or result.status == "skipped" and any(report.skipped for report in reports):
            pass
        elif result.status == "skipped":
            reports = [self._skipped(item, result)]
        elif not told or (result.failure and result.failure.kind == "polluted"):
            reports = [report for report in reports if not report.failed][:1] + [self._failed(item, result.describe().partition("\nrepeat: ")[0])]
        for report in reports:
            self._explain(report, result)
        for report in reports[:1]:
            report.user_properties += [("cppool.world_size", len(result.ranks)), ("cppool.wall_ms", result.wall_ms)]
        yield from reports
        if exits:
            raise exits[0]

    def _warn(self, item: pytest.Item, recorded: list[dict[str, Any]]) -> None:
        """Has warnings of the ranks in the summary, each distinct one once."""
        for each in {json.dumps(warning): warning for warning in recorded}.values():
            text, category = each["message"], getattr(sys.modules.get(each["module"]), each["category"], None)
            if not (isinstance(category, type) and issubclass(category, Warning)):  # of a module that only ranks have
                text, category = f"{each['category']}: {text}", Warning
            self._record(item, text, category, each["filename"], each["lineno"], each["line"])

    def _never_an_error(self, item: pytest.Item, warn: Callable[..., None], *arguments: Any) -> None:
        """Calls `warn`. With -W error, which is for what tests do, its warning is recorded."""
        try:
            warn(*arguments)
        except pytest.PytestWarning as warning:
            self._record(item, str(warning), type(warning), str(item.path), (item.location[1] or 0) + 1)

    def _record(self, item: pytest.Item, text: str, category: type[Warning], filename: str, line_number: int, line: Optional[str] = None) -> None:
        item.ihook.pytest_warning_recorded.call_historic(kwargs={
            "warning_message": warnings.WarningMessage(text, category, filename, line_number, line=line),
            "nodeid": item.nodeid, "when": "runtest", "location": None})

    def _explain(self, report: pytest.TestReport, result: Result) -> None:
        """Adds what the other ranks did, and what was written; under titles that begin as pytest's own do, by which JUnit reports find it."""
        if report.failed:
            culprit = result.failure.rank if result.failure else None
            title = f"cppool: {len(result.ranks)} ranks" if culprit is None else f"cppool: rank {culprit} of {len(result.ranks)} failed first"
            report.sections.append((title, "\n".join(f"rank {rank.rank}: {rank.error}" for rank in result.ranks if rank.error)))
        if not self._live:
            report.sections += [(f"Captured stdout of rank {rank.rank}", rank.output) for rank in result.ranks if rank.output]
        if report.failed and result.replaced:
            report.sections.append(("cppool: ranks replaced", result.replaced))

    def _failed(self, item: pytest.Item, text: str) -> pytest.TestReport:
        return pytest.TestReport(item.nodeid, item.location, {name: 1 for name in item.keywords}, "failed", text, "call")

    def _skipped(self, item: pytest.Item, result: Result) -> pytest.TestReport:
        where = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {result.error}")
        report = pytest.TestReport(item.nodeid, item.location, {name: 1 for name in item.keywords}, "skipped", where, "setup")
        if result.failure and result.failure.detail.startswith("expected failure: "):  # of a rank that has not come to its report
            report.wasxfail = result.error
        return report

    def pytest_keyboard_interrupt(self, excinfo: "pytest.ExceptionInfo[BaseException]") -> None:
        self._interrupted = excinfo.type is KeyboardInterrupt  # and not pytest.exit or session.shouldstop

    def pytest_sessionfinish(self) -> None:
        """Has fixtures ended whose next item has not come, as with -x."""
        for size in self._open if self._pools and not self._interrupted else ():
            with contextlib.suppress(PoolError):
                self._pools.at(size).run_python({"function": f"{os.path.abspath(__file__)}:nothing", **caller()})

    def pytest_unconfigure(self) -> None:
        if self._pools:
            self._pools.stop()
