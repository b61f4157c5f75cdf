"""The pytest plugin: the fixture `cppool`, the marker `cppool`, `--cppool-attach`, `--cppool-launch`, `--cppool-require` and `--cppool-retries`.
client/python/README.md explains them."""
from __future__ import annotations

import os
import re
import subprocess
from typing import Any, Iterator, Mapping, NamedTuple, Optional, Sequence, Union

import pytest

from . import __all__ as cppool_names
from ._pool import Pool, PoolError, Pools
from ._pytest_ranks import RanksPlugin, as_rank_0, parametrize
from ._result import Result, attempts
from ._suite import Cell


__tracebackhide__ = True  # as in _library.py


_FIXTURE: "pytest.StashKey[CppoolFixture]" = pytest.StashKey()  # from its first use on
_ITEM: "pytest.StashKey[pytest.Item]" = pytest.StashKey()  # the test that runs, from the setup of its fixtures to their end
_RUNS: "pytest.StashKey[int]" = pytest.StashKey()  # cases of a test so far
_FLAKY = "cppool flaky"  # the section of a report; workers of pytest-xdist send reports, too


class Requirement(NamedTuple):
    """A backend and a number of devices: "cuda:2", "cuda" (one), "host"."""

    backend: str
    devices: int

    def __str__(self) -> str:
        return f"{self.backend}:{self.devices}" if self.backend == "cuda" else self.backend

    def missing(self, hello: Mapping[str, Any]) -> str:
        """What a world lacks; empty: nothing."""
        size = hello["world_size"]
        if hello["backend"] != self.backend:
            return f"{self} is required, and the daemon of world size {size} runs on the backend {hello['backend']}"
        there, needed = len(_devices(hello)), min(size, self.devices)
        if self.backend == "cuda" and there < needed:
            return f"{self} is required, and the {size} ranks run on {there} GPU{'s' if there > 1 else ''}"
        return ""


def _requirement(text: str, where: str) -> Requirement:
    backend, colon, count = text.partition(":")
    if backend not in ("cuda", "host") or (colon and (backend == "host" or not count.isdecimal() or int(count) < 1)):
        raise pytest.UsageError(f"{where} is cuda, cuda:N (at least N GPUs) or host, not {text!r}")
    return Requirement(backend, int(count) if count else 1)


