"""The shared library `libcppool_client.so` (cppool/client.h), through ctypes. It is loaded by the first call that needs it."""
from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
import time
import weakref
from typing import Any, Callable, Iterable, Mapping, Optional

__tracebackhide__ = True  # pytest shows the user's line, and not how it went on from there

_SONAME = "libcppool_client.so.0.1"  # of the interface that this file is written for: client/c_api/CMakeLists.txt
_OK, _NO_ANSWER, _INVALID, _INTERRUPTED, _INTERNAL = range(5)
_LINE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Hooks(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("context", ctypes.c_void_p), ("on_stderr", _LINE), ("log", _LINE),
                ("leave", ctypes.c_void_p), ("enter", ctypes.c_void_p), ("interrupted", ctypes.c_void_p)]


class NoAnswer(Exception):
    """The members of the JSON object that the library gives in place of an answer."""

    def __init__(self, members: dict[str, Any]):
        super().__init__(members.get("error", ""))
        self.members = members


def prefix() -> str:
    """The folder of this installation: `bin`, `lib` with the CMake package, `include`."""
    return os.path.dirname(os.path.abspath(__file__))


def version() -> str:
    """Of the library, "0.1.0"."""
    return str(library().cppool_client_version().decode())


_library: Optional[ctypes.PyDLL] = None


def library() -> ctypes.PyDLL:
    """Throws ImportError when there is none."""
    global _library
    if _library is None:
        path = os.path.join(prefix(), "lib", _SONAME)
        try:
            # PyDLL: the library itself gives up the interpreter's lock in every wait, and looks for signals there.
            loaded = ctypes.PyDLL(path)
        except OSError as error:
            raise ImportError(f"cppool's library does not load: {error}. Install the wheel that scripts/wheel builds, or use "
                              "build/python of a build") from error
        text, out = ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
        for name, result, arguments in (
                ("cppool_client_version", ctypes.c_char_p, []),
                ("cppool_client_free", None, [ctypes.c_void_p]),
                ("cppool_pool_create", ctypes.c_int, [text, ctypes.POINTER(_Hooks), out, out]),
                ("cppool_pool_ask", ctypes.c_int, [ctypes.c_void_p, text, out]),
                ("cppool_pool_compile", ctypes.c_int, [ctypes.c_void_p, text, out]),
                ("cppool_pool_cancel", ctypes.c_int, [ctypes.c_void_p, out]),
                ("cppool_pool_status", ctypes.c_int, [ctypes.c_void_p, out]),
                ("cppool_pool_stderr_tail", ctypes.c_void_p, [ctypes.c_void_p]),
                ("cppool_pool_stop", None, [ctypes.c_void_p]),
                ("cppool_pool_interrupt", None, [ctypes.c_void_p]),
                ("cppool_pool_free", None, [ctypes.c_void_p]),
                ("cppool_client_find_daemon", ctypes.c_int, [text, out]),
                ("cppool_client_command", ctypes.c_int, [text, text, out]),
                ("cppool_client_suite", ctypes.c_int, [text, out])):
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        _library = loaded
    return _library


def _take(out: ctypes.c_void_p) -> Any:
    text = ctypes.string_at(out.value) if out.value else b"{}"
    return json.loads(text)


