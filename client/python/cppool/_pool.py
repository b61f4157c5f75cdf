"""Warm pools: one daemon per world size."""
from __future__ import annotations

import contextlib
import os
import sys
import threading
import unittest
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence, Union

from ._library import Handle, NoAnswer, entries, is_text, text_of
from ._library import call as call_library
from ._result import LostAttempt, Result
from ._suite import Cell

__tracebackhide__ = True  # as in _library.py

_Path = Union[str, "os.PathLike[str]"]
# Variables that ranks have of their own, and the one that pytest changes at every test.
_OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
             "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
             "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTEST_CURRENT_TEST"}


class PoolError(RuntimeError):
    """There is no answer. Its text ends with the last lines of the daemon's stderr."""

    def __init__(self, text: str, *, kind: str = "", stderr_tail: str = "", diagnosis: str = "", attempts: int = 1,
                 start_failure: Optional[Mapping[str, Any]] = None, crash: Optional[Mapping[str, Any]] = None, command: str = "",
                 flaky: str = "", lost: Sequence[LostAttempt] = ()):
        super().__init__(text)
        self.kind = kind  #: "start", "died", "timeout", "protocol", "interrupted" or "queue"
        self.stderr_tail = stderr_tail  #: at most 4000 characters
        self.diagnosis = diagnosis  #: what the system knew of the threads of a daemon that did not answer, or where interrupted ranks were
        self.attempts = attempts  #: daemons that were asked
        self.start_failure = start_failure  #: why the daemon did not start, where it said so: protocol/README.md
        self.crash = crash  #: where a case or a library ended the daemon: "library", "rank", "stage", "stack", ..., or None
        self.command = command  #: the shell command that does the same again; empty when there was no case
        self.flaky = flaky  #: "flaky (timeout at attempt 2)" when the request ended differently in two daemons; else ""
        self.lost = list(lost)  #: how the daemons before the last one ended, in order


class CompileError(ValueError):
    """A source does not compile, or there is no compiler. Its text has the compiler's messages."""


class CaseFailed(AssertionError):
    """A case that `call` has run did not pass. Its text is the Result's `describe()`."""

    def __init__(self, result: Result):
        super().__init__(result.describe())
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return CaseFailed, (self.result,)


def python_case(target: str, kwargs: Optional[Mapping[str, Any]] = None, argv: Sequence[str] = (), env: Optional[Mapping[str, Optional[str]]] = None,
                seed: int = 0) -> dict[str, Any]:
    """The member `python` of a request, with the caller's folder and sys.path. target: "file.py:function", or "script.py"."""
    file, colon, name = target.rpartition(":")
    script = not colon or os.sep in name or name.endswith(".py")  # the path may have colons, too
    if script and kwargs is not None or argv and not script:
        raise ValueError(f"{target!r} is a {'script, which takes argv (a function of it is FILE.py:NAME)' if script else 'function, which takes kwargs'}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a mapping of names to arguments, not {kwargs!r}")
    case: dict[str, Any] = {"script": os.path.abspath(target), "argv": entries(argv, "argv")} if script else \
        {"function": f"{os.path.abspath(file)}:{name}", "kwargs": dict(kwargs or {})}
    return {**case, **caller(), **({"env": dict(env)} if env else {}), **({"seed": seed} if seed else {})}


def caller() -> dict[str, Any]:
    """This process's folder and sys.path, as members of `python`, without entries that a request cannot have."""
    path = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    return {"path": [folder for folder in path if is_text(folder)], "cwd": os.getcwd()}


class _Environment:
    """What has changed of this process's environment since the pool was made, also for a while: a daemon has what was there when it started."""

    def __init__(self, without: Iterable[str]):
        self._without = _OF_RANKS.union(without)
        self._seen, self._names = dict(self._variables()), set[bytes]()
        self._changes: dict[str, Optional[str]] = {}

    @staticmethod
    def _variables() -> dict[bytes, bytes]:
        # os.environ itself decodes them all, which takes as long as a case. A test may have put a dict into its place.
        return getattr(os.environ, "_data", None) or {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}

    def changes(self) -> dict[str, Optional[str]]:
        """As the member `env` of `python`; None: it is not there any more."""
        if self._variables() != self._seen:
            now = dict(self._variables())
            self._names = self._names.union(name for name, _ in now.items() ^ self._seen.items())  # a new one: another thread may read the old one
            known = {os.fsdecode(name): os.fsdecode(now[name]) if name in now else None for name in self._names}
            self._seen, self._changes = now, {name: value for name, value in known.items() if name not in self._without and is_text(name + (value or ""))}
        return self._changes


