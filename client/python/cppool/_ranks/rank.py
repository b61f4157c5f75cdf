"""A rank: the main thread loads and runs cases, a control thread reads frames. README.md has the frames."""
import contextlib
import ctypes
import datetime
import faulthandler
import fcntl
import gc
import importlib
import json
import linecache
import os
import queue
import re
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import unittest

from . import group, state
from .code import CannotLoad, CannotReload, Code, arguments_of, check_has_run, traceback_of
from .frames import CASE, IDLE, LOAD, RESET, BrokenFrame, Channel, LongFrame, Page, cut, finite
from .world import MAX_RESULTS, Cancelled, NotRun, World

FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
STACKS_SIGNAL = signal.SIGRTMAX - 3
# What a communication library says when the other side has gone, or does not come.
_OTHERS = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|closed by peer|socket timeout|wait timeout|broken pipe", re.I)
MAX_SAMPLES = 100_000
LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def environment(changes):
    """Variables for the time of a request; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(changes):
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def kind_of(error):
    """The protocol's word, and whether another rank's end probably caused it."""
    torch = sys.modules.get("torch")
    name, text = type(error).__name__, str(error)
    if isinstance(error, Cancelled):
        return "cancelled", False
    if isinstance(error, NotRun):
        return "internal", True
    if isinstance(error, unittest.SkipTest) or (name == "Skipped" and type(error).__module__ == "_pytest.outcomes"):
        return "unsupported", False
    if isinstance(error, AssertionError) or (name == "Failed" and type(error).__module__ == "_pytest.outcomes"):
        return "mismatch", False
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in text:
        return "out_of_memory", False
    if isinstance(error, (CannotLoad, SyntaxError)):
        return "invalid_request", False
    of_torch = type(error) is RuntimeError or type(error).__module__.startswith("torch")
    if of_torch and name.startswith("Dist") or of_torch and torch is not None and _OTHERS.search(text):
        return ("nccl" if "nccl" in text.lower() else "internal"), True
    return ("cuda" if of_torch and "CUDA" in text else "internal"), False


def text_of(error):
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    if isinstance(error, (CannotLoad, NotRun, Cancelled)):
        return str(error) or "cancelled"
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, AssertionError) and not str(error):
        last = traceback.extract_tb(error.__traceback__)[-1:]
        text += "".join(f": {linecache.getline(frame.filename, frame.lineno).strip()} ({frame.filename}:{frame.lineno})" for frame in last)
    return cut(text, 8000)


def place_of(block):
    """Where a block of device memory was allocated: the innermost line outside of torch."""
    frames = [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in block.get("frames", ()) if frame["filename"].endswith(".py")]
    return next((frame for frame in frames if "/torch/" not in frame and not frame.startswith(FOLDER)), "an unknown place")


def files_of(frame):
    """The files that a frame `load` names."""
    named = [frame["function"].rpartition(":")[0]] if "function" in frame else [frame["script"]] if "script" in frame else frame["pytest"]
    return [os.path.abspath(name) for name in (each.partition("::")[0] for each in named) if name.endswith(".py")]


class Rank:
    def __init__(self, frame, descriptors, deferred, user_threads, record, since):
        self.rank, self.size, self.port, self.backend = frame["rank"], frame["size"], frame["port"], frame["backend"]
        self.local_rank, self.local_size, self.node, self.host = frame["local_rank"], frame["local_size"], frame["node"], frame["host"]
        connection, page, self.output, self.stacks_end = descriptors[:4]
        self.listener = descriptors[4] if len(descriptors) > 4 else None
        # A process that ends closes its highest descriptor first: the daemon then need not wait for what the driver of a GPU closes.
        with contextlib.suppress(OSError):  # it is taken
            highest = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024) - 1)
            os.close(connection)
            connection = highest
        self.channel, self.page = Channel(socket.socket(fileno=connection)), Page(page)
        self.deferred, self.user_threads = deferred, user_threads
        self.record, self.since = record, since
        with contextlib.suppress(OSError):
            os.close(os.open(record, os.O_CREAT | os.O_CLOEXEC, 0o600))
        self.keep_record()
        self.requests, self.decisions = queue.SimpleQueue(), queue.SimpleQueue()
        self.main_thread = threading.get_ident()
        self.guard = threading.Lock()  # of the next one
        self.under_way = None  # the id that `cancel` may stop
        self.group = self.torch = None
        self.module = None  # that is being imported at the start
        self.loaded = None  # what the last `load` has loaded: a function, a script's path, or Items
        self.clean = True  # no fixture of several items is alive, so that the whole state is that of the snapshot

    def main(self):
        """Does not return."""
        try:
            ready = self.start()
        except BaseException as error:
            self.channel.send("ready", rank=self.rank, error=text_of(error), traceback=cut(traceback_of(error), 64000), module=self.module)
            os._exit(2)
        self.channel.send("ready", **ready)
        self.serve()

    def serve(self, items=None):
        """Answers requests. items: the session of pytest that this is called from; then it returns the `load` that ends it."""
        while True:
            self.page.write(IDLE)
            self.keep_record()
            frame = self.requests.get()
            self.keep_record(frame.get("deadline_ms", 0) / 1000)
            if frame["frame"] == "run":
                self.run(frame)
            elif items is not None and not items.serves(frame):
                return frame
            elif items is not None:
                self.loaded = items
                self.channel.send("report", id=frame["id"], rank=self.rank, phase="load", status="passed", reloaded=[],
                                  **items.members(frame.get("items", False)))
            while items is None and frame is not None and frame["frame"] == "load":
                frame = self.load(frame)
            del frame

    def keep_record(self, seconds=0):
        """From when until when names in /dev/shm may be of this rank: at most until the end of what it begins now."""
        with contextlib.suppress(OSError):  # a case may have removed it
            os.utime(self.record, (self.since, time.time() + seconds))

    def start(self):
        begin = time.perf_counter()
        for standard in (1, 2):
            os.dup2(self.output, standard)
        os.close(self.output)
        # Anew: those of the server remember whether its descriptors could seek.
        sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        faulthandler.enable(self.stacks_end)
        faulthandler.register(STACKS_SIGNAL, self.stacks_end, all_threads=True)
        _set({name: value or ("1" if name == "OMP_NUM_THREADS" else None) for name, value in self.user_threads.items()})  # as torchrun does
        _set({"RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.local_size,
              "GROUP_RANK": self.node, "GROUP_WORLD_SIZE": self.size // self.local_size, "ROLE_NAME": "default", "ROLE_RANK": self.rank,
              "ROLE_WORLD_SIZE": self.size, "MASTER_ADDR": self.host, "MASTER_PORT": self.port,
              # Of every door: who asks is_torchelastic_launched(), which looks for the ID, wants to know whether ranks are theirs to start.
              "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
              # Not an outer torchrun's: rank 0 has the store, and no agent reads the file. TORCH_NCCL_ASYNC_ERROR_HANDLING stays the user's, since the
              # daemon ends what hangs, and not a watchdog of NCCL.
              "TORCHELASTIC_USE_AGENT_STORE": None, "TORCHELASTIC_ERROR_FILE": None})
        state.name_shared_memory()
        os.register_at_fork(after_in_child=self.channel.socket.close)  # a child has nothing to say to the daemon
        threading.Thread(target=self.control, name="cppool control", daemon=True).start()
        for self.module in self.deferred:
            importlib.import_module(self.module)
        self.module = None
        imported = time.perf_counter()
        self.torch = sys.modules.get("torch")
        backend, count = group.choose(self.backend, self.local_size, self.torch)
        if self.torch is not None and self.user_threads.get("OMP_NUM_THREADS"):
            self.torch.set_num_threads(int(self.user_threads["OMP_NUM_THREADS"].split(",")[0]))
        if self.torch is not None and self.torch.distributed.is_available():
            self.group = group.Group(self, backend, count, self.torch)
        if self.listener is not None:
            os.close(self.listener)
        state.seed_anew()
        self.code = Code()
        gc.collect()
        gc.freeze()
        self.snapshot = state.Snapshot()
        if self.on_gpu():
            self.free_unused()
            self.allocated, self.reserved = self.torch.cuda.memory_allocated(), self.torch.cuda.memory_reserved()
            self.known_blocks = set(self.blocks())
            with contextlib.suppress(Exception):  # for the places of blocks; torch may have another interface
                self.torch.cuda.memory._record_memory_history("state", context="alloc", stacks="python")
        now = time.perf_counter()
        return {"rank": self.rank, "pid": os.getpid(), "backend": backend, "device": self.device(),
                "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
                "init_ms": [["import", round((imported - begin) * 1e3, 1)], ["group", round((now - imported) * 1e3, 1)]]}

    def device(self):
        if self.group is None or self.group.device.type != "cuda":
            return None
        properties = self.torch.cuda.get_device_properties(self.group.device)
        return {"name": properties.name, "uuid": f"GPU-{getattr(properties, 'uuid', '')}", "ordinal": self.group.device.index,
                "capability": f"{properties.major}.{properties.minor}", "total_bytes": properties.total_memory}

    # The control thread.

    def control(self):
        try:
            while True:
                for frame in self.channel.receive():
                    if frame is None:
                        os._exit(1)  # the daemon has gone, or gives this rank up
                    self.handle(frame)
        except BrokenFrame as error:
            print(f"cppool rank {self.rank}: {error}", file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(2)

    def handle(self, frame):
        name = frame["frame"]
        if name in ("load", "run"):
            self.requests.put(frame)
        elif name == "go":
            self.decisions.put(frame)
        elif name == "cancel":
            with self.guard:
                if self.under_way == frame["id"]:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main_thread), ctypes.py_object(Cancelled))
                    self.decisions.put(frame)
        elif name == "stacks":
            self.channel.send("stacks", rank=self.rank, threads=self.threads(), collectives=self.group.last_collectives() if self.group else [],
                              memory=self.memory())
        elif name == "bye":
            os._exit(0)
        else:
            raise BrokenFrame(f"unknown frame {name!r:.80}")

    def memory(self):
        """What this process holds of its device, and what is free there; None without a device."""
        if not self.on_gpu():
            return None
        cuda, device = self.torch.cuda, self.group.device
        return {"device": device.index, "held_bytes": cuda.memory_reserved(device), "free_bytes": cuda.mem_get_info(device)[0]}

    def threads(self):
        """Without this package's frames where a case runs: they are below those of the case."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        threads = []
        for ident, frame in sys._current_frames().items():
            stack = traceback.extract_stack(frame)[-100:]
            of_case = [entry for entry in stack if not entry.filename.startswith((FOLDER, "<frozen runpy>"))
                       and not re.search("/(_pytest|pluggy)/", entry.filename)]
            if ident != threading.get_ident():
                threads.append({"name": names.get(ident, str(ident)),
                                "frames": [f"{entry.filename}:{entry.lineno} {entry.name}" for entry in reversed(of_case or stack)]})
        return threads

    # The main thread.

    @contextlib.contextmanager
    def cancellable(self, frame):
        with self.guard:
            self.under_way, self.decisions = frame["id"], queue.SimpleQueue()
        try:
            yield
        finally:
            self.not_cancellable()

    def not_cancellable(self):
        with self.guard:
            self.under_way = None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main_thread), None)  # one that has not been raised yet

    def failure(self, error, stage=""):
        """Members of a report; none for an exit without an error."""
        self.not_cancellable()  # an exception that came between the two
        if isinstance(error, SystemExit) and error.code in (0, None):
            return {}
        kind, of_others = kind_of(error)
        status = {"unsupported": "skipped", "mismatch": "failed"}.get(kind, "error")
        return {"status": status, "kind": kind, "error": text_of(error), "culprit": None if of_others else self.rank, "stage": stage,
                "traceback": "" if isinstance(error, (CannotLoad, NotRun)) else cut(traceback_of(error), 64000)}

    def items_module(self):
        try:
            return importlib.import_module("_cppool_ranks.items")
        except ModuleNotFoundError as error:
            raise CannotLoad(f"{sys.executable} cannot import pytest ({error}): install it there, or start a pool of a Python that has it") from None

    def load(self, frame):
        """Returns None; or the next `load`, which has ended the session of pytest that this one began."""
        self.page.write(LOAD)
        self.code.imported()  # what a reset has imported is not of this load
        report, self.loaded, following = {"status": "passed", "reloaded": []}, None, None
        if not self.clean:  # the session has ended since
            report["warnings"] = []
            self.reset(report, set())
            self.clean = True
        with contextlib.ExitStack() as until_loaded:
            def loaded(members=()):
                until_loaded.close()
                report.update(members)
                imported = self.code.imported()
                if frame.get("digests"):
                    report["files"] = self.code.digests(files_of(frame))
                if imported or "pytest" in frame:
                    self.code.imported_before = True
                    self.snapshot = state.Snapshot()  # what imports change belongs to them
                else:
                    self.snapshot.expect("sys", "path", list(sys.path))
                    self.snapshot.expect("process", "cwd", state.cwd())
                self.flush()
                self.channel.send("report", id=frame["id"], rank=self.rank, phase="load", **report)
            try:
                until_loaded.enter_context(environment(frame.get("env", {})))
                until_loaded.enter_context(self.cancellable(frame))
                if "function" in frame:
                    self.loaded, report["reloaded"] = self.code.function(frame["function"], frame)
                elif "script" in frame:
                    self.loaded, report["reloaded"] = self.code.script(frame["script"], frame)
                else:
                    report["reloaded"] = self.code.prepare(None, frame)
                    self.loaded = self.items_module().Items(self, frame)
                    following = self.loaded.main(loaded)
                    self.snapshot.expect_end_of_session()
            except BaseException as error:
                self.loaded = None
                report.update(self.failure(error) or self.failure(CannotLoad(f"the import ends with {text_of(error)}")))
                if isinstance(error, CannotReload) or self.code.imported_before and not isinstance(error, (CannotLoad, SyntaxError, Cancelled)):
                    report["replace"] = report["error"][:500]
            if following is None:
                loaded()
        return following

    def run(self, frame):
        self.page.write(CASE)
        value, failure, more, alive = None, {}, {}, False
        state.seed(frame.get("seed", 0))
        self.code.imported()  # what a reset or the seed has imported is not of this case
        if self.group is not None and self.clean:
            seconds = frame["deadline_ms"] / 1000 + 60 if "deadline_ms" in frame else 86400
            self.group.begin(frame["id"], frame.get("group") == "own", datetime.timedelta(seconds=seconds))
        world = World((self.rank, self.size), frame, self.page, lambda iteration, samples: self.ask(frame, iteration, samples),
                      self.group and self.group.device, self.group and not self.group.own and self.group.warm or None)
        try:
            with environment(frame.get("env", {})), self.cancellable(frame):
                if "nodeid" in frame and hasattr(self.loaded, "items"):
                    failure, more, alive = self.loaded.run(frame, world)
                else:
                    value = self.call(frame, world)
                if self.on_gpu():
                    self.torch.cuda.synchronize()  # so that what fails there is of this case
        except BaseException as error:
            failure, alive = self.tell(error, world), bool(getattr(self.loaded, "alive", ()))
        report = {"status": "passed", "checks": world.checks, "results": world.results, "warnings": [], **more, **failure}
        wrong = next((check for check in world.checks if not check["ok"]), None)
        if wrong and not failure:
            error = "the check of {tensor} against {against} does not hold: max_abs_err {max_abs_err:.4g}, rel_err {rel_err:.4g}, tolerance {tolerance:.4g}"
            report.update(status="failed", kind="mismatch", error=error.format(**wrong), culprit=self.rank, stage="", traceback="")
        if not failure:
            self.add_values(report, world, value, frame)
        with contextlib.suppress(Exception):  # after a CUDA error there are no times
            report.update(world.trace())
        del world, value
        imported = {name for name in self.code.imported() if not name.startswith(("_cppool_ranks", "encodings."))}  # these change no state
        self.reset(report, imported and imported - set(self.code.users_modules()), alive)
        self.clean = not alive
        try:
            self.channel.send("report", id=frame["id"], rank=self.rank, phase="case", **report)
        except LongFrame as error:
            state_of = {name: report[name] for name in ("differed", "left", "reset_ms", "memory") if name in report}
            self.channel.send("report", id=frame["id"], rank=self.rank, phase="case", **state_of, **self.failure(error))

    def tell(self, error, world):
        """Marks the failure of the case that is under way, and returns its members of the report."""
        failure = self.failure(error, world.failed_stage)
        if failure and failure["status"] != "skipped":
            self.channel.send("mark", id=world.id, **failure)
        return failure

    def on_gpu(self):
        return self.group is not None and self.group.device.type == "cuda"

    def call(self, frame, world):
        if self.loaded is None:
            raise CannotLoad("nothing is loaded")
        if callable(self.loaded):
            value = self.loaded(**arguments_of(self.loaded, frame.get("kwargs", {}), world))
            check_has_run(self.loaded, value)
            return value
        before, sys.argv = sys.argv, [self.loaded, *frame.get("argv", ())]
        try:
            runpy.run_path(self.loaded, run_name="__main__")
        finally:
            sys.argv = before
        return None

    def ask(self, frame, iteration, samples):
        self.channel.send("mark", id=frame["id"], iteration=iteration, samples=samples)
        decision = self.decisions.get()
        if decision["frame"] == "cancel":
            raise Cancelled
        if "stop" in decision:
            raise NotRun(decision["stop"])
        return decision["until"]

    def add_values(self, report, world, value, frame):
        report["gpu_ms"] = world.gpu_ms()
        if frame.get("sampling") or frame.get("repeat", 1) > 1:
            report["samples"] = world.samples()
            if sum(len(times) for _, times in report["samples"]) > MAX_SAMPLES:
                report["samples"] = []
                report["warnings"].append(f"the times of the iterations are left out: there are more than {MAX_SAMPLES}")
        try:
            value = finite(value, words=False)
            text = json.dumps(value)
        except (TypeError, ValueError):
            report["warnings"].append(f"what the function returned is no JSON ({type(value).__name__}): world.result(name, value) sends results")
        else:
            if world.result_bytes + len(text) > MAX_RESULTS:
                report["warnings"].append(f"what the function returned is left out: {world.result_bytes + len(text)} bytes with the results, "
                                          f"of at most {MAX_RESULTS}")
            elif value is not None:
                report["value"] = value

    def flush(self):
        """False: a stream is closed."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except ValueError:
            return False
        LIBC.fflush(None)
        return True

    def reset(self, report, imported, alive=False):
        """Puts the process into the state from before the case, and adds to its report what differed. alive: a fixture of more than this item
        may need its groups, threads, memory and the like, which are compared when it has ended."""
        begin = time.perf_counter()
        self.page.write(RESET)
        groups = []
        if not alive:
            groups = self.group.end() if self.group is not None else []
            state.reset_compiler()
            state.reset_libraries()
            state.stop_helpers()
        gc.collect()
        differed, left, accepted = self.snapshot.restore(self.code.is_users if imported else None, not alive)
        if imported:
            gc.freeze()  # a library that is there to stay need not be searched after every case
        if groups:
            differed["process groups"] = groups[:16]
        if accepted:
            report["warnings"].append(f"the first import of {', '.join(sorted(imported)[:3])} in a case changed {', '.join(accepted)}, which stays: --preload it")
        if not self.flush():
            left["sys"] = ["stdout or stderr is closed"]
        if self.on_gpu() and not alive:
            self.reset_memory(report)
        report.update(differed=differed, left=left, reset_ms=round((time.perf_counter() - begin) * 1e3, 3))

    def blocks(self):
        """Those of torch's allocator that are in use, by address."""
        return {block["address"]: block for segment in self.torch.cuda.memory_snapshot() for block in segment["blocks"]
                if block["state"] == "active_allocated"}

    def free_unused(self):
        """Gives the driver back what torch keeps of device memory for later."""
        cuda = self.torch.cuda
        cuda.synchronize()
        self.torch._C._cuda_clearCublasWorkspaces()
        cuda.ipc_collect()
        cuda.empty_cache()

    def reset_memory(self, report):
        self.free_unused()
        cuda = self.torch.cuda
        report["memory"] = {"allocated": cuda.memory_allocated(), "reserved": cuda.memory_reserved(), "peak": cuda.max_memory_allocated()}
        cuda.reset_peak_memory_stats()
        if report["memory"]["allocated"] > self.allocated:
            blocks = self.blocks()
            fresh = sorted((blocks[address] for address in blocks.keys() - self.known_blocks), key=lambda block: -block["size"])
            report["warnings"].append(f"{report['memory']['allocated'] - self.allocated} bytes of device memory are still allocated: "
                                      + ", ".join(f"{block['size']} at {place_of(block)}" for block in fresh[:4])
                                      + (f" and {len(fresh) - 4} more blocks" if len(fresh) > 4 else ""))
            self.allocated, self.known_blocks = report["memory"]["allocated"], set(blocks)
        elif report["memory"]["reserved"] > self.reserved:
            report["warnings"].append(f"{report['memory']['reserved'] - self.reserved} bytes of device memory are still reserved, and not allocated: "
                                      "a private pool, as of a CUDA graph, may be alive")
        self.reserved = max(self.reserved, report["memory"]["reserved"])