def entries(values: Iterable[Any], what: str) -> list[Any]:
    """The entries of a list. Throws TypeError for a text, whose entries would be its characters, and for a single value."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{what} is a list, not {values!r}")
    return list(values)


def call(name: str, *arguments: Any) -> Any:
    """Calls a function whose last argument is `out`, and returns what it says. Throws ValueError for wrong arguments, NoAnswer,
    KeyboardInterrupt (or what else a signal handler throws), RuntimeError."""
    loaded = library()
    out = ctypes.c_void_p()
    try:
        status = getattr(loaded, name)(*arguments, ctypes.byref(out))
        answer = _take(out)
    except BaseException:  # of a signal handler
        if where := _take(out).get("diagnosis"):
            print(f"cppool: {where}", file=sys.stderr)
        raise
    finally:
        if out.value:
            loaded.cppool_client_free(out)
    if status == _OK:
        return answer
    if status in (_NO_ANSWER, _INTERRUPTED):
        raise NoAnswer(answer)
    if status == _INVALID:
        raise ValueError(answer.get("error", "invalid"))
    raise RuntimeError(answer.get("error", "cppool: out of memory"))


def is_text(value: str) -> bool:
    """Whether UTF-8 can express it: not what stands for bytes of a path or variable that are none."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_of(value: Mapping[str, Any], what: str) -> bytes:
    """As JSON in UTF-8. Throws ValueError or TypeError that names the member which these cannot express, without a text's value, which may be a secret."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        refused = error
    for key, member in value.items():
        _refuse(member, key)
    raise (ValueError if isinstance(refused, UnicodeError) else type(refused))(f"{what}: {refused}")


def _refuse(value: Any, where: str, depth: int = 0) -> None:
    if depth > 64:
        raise ValueError(f"{where[:80]}... is nested too deeply")
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{where} is {value!r}, which JSON cannot express: give a finite number")
    elif isinstance(value, str):
        if not is_text(value):
            raise ValueError(f"{where} has characters that UTF-8 cannot express: give text (bytes of another encoding are none)")
    elif isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, (str, int, float, type(None))):
                raise TypeError(f"{where} has the key {key!r}: keys are strings")
            if isinstance(key, str) and not is_text(key):
                raise ValueError(f"{where} has the key {key!r}, which UTF-8 cannot express")
            _refuse(member, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, member in enumerate(value):
            _refuse(member, f"{where}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, (int, bool)):
        kind = type(value).__module__ + "." + type(value).__qualname__
        raise TypeError(f"{where} is a {kind}, which JSON cannot express: give a number, a string, a boolean, a list or None")


class _Hook:
    """Gives lines to `log` or `on_stderr`. Does not refer to the Handle, which its last user frees."""

    def __init__(self, function: Optional[Callable[[str], None]], pool: Optional[ctypes.c_void_p] = None):
        """pool: its call ends when Ctrl-C ends the function."""
        self.threads: set[int] = set()  # in the function
        self.thrown: dict[int, BaseException] = {}  # what ends the call of a thread
        self._function, self._pool = function, pool
        self.pointer = ctypes.cast(0, _LINE) if function is None else _LINE(self._take)

    def _take(self, _: Any, line: Any, size: int) -> None:
        assert self._function is not None
        thread = threading.get_ident()
        try:
            self.threads.add(thread)
            self._function(ctypes.string_at(line, size).decode("utf-8", "replace") if size else "")
        except BaseException as thrown:
            if self._pool is None or isinstance(thrown, Exception):
                raise  # ctypes reports it, and the call goes on
            self.thrown[thread] = thrown
            library().cppool_pool_interrupt(self._pool)
        finally:
            self.threads.discard(thread)


class Handle:
    """A `cppool_pool`, freed with its last reference, or at the interpreter's exit: its threads cannot call Python later."""

    def __init__(self, options: bytes, on_stderr: Optional[Callable[[str], None]], log: Optional[Callable[[str], None]]):
        self._pool = ctypes.c_void_p()
        self._callers: set[int] = set()  # threads in a call
        self._on_stderr, self._log = _Hook(on_stderr), _Hook(log, self._pool)

        def address(function: Any) -> Optional[int]:
            return ctypes.cast(function, ctypes.c_void_p).value

        hooks = _Hooks(ctypes.sizeof(_Hooks), None, self._on_stderr.pointer, self._log.pointer,
                       address(ctypes.pythonapi.PyEval_SaveThread), address(ctypes.pythonapi.PyEval_RestoreThread),
                       address(ctypes.pythonapi.PyErr_CheckSignals))
        call("cppool_pool_create", options, ctypes.byref(hooks), ctypes.byref(self._pool))
        assert self._pool.value
        _pools[self._pool.value] = (self._on_stderr, self._log)
        _handles.add(self)

    def ask(self, request: bytes) -> Any:
        with self._calling():
            return call("cppool_pool_ask", self._pool, request)

    def compile(self, request: bytes) -> Any:
        with self._calling():
            return call("cppool_pool_compile", self._pool, request)

    def beside(self, name: str) -> Any:
        """A function that is for other threads than the one in `ask`."""
        with self._calling():
            return call(name, self._pool)

    def stop(self) -> None:
        with self._calling():
            library().cppool_pool_stop(self._pool)

    def stderr_tail(self) -> str:
        loaded = library()
        with self._calling():
            tail = loaded.cppool_pool_stderr_tail(self._pool)
        try:
            return ctypes.string_at(tail).decode("utf-8", "replace") if tail else ""
        finally:
            loaded.cppool_client_free(tail)

    def _calling(self) -> "Handle":
        if threading.get_ident() in self._callers | self._on_stderr.threads:
            raise RuntimeError("a Pool cannot be used in its own log or on_stderr, nor in a signal handler that runs during a call of it: "
                               "the call would wait for itself")
        if _exiting or not self._pool:
            _leave_thread()
            raise RuntimeError("the interpreter is at its exit, and the pool has ended")
        return self

    def __enter__(self) -> None:
        self._callers.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._callers.discard(threading.get_ident())
        if thrown := self._log.thrown.pop(threading.get_ident(), None):
            raise thrown from None
        if _exiting:
            _leave_thread()

    def interrupt(self) -> None:
        library().cppool_pool_interrupt(self._pool)

    def free(self) -> None:
        pool = self._pool.value
        if not pool or self._callers or _library is None:
            return
        if threading.get_ident() not in self._on_stderr.threads:
            self._pool.value = None
            return _free(pool)
        try:  # this thread belongs to the pool, and cannot wait for itself
            threading.Thread(target=_free, args=(pool,)).start()
        except RuntimeError:
            pass  # the interpreter is at its exit, which frees it

    __del__ = free

    def other_callers(self) -> set[int]:
        """Threads in a call, but for this one and those that a forked child does not have."""
        return self._callers & sys._current_frames().keys() - {threading.get_ident()}