def _libraries(kernels: Optional[_Path], load: Sequence[_Path]) -> dict[str, tuple[Any, Any]]:
    """Both as members of a request, each with its default."""
    return {"kernels": (kernels if kernels is None else os.fspath(kernels), None), "load": ([os.fspath(file) for file in entries(load, "load")], [])}


def _milliseconds(seconds: float, what: str, least: float = 0) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not least <= seconds <= 86400:
        raise ValueError(f"{what} is a number of seconds from {least} to 86400, not {seconds!r}")
    return round(seconds * 1000)


class Pool:
    """One daemon, started by the first call that needs it and again by the first call after it has ended. Calls of several threads take
    turns, without the interpreter's lock. In a forked child a Pool starts a daemon of its own. Ctrl-C ends a call: KeyboardInterrupt. The
    daemon is asked to cancel it first, and killed when it does not answer within 1.5 s.

    CUDA is never loaded or called in this process. Limits are in seconds; client/README.md says what each one bounds.
    """

    def __init__(self, world_size: int = 2, *, daemon: Optional[_Path] = None, backend: str = "auto", transport: str = "auto",
                 devices: Sequence[Union[int, str]] = (), case_files: Sequence[_Path] = (), log_level: Optional[str] = None,
                 arguments: Sequence[str] = (), environment: Optional[Mapping[str, str]] = None, start_limit: float = 60.0,
                 grace: float = 2.0, kill_grace: float = 5.0, idle_exit: float = 0.0, retries: int = 0,
                 python: Union[_Path, bool, None] = None, preload: Sequence[str] = (), launch: Optional[str] = None,
                 attach: Optional[_Path] = None, queue_limit: float = 600.0,
                 on_stderr: Optional[Callable[[str], None]] = None, log: Optional[Callable[[str], None]] = None):
        """Starts nothing. Throws ValueError for options out of range, TypeError for lists that are none.

        world_size: number of ranks.
        daemon: path of `cppoold`; None: $CPPOOL_DAEMON, else the one of this package.
        backend: "auto", "cuda" or "host"; transport: "auto", "nccl" or "peer" (with which ranks may share a GPU).
        devices: indices or UUIDs: the daemon's CUDA_VISIBLE_DEVICES. Empty: the caller's value.
        case_files: shared libraries with further cases (cppool/case.h).
        python: ranks are processes of this Python, for `call`: a path; True: the one that runs this. None: ranks are threads.
        preload: modules that it has imported before it forks the ranks: "torch".
        launch: ranks are on several machines, in agents that this launcher starts: "srun -N 2 --ntasks-per-node=1". None: this machine.
        arguments, environment: further ones of the daemon.
        idle_exit: the daemon ends after so long without a request; 0: never.
        attach: use the daemon of a server, `cppool serve`: "default", or the path of its socket; queue_limit: how long to wait there for
        other clients.
        retries: how often a case is asked again when its daemon died or broke the protocol; a Result that came so is `flaky`.
        on_stderr: gets every line of the daemon's stderr, on another thread; log: other lines of its stdout, respawns.
        """
        options: dict[str, Any] = {
            "world_size": world_size, "backend": backend, "transport": transport, "retries": retries,
            "devices": [str(device) for device in entries(devices, "devices")],
            "case_files": [os.path.abspath(file) for file in entries(case_files, "case_files")], "arguments": entries(arguments, "arguments"),
            "environment": dict(environment or {}),
            "start_limit_ms": _milliseconds(start_limit, "start_limit"), "grace_ms": _milliseconds(grace, "grace"),
            "kill_grace_ms": _milliseconds(kill_grace, "kill_grace"), "idle_exit_ms": _milliseconds(idle_exit, "idle_exit"),
            "queue_limit_ms": _milliseconds(queue_limit, "queue_limit")}
        if python == "":
            raise ValueError("python is the path of an interpreter, True for the one that runs this, or None for ranks that are threads, not ''")
        if preload and not python:
            raise ValueError("preload is for ranks that are processes: give python=True, or its path, too")
        if python:
            options.update(python=sys.executable if python is True else os.fspath(python), preload=entries(preload, "preload"))
        if launch is not None:
            options["launch"] = launch
        if attach is not None:
            options["attach"] = os.fspath(attach)
        if daemon is not None:
            options["daemon"] = os.fspath(daemon)
        if log_level is not None:
            options["log_level"] = log_level
        self.world_size = world_size
        self._options = text_of(options, "the options of a Pool")
        self._environment = _Environment(options["environment"])
        self._handle = Handle(self._options, on_stderr, log)

    def run(self, params: Union[Mapping[str, Any], Cell, None] = None, *, case: Optional[str] = None,
            kwargs: Optional[Mapping[str, str]] = None, deadline: float = 90.0, warmup: int = 0, repeat: int = 1, checks: bool = True,
            perturb: Optional[int] = None, dump: Optional[_Path] = None, inputs: Optional[_Path] = None,
            trace: Optional[_Path] = None, kernels: Optional[_Path] = None, load: Sequence[_Path] = (),
            fault: Optional[Mapping[str, Any]] = None, **more: Any) -> Result:
        """Runs one case and returns the daemon's answer, whatever it is.

        params: the case's parameters, or a Cell. kwargs: in place of them, strings as Transformer Engine's test worker takes them.
        case: its name; default "attention". deadline: for the case, in seconds. warmup, repeat: untimed and timed iterations.
        perturb: seed of random delays. dump: folder for the tensors (`load_dump` reads it); inputs: folder to read them from.
        trace: file for a timeline of the run, which ui.perfetto.dev opens.
        kernels: whose attention kernels: "cppool", "cudnn", or a library with kernels of cppool/attention.h: its path, or "path,name".
        load: libraries with cases for this call. `compile` makes both kinds of libraries of sources.
        fault: {"kind", "rank", "stage", "count"}, for tests of a daemon with `arguments=["--allow-faults"]`.
        more: other members of the protocol's `run`, as protocol/README.md has them.

        Throws PoolError when there is no answer, ValueError or TypeError for arguments out of range and for values that JSON cannot
        express.
        """
        return self._result(self._request("run", params, case, kwargs, deadline, dump, inputs, trace, {
            **_libraries(kernels, load), "warmup": (warmup, 0), "repeat": (repeat, 1), "checks": (checks, True), "perturb": (perturb, None), "fault": (fault, None),
            **{key: (value, None) for key, value in more.items()}}))

    def call(self, target: str, kwargs: Optional[Mapping[str, Any]] = None, *, argv: Sequence[str] = (), deadline: float = 90.0,
             warmup: int = 0, repeat: int = 1, checks: bool = True, fresh: bool = False, own_group: bool = False, verdict: bool = True,
             env: Optional[Mapping[str, Optional[str]]] = None, seed: int = 0, trace: Optional[_Path] = None) -> Result:
        """Runs a function "file.py:name" or a script "file.py" on all ranks of a pool with `python`, and returns the Result.

        kwargs: of the function, as JSON can express them; it also gets `world`, where it has that parameter. argv: of the script.
        fresh: on ranks that have run no case. own_group: no process group is lent. verdict: a case that fails on used ranks is run once
        more on fresh ones; when it passes there, its `failure.kind` is "polluted".
        env: variables for this call, beside those that this process has changed since the pool was made; None removes one. seed: of Python's,
        NumPy's and torch's generators.
        trace: file for a timeline of the call, which ui.perfetto.dev opens.
        """
        return self.run_python(python_case(target, kwargs, argv, env, seed), deadline=deadline, warmup=warmup, repeat=repeat, checks=checks,
                               fresh=fresh, own_group=own_group, verdict=verdict, trace=trace)

    def run_python(self, python: Mapping[str, Any], *, deadline: float = 90.0, trace: Optional[_Path] = None, **more: Any) -> Result:
        """As `call`, of the member `python` of a request, as protocol/README.md has it. more: other members of the request."""
        env = {} if "pytest" in python else {**self._environment.changes(), **(python.get("env") or {})}  # an item's fixtures set what it needs on the ranks
        members = {**{name: (value, {"warmup": 0, "repeat": 1, "checks": True, "verdict": True}.get(name, False)) for name, value in more.items()},
                   "python": ({**python, **({"env": env} if env else {})}, None)}
        return self._result(self._request("run", None, None, None, deadline, None, None, trace, members))

    def validate(self, params: Union[Mapping[str, Any], Cell, None] = None, *, case: Optional[str] = None,
                 kwargs: Optional[Mapping[str, str]] = None, kernels: Optional[_Path] = None, load: Sequence[_Path] = (),
                 **more: Any) -> Result:
        """Whether `run` would run it: passed, else skipped or error with the reason. Throws as `run` does."""
        return self._result(self._request("validate", params, case, kwargs, 90.0, None, None, None, {
            **_libraries(kernels, load), **{key: (value, None) for key, value in more.items()}}))

    def compile(self, source: _Path, include_folders: Sequence[_Path] = ()) -> str:
        """Makes a library for `kernels` or `load` of a source and returns its path: .cu with nvcc for the GPUs of this pool's daemon, .cpp
        or .c with the host's compiler. It is kept in a cache, and made again when the source or a file that it includes has changed.

        include_folders: searched first. Throws CompileError with the compiler's messages.
        """
        folders = [os.fspath(folder) for folder in entries(include_folders, "include_folders")]
        request = text_of({"source": os.fspath(source), "include_folders": folders}, "the source")
        try:
            return str(self._answered(self._handle.compile, request)["library"])
        except ValueError as error:
            raise CompileError(str(error)) from None

    def hello(self) -> dict[str, Any]:
        """Who answers: backend, transport, devices, ... (protocol/README.md)."""
        return self._answer("hello")

    def cases(self) -> list[dict[str, Any]]:
        """The daemon's cases, each with its parameters."""
        return list(self._answer("list")["cases"])

    def stats(self) -> dict[str, Any]:
        """Counts of requests, memory, uptime, ... (protocol/README.md)."""
        return self._answer("stats")

    def features(self) -> list[str]:
        """What the daemon has beyond protocol 1.0, by name."""
        return list(self.hello().get("features", ()))

    def cancel(self) -> bool:
        """For another thread, while `run` or `validate` goes on: ends that soon. It returns a Result whose `failure.kind` is "cancelled",
        and the daemon stays warm if its ranks stop in time. False: no such call goes on. Throws PoolError when the daemon has not the
        feature "cancel"."""
        return bool(self._beside("cppool_pool_cancel")["cancelled"])

    def status(self) -> dict[str, Any]:
        """For another thread, likewise: where every rank is now; "text" is for people, the rest is in protocol/README.md."""
        return dict(self._beside("cppool_pool_status"))

    def stop(self) -> None:
        """Ends the daemon; the next call starts another. Waits for a call of another thread."""
        self._handle.stop()

    def stderr_tail(self) -> str:
        """The end of the stderr of the latest daemon, at most 4000 characters."""
        return self._handle.stderr_tail()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<cppool.Pool of {self.world_size} ranks>"

    def _request(self, op: str, params: Any, case: Optional[str], kwargs: Optional[Mapping[str, str]], deadline: float,
                 dump: Optional[_Path], inputs: Optional[_Path], trace: Optional[_Path],
                 members: Mapping[str, tuple[Any, Any]]) -> bytes:
        """As the protocol has it. `members`: each with its default, which is not sent."""
        request: dict[str, Any] = {"op": op}
        if isinstance(params, Cell):
            if params.world_size != self.world_size:
                raise ValueError(f"{params.name} is for {params.world_size} ranks, and this pool has {self.world_size}")
            case, params = case or params.case, params.params
        if kwargs is not None:
            if params:
                raise ValueError("params and kwargs are two forms of the same: give one")
            request["kwargs"] = kwargs if type(kwargs) is dict else dict(kwargs)
        elif params:
            if not isinstance(params, Mapping):
                raise TypeError(f"params is a dict of parameters or a Cell, not {type(params).__name__}")
            request["params"] = params if type(params) is dict else dict(params)
        if case is not None:
            request["case"] = case
        if deadline != 90.0:
            request["deadline_ms"] = _milliseconds(deadline, "deadline", 0.001)
        for key, (value, default) in members.items():
            if value is not default and value != default:
                request[key] = value
        for key, path in (("dump", dump), ("inputs", inputs), ("trace", trace)):
            if path is not None:
                request[key] = os.fspath(path)
        return text_of(request, "the request")

    def _result(self, request: bytes) -> Result:
        answer = self._ask(request)
        return Result(answer["answer"], answer["attempts"], lambda: self._command(request), flaky=answer.get("flaky", ""),
                      lost=LostAttempt.all_of(answer))

    def _answer(self, op: str) -> dict[str, Any]:
        return dict(self._ask(b'{"op":"%s"}' % op.encode())["answer"])

    def _ask(self, request: bytes) -> Any:
        self._environment.changes()  # the daemon that this may start has them
        return self._answered(self._handle.ask, request)

    def _beside(self, name: str) -> Any:
        try:
            return self._handle.beside(name)
        except NoAnswer as lost:
            raise PoolError(str(lost), kind=lost.members.get("kind", "")) from None

    def _answered(self, ask: Callable[[bytes], Any], request: bytes) -> Any:
        try:
            return ask(request)
        except NoAnswer as lost:
            members = lost.members
        raise PoolError(members.get("error", ""), kind=members.get("kind", ""), stderr_tail=members.get("stderr_tail", ""),
                        diagnosis=members.get("diagnosis", ""), attempts=members.get("attempts", 1),
                        start_failure=members.get("start"), crash=members.get("crash"), command=self._command(request),
                        flaky=members.get("flaky", ""), lost=LostAttempt.all_of(members))

    def _command(self, request: bytes) -> str:
        try:
            return str(call_library("cppool_client_command", self._options, request)["command"])
        except ValueError:  # not a run
            return ""