def _devices(hello: Mapping[str, Any]) -> set[str]:
    return {device.get("uuid") or str(device.get("ordinal")) for device in hello["devices"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cppool")
    group.addoption(
        "--cppool-attach", metavar="SOCKET",
        help="uses the daemons of a server, `cppool serve`, which stay: default, or the path of its socket; $CPPOOL_ATTACH without it")
    group.addoption(
        "--cppool-launch", metavar="WORDS",
        help="ranks, of the fixture cppool and of Python, are on several machines, in agents that this launcher starts: srun -N 2 --ntasks-per-node=1")
    group.addoption(
        "--cppool-ranks", metavar="N", type=int,
        help="runs each test with its fixtures on N warm Python ranks, as suites for `torchrun -m pytest` want it; cppool.ranks marks single tests")
    group.addoption(
        "--cppool-deadline", metavar="SECONDS", type=float, default=90.0,
        help="the limit of each test on ranks whose mark has none")
    parser.addini("cppool_preload", "modules that Python has imported before it forks the ranks of cppool.ranks and --cppool-ranks", "args")
    group.addoption(
        "--cppool-retries", metavar="N", type=int,
        help="asks again, up to N times, when the daemon of a case died; a test with a flaky case that then passes does not fail. Without it "
             "a case is asked once more, unless the fixture cppool_options says otherwise, and a test with a flaky one fails")
    group.addoption(
        "--cppool-require", metavar="BACKEND[:GPUS]",
        help="cuda:2: a test that this machine should have the GPUs for, up to two, is an error where it would be skipped, or would run "
             "on another backend or on fewer GPUs")


@pytest.hookimpl(hookwrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    with as_rank_0(early_config.known_args_namespace.cppool_ranks):
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "cppool(world_size=N, require='cuda:2', deadline=SECONDS): the world size of this test's cases, whose daemon starts in "
                   "its setup; what it needs, without which it is skipped; the limit of each case")
    config.addinivalue_line("markers", "cppool_ranks(N, ..., deadline=SECONDS, fresh=False, own_group=False, env={}, seed=0): "
                                       "cppool.ranks: the test runs with its fixtures on every rank of N warm Python processes")
    everywhere = config.getoption("--cppool-ranks")
    if everywhere is not None and not 1 <= everywhere <= 64:
        raise pytest.UsageError("--cppool-ranks is a world size from 1 to 64")
    if not 0.001 <= config.getoption("--cppool-deadline") <= 86400:
        raise pytest.UsageError("--cppool-deadline is a number of seconds from 0.001 to 86400")
    config.pluginmanager.register(RanksPlugin(config, lambda: {**_where(config), **_environment_of_this_worker()}), "cppool-ranks")
    if config.getoption("--cppool-require") is not None:
        _requirement(config.getoption("--cppool-require"), "--cppool-require")
    if (config.getoption("--cppool-retries") or 0) < 0:
        raise pytest.UsageError("--cppool-retries is 0 or more")


pytest_generate_tests = parametrize


def _where(config: pytest.Config) -> dict[str, Any]:
    """The options that say where the ranks are."""
    attach, launch = config.getoption("--cppool-attach"), config.getoption("--cppool-launch")
    where = {"attach": (attach if attach is not None else os.environ.get("CPPOOL_ATTACH")) or None}
    return where if launch is None else {**where, "launch": launch}


def pytest_make_parametrize_id(val: object) -> Optional[str]:
    # Without what -k, shells and lists of tests give a meaning: "flash-cp_1_0-bf16-bshd-p2p-W2".
    return re.sub("[ :]+", "-", val.name.replace("=", "")) if isinstance(val, Cell) else None


class _Pool(Pool):
    """Tells the fixture what it answers."""

    def __init__(self, fixture: "CppoolFixture", world_size: int, **options: Any):
        super().__init__(world_size, **options)
        self._fixture = fixture

    def _result(self, request: bytes) -> Result:
        self._fixture._started(self)
        try:
            result = super()._result(request)
        except PoolError as error:
            self._fixture._note_error(error)
            raise
        if request.startswith(b'{"op": "run"'):
            self._fixture._note(self, result)
        return result


class CppoolFixture(Pools):
    """What the fixture `cppool` gives: the Pools of the session, and `run` that judges a case for pytest."""

    def __init__(self, config: pytest.Config, required: Optional[Requirement], allow_flaky: bool, **options: Any):
        self._config = config
        self._required = required
        self._allow_flaky = allow_flaky
        self._flaky: list[Result] = []  # they will fail this test: it or its fixtures had them
        self._hello: dict[int, dict[str, Any]] = {}
        super().__init__(**options)

    def _make(self, world_size: int) -> Pool:
        return _Pool(self, world_size, **self._options)

    def __getattr__(self, name: str) -> Any:
        """In a test that has the fixture its name means this object, and not the module that its file has imported."""
        if name in cppool_names:
            raise AttributeError(f"the fixture cppool, which has no {name}, hides the module cppool in this test: write `from cppool import {name}`")
        raise AttributeError(f"the fixture cppool has no {name!r}")

    def run(self, params: Union[Mapping[str, Any], Cell, None] = None, *, world_size: Optional[int] = None, **options: Any) -> Result:
        """Runs a case and returns its Result when it passed. Skips the test when it was skipped, and fails it otherwise.

        The world size is that of the Cell, of the marker, or 2; the deadline that of the marker, or 90 s. The other options are those of
        Pool.run. `at(world_size).run(...)` returns every Result instead.
        """
        marked = self._marked()
        if world_size is None:
            world_size = params.world_size if isinstance(params, Cell) else marked.get("world_size", 2)
        if "deadline" in marked:
            options.setdefault("deadline", marked["deadline"])
        lost: Optional[PoolError] = None
        try:
            result = self.at(world_size).run(params, **options)
        except PoolError as error:
            lost = error
        if lost is not None:  # not in the handler: the report would begin with the error as it is
            lines = str(lost).split("\nthe end of its stderr:\n")[0]
            pytest.fail(f"{lost.kind}: {lines}\nrepeat: {lost.command}", pytrace=False)
        if result.status == "skipped" and not result.flaky:
            pytest.skip(result.error)
        if not result.ok or result in self._flaky:
            name = f"{params.name}: " if isinstance(params, Cell) else ""
            pytest.fail(name + result.describe(), pytrace=False)
        return result

    @property
    def _item(self) -> Optional[pytest.Item]:
        return self._config.stash.get(_ITEM, None)

    # The setup of a test: its worlds are started here, so that their start counts as setup.
    def _set_up(self, item: pytest.Item) -> None:
        marked = self._marked()
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        sizes = {value.world_size for value in values if isinstance(value, Cell)}
        if "world_size" in marked:
            sizes.add(marked["world_size"])
        elif "require" in marked and not sizes:
            sizes.add(2)
        wrong = ""
        try:
            needed = _requirement(marked["require"], "require of the marker cppool") if "require" in marked else None
            pools = [self.at(world_size) for world_size in sorted(sizes, key=str)]
        except (pytest.UsageError, ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            pytest.fail(wrong, pytrace=False)
        for pool in pools:
            self._started(pool)
            if needed:
                self._lacks(needed.missing(self._hello[pool.world_size]), needed)

    def _marked(self) -> Mapping[str, Any]:
        marker = self._item.get_closest_marker("cppool") if self._item else None
        if marker is None:
            return {}
        unknown = set(marker.kwargs) - {"world_size", "require", "deadline"}
        if unknown or marker.args:
            what = ", ".join(sorted(unknown)) or marker.args
            pytest.fail(f"the marker cppool takes world_size, require and deadline by name, not {what}", pytrace=False)
        return marker.kwargs

    def _judge(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Makes the report of a test, or of the end of its fixtures, a failure for flaky results that have not failed it."""
        flaky, self._flaky = self._flaky, []
        if not flaky or report.failed:
            return
        try:
            pytest.fail("\n".join(result.describe() for result in flaky), pytrace=False)
        except pytest.fail.Exception:
            report.longrepr = item.repr_failure(pytest.ExceptionInfo.from_current())
        report.outcome = "failed"
        if hasattr(report, "wasxfail"):
            del report.wasxfail

    def _lacks(self, what: str, needed: Requirement) -> None:
        """Skips for lack of hardware, where this machine need not have it."""
        if not what:
            return
        if self._required and self._required.backend == needed.backend and needed.devices <= self._required.devices:
            pytest.fail(f"--cppool-require {self._required}: {what}", pytrace=False)
        pytest.skip(what)

    def _started(self, pool: Pool) -> None:
        """Starts the pool's daemon, if this session has not; skips or fails the test where that is impossible."""
        if pool.world_size in self._hello:
            return
        lost: Optional[PoolError] = None
        try:
            hello = pool.hello()
        except PoolError as error:
            lost = error
        if lost is not None:
            why = lost.start_failure or {}
            if why.get("kind") == "unsupported" and why.get("devices", pool.world_size) < pool.world_size:
                self._lacks(f"world size {pool.world_size} needs as many GPUs, and there are {why['devices']}: {why.get('error', '')}",
                            Requirement("cuda", pool.world_size))
            self._note_error(lost)
            if self._item is None:
                raise lost
            pytest.fail(f"the daemon of world size {pool.world_size} does not start: {str(lost).splitlines()[0]}", pytrace=False)
        if self._required and self._required.missing(hello):
            pytest.fail(f"--cppool-require {self._required.missing(hello)}", pytrace=False)
        self._hello[pool.world_size] = hello

    def _section(self, title: str, text: str) -> None:
        if self._item is not None and text:
            self._item.add_report_section("call", title, text)

    def _note_error(self, error: PoolError) -> None:
        self._section("cppool diagnosis", error.diagnosis)
        self._section(_FLAKY, "\n".join(attempts(error.flaky, error.lost)))
        if error.crash is not None:
            where = [f"{key}: {error.crash[key]}" for key in ("rank", "stage", "case", "library") if error.crash.get(key) is not None]
            self._section("cppool crash", "\n".join([error.crash["error"], *where, *(f"  {frame}" for frame in error.crash["stack"])]))
        self._section("cppoold stderr", error.stderr_tail)
        self._properties({"status": error.kind, "attempts": error.attempts, "flaky": error.flaky, "command": error.command})

    def _note(self, pool: Pool, result: Result) -> None:
        hello = self._hello[pool.world_size]
        if self._item is not None:
            for warning in result.warnings:
                self._item.warn(pytest.PytestWarning(f"cppool: {warning}"))
        if result.flaky:
            self._section(_FLAKY, "\n".join(attempts(result.flaky, result.lost)))
            if not (self._allow_flaky and result.ok):
                self._flaky.append(result)
        ratios = [check.ratio for check in result.checks if check.ratio is not None]
        names = ", ".join(sorted({device["name"] for device in hello["devices"]}))
        self._properties({
            "status": result.status, "world_size": pool.world_size, "backend": hello["backend"], "transport": hello["transport"],
            "devices": names if hello["backend"] == "host" else f"{len(_devices(hello))} x {names}", "wall_ms": result.wall_ms, "seed": result.seed,
            "attempts": result.attempts, "flaky": result.flaky, "worst_ratio": max(ratios, default=None), "command": result.command,
            **{f"tflops.{stage}": rate for stage, rate in result.tflops.items()}})
        if result.status in ("failed", "error"):
            stacks = [f"rank {rank.rank}: {rank.error}\n  " + "\n  ".join(rank.extra["stack"]) for rank in result.ranks
                      if rank.extra.get("stack")]
            if stacks:
                self._section("cppool diagnosis", result.error + "\n" + "\n".join(stacks))
            self._section("cppoold stderr", pool.stderr_tail())

    def _properties(self, properties: Mapping[str, Any]) -> None:
        """For JUnit and other reports: "cppool.status", and "cppool.2.status" of a test's second case."""
        if self._item is None:
            return
        runs = self._item.stash[_RUNS] = self._item.stash.get(_RUNS, 0) + 1
        prefix = "cppool." if runs == 1 else f"cppool.{runs}."
        self._item.user_properties += [(prefix + name, value) for name, value in properties.items() if value not in (None, "")]


def _visible_devices() -> list[str]:
    """What CUDA sees on this machine, by a program of the driver: this process must not initialise it."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [device.strip() for device in listed.split(",") if device.strip() not in ("", "-1")]
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    mig = [line.rpartition("UUID: ")[2].rstrip(")") for line in lines if "UUID: MIG-" in line]
    return mig or [str(index) for index in range(sum(line.startswith("GPU ") for line in lines))]


def _share(devices: Sequence[str], worker: int, workers: int) -> list[str]:
    """The devices of one of so many workers: consecutive, and as many as of the others, give or take one."""
    return list(devices[worker * len(devices) // workers:(worker + 1) * len(devices) // workers])


def _of_this_worker(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the pools in this process: with pytest-xdist the workers share out the GPUs."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1 or options.get("backend") == "host":
        return dict(options)
    devices = [str(device) for device in options.get("devices") or _visible_devices()]
    if not devices:
        return dict(options)
    if len(devices) < workers:
        pytest.fail(f"-n {workers}: there are {workers} workers of pytest-xdist and {len(devices)} GPU{'s' if len(devices) > 1 else ''} "
                    f"({', '.join(devices)}), and each worker needs one for itself: run with -n {len(devices)}, or set "
                    "CUDA_VISIBLE_DEVICES= to run without GPUs", pytrace=False)
    return {**options, "devices": _share(devices, int(os.environ["PYTEST_XDIST_WORKER"].lstrip("gw")), workers)}


def _environment_of_this_worker() -> dict[str, Any]:
    """Likewise for Python ranks: by the environment, since the option `devices` asks for a backend on GPUs, and tests may need none."""
    devices = _of_this_worker({}).get("devices")
    return {"environment": {"CUDA_VISIBLE_DEVICES": ",".join(devices)}} if devices else {}


@pytest.fixture(scope="session")
def cppool_options() -> dict[str, Any]:
    """The options of the session's pools, as `cppool.Pools` takes them. Override it in conftest.py."""
    return {}


@pytest.fixture(scope="session")
def cppool(request: pytest.FixtureRequest, cppool_options: Mapping[str, Any]) -> Iterator[CppoolFixture]:
    """Warm pools of cppool by world size: `cppool.run(...)` for a case that must pass, `cppool.at(world_size)` for a Pool."""
    required, retries, attach = (request.config.getoption(option) for option in ("--cppool-require", "--cppool-retries", "--cppool-attach"))
    where = _where(request.config)
    options = {"retries": 1, **where, **_of_this_worker(cppool_options)}
    if attach is not None:
        options["attach"] = attach or None
    if retries is not None:
        options["retries"] = retries
    if "launch" in where:
        options["launch"] = where["launch"]
    fixture = CppoolFixture(request.config, _requirement(required, "--cppool-require") if required else None, bool(retries), **options)
    request.config.stash[_FIXTURE] = fixture
    with fixture:  # it stays in the stash: the last test is judged after its end
        yield fixture


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_ITEM] = item
    yield
    del item.config.stash[_ITEM]


@pytest.hookimpl(trylast=True)  # when the test has its fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    fixture = getattr(item, "funcargs", {}).get("cppool")
    if isinstance(fixture, CppoolFixture):
        fixture._set_up(item)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # after pytest has told skips and expected failures from failures
def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> Iterator[None]:
    report = (yield).get_result()
    fixture = item.config.stash.get(_FIXTURE, None)
    if fixture and not (call.when == "setup" and report.passed):  # what comes up in a setup that passes fails the test
        fixture._judge(item, report)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # Each report of a test has the sections of those before it.
    flaky = list(dict.fromkeys(
        (report.nodeid, text) for reports in terminalreporter.stats.values() for report in reports
        for title, text in getattr(report, "sections", ()) if title == f"Captured {_FLAKY} call"))
    if flaky:
        terminalreporter.section(f"cppool: {len(flaky)} flaky", yellow=True)
    for nodeid, text in flaky:
        terminalreporter.write_line(f"{nodeid}: {text}")