def _leave_thread() -> None:
    """As the interpreter at its exit ends daemon threads: without a word."""
    if threading.current_thread().daemon:
        raise SystemExit


_handles: "weakref.WeakSet[Handle]" = weakref.WeakSet()
_pools: dict[int, tuple[_Hook, ...]] = {}  # that nobody frees yet, with what they call
_freeing: set[tuple[int, int]] = set()  # pool and thread
_exiting = False
_EXIT_LIMIT = 10  # seconds


def _free(pool: int) -> None:
    mark = (pool, threading.get_ident())
    _freeing.add(mark)  # before the pool leaves _pools: at its exit the interpreter waits for both
    try:
        hooks = _pools.pop(pool, None)
        if hooks and _library is not None:
            _library.cppool_pool_free(ctypes.c_void_p(pool))
    finally:
        _freeing.discard(mark)


@atexit.register
def _free_all() -> None:
    """Ends the calls of daemon threads first: the interpreter would end these threads, and those of pools, inside the library, which aborts
    the process. A thread that is stuck in its own `log` is not waited for after the limit."""
    global _exiting
    _exiting = True
    until = time.monotonic() + _EXIT_LIMIT
    while (busy := [handle for handle in _handles if handle.other_callers()]) and time.monotonic() < until:
        for handle in busy:
            handle.interrupt()  # again and again: a call may have been about to begin
        time.sleep(0.01)
    stuck = {handle._pool.value for handle in busy}
    for pool in _pools.keys() - stuck:
        _free(pool)
    while _freeing and time.monotonic() < until:
        time.sleep(0.01)