class Pools:
    """One Pool per world size, made by the first `at`. Takes the options of a Pool but `world_size`."""

    def __init__(self, **options: Any):
        self._options = options
        self._pools: dict[int, Pool] = {}
        self._make(1)  # wrong options are refused now

    def _make(self, world_size: int) -> Pool:
        return Pool(world_size, **self._options)

    def at(self, world_size: int) -> Pool:
        """The Pool of this world size. Any thread. Throws ValueError for a world size that no daemon has (1 to 64)."""
        pool = self._pools.get(world_size)
        return pool if pool is not None else self._pools.setdefault(world_size, self._make(world_size))

    def warm(self, world_sizes: Iterable[int]) -> None:
        """Starts their daemons and does not wait for them. What fails is told by the first call that needs it."""
        def start(pool: Pool) -> None:
            with contextlib.suppress(PoolError):
                pool.hello()
        for world_size in world_sizes:
            threading.Thread(target=start, args=[self.at(world_size)], daemon=True).start()

    def run(self, params: Union[Mapping[str, Any], Cell, None] = None, *, world_size: Optional[int] = None, **options: Any) -> Result:
        """As `at(world_size).run`; the default is a Cell's own world size, else 2."""
        if world_size is None:
            world_size = params.world_size if isinstance(params, Cell) else 2
        return self.at(world_size).run(params, **options)

    def call(self, target: str, kwargs: Optional[Mapping[str, Any]] = None, *, world_size: int = 2, **options: Any) -> Result:
        """As `at(world_size).call`."""
        return self.at(world_size).call(target, kwargs, **options)

    def stop(self) -> None:
        """Ends all daemons; the next call of a Pool starts its own again."""
        for pool in list(self._pools.values()):
            pool.stop()

    def __enter__(self) -> "Pools":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_shared: dict[tuple[Any, ...], Pools] = {}


def shared_pools(python: Union[_Path, bool] = True, preload: Sequence[str] = (), environment: Optional[Mapping[str, str]] = None,
                 backend: str = "auto", launch: Optional[str] = None) -> Pools:
    """Pools of Python ranks, the same ones for the same arguments, which stay until this process ends; of the server at $CPPOOL_ATTACH, if any."""
    key = (str(python), tuple(preload), tuple(sorted((environment or {}).items())), backend, launch)
    if key not in _shared:
        _shared[key] = Pools(python=python, preload=preload, environment=environment, backend=backend, launch=launch,
                             attach=os.environ.get("CPPOOL_ATTACH") or None)
    return _shared[key]


def call(target: str, kwargs: Optional[Mapping[str, Any]] = None, *, world_size: int = 2, python: Union[_Path, bool] = True,
         preload: Sequence[str] = (), launch: Optional[str] = None, **options: Any) -> Result:
    """Runs a function "file.py:name" or a script on `world_size` warm Python ranks and returns its Result, which has passed.

    The ranks stay for the next call. Throws CaseFailed, an AssertionError, for a case that did not pass, unittest.SkipTest for one that was
    skipped, and what Pool.call throws; `options` are its.
    """
    result = shared_pools(python, preload, launch=launch).call(target, kwargs, world_size=world_size, **options)
    if result.status == "skipped":
        raise unittest.SkipTest(result.error)
    if not result.ok:
        raise CaseFailed(result)
    return result
