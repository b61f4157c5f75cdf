"""The state of a rank's process that cases share: read, compared after each case, and put back."""
import _signal  # signal.getsignal searches each handler's name, which takes ten times as long
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import sys
import threading
import time
import warnings

try:  # here, once in the fork server: each rank names what cases make with it
    from multiprocessing import shared_memory
except ImportError:  # a Python without it
    shared_memory = None

RECORDS = "cppool_rank."  # begins names in /dev/shm that are no case's
_MISSING = object()
_SYS = ("argv", "stdin", "stdout", "stderr", "path", "dont_write_bytecode")
_HOOKS = ("excepthook", "unraisablehook", "displayhook", "meta_path", "path_hooks")
_WALL = 0x40000000  # of waitid: children of every kind
_SIGNALS = {getattr(number, "name", str(int(number))): number for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}}
_LIMITS = {number: name for name, number in sorted(vars(resource).items(), reverse=True) if name.startswith("RLIMIT_")}  # one name of each
_TIMERS = {"ITIMER_REAL": signal.ITIMER_REAL, "ITIMER_VIRTUAL": signal.ITIMER_VIRTUAL, "ITIMER_PROF": signal.ITIMER_PROF}


def _copy(value):
    return value.copy() if isinstance(value, (list, dict, set)) else value


class Values:
    """A group of values by name. read() -> {name: value}; write(name, value): _MISSING for one that was not there."""

    def __init__(self, name, read, write=None, imports=False, describe=None, functions=None):
        self.name, self.read, self.write = name, read, write  # without write: what differs is left
        self.describe = describe  # describe(name): text for people; without it the value
        self.only_more = write is None or name == "shared memory"  # a thread or a name that is gone is no harm
        self.imports = imports  # the first import of a library may change it for good
        self.functions = functions  # functions(name, value): those that it runs; where one is of no library, no import has changed it


def _attributes(owner, names):
    names = [name for name in names if hasattr(owner, name)]

    def write(name, value):
        current = getattr(owner, name)
        if isinstance(current, (list, dict)) and type(current) is type(value):
            current.clear()
            current.extend(value) if isinstance(value, list) else current.update(value)
        else:
            setattr(owner, name, _copy(value))
    return lambda: {name: _copy(getattr(owner, name)) for name in names}, write


def _settings(**pairs):
    """name=(read, write) of functions."""
    return lambda: {name: read() for name, (read, _) in pairs.items()}, lambda name, value: pairs[name][1](value)


def _write_environment(name, value):
    if value is _MISSING:
        del os.environ[name]
    else:
        os.environ[name] = value


def _umask(value=None):
    current = os.umask(0o22 if value is None else value)
    if value is None:
        os.umask(current)
    return current


def cwd():
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def name_shared_memory():
    """Puts this process's pid into the names that multiprocessing makes up, psm_PID_..., so that they are removed when it has died."""
    if hasattr(shared_memory, "_SHM_NAME_PREFIX") and hasattr(shared_memory, "_SHM_SAFE_NAME_LENGTH"):
        pid = f"{os.getpid()}_"
        shared_memory._SHM_NAME_PREFIX += pid
        shared_memory._SHM_SAFE_NAME_LENGTH += len(pid)


def _own_shared_memory():
    """Names that have this process's pid in them, as torch's: others may be in use by other ranks."""
    pid = str(os.getpid())
    return dict.fromkeys(name for name in os.listdir("/dev/shm")
                         if pid in name and pid in re.findall(r"\d+", name) and not name.startswith(RECORDS))


def _loggers():
    known = [("root", logging.root), *((name, each) for name, each in logging.root.manager.loggerDict.items() if isinstance(each, logging.Logger))]
    values = {name: (each.level, tuple(each.handlers), each.propagate, each.disabled, tuple(each.filters)) for name, each in known
              if each.level or each.handlers or not each.propagate or each.disabled or each.filters}
    values["logging.disable"] = logging.root.manager.disable
    return values


def _write_logger(name, value):
    if name == "logging.disable":
        logging.disable(value)
        return
    each = logging.getLogger(None if name == "root" else name)
    level, handlers, each.propagate, each.disabled, filters = (0, (), True, False, ()) if value is _MISSING else value
    each.setLevel(level)
    each.handlers[:], each.filters[:] = handlers, filters


def _write_filters(_, value):
    warnings.filters[:] = value
    warnings._filters_mutated() if hasattr(warnings, "_filters_mutated") else warnings._filters_mutated_lock_held()


def _write_signal(name, value):
    if value is not None:  # None: a handler that C code has set
        signal.signal(_SIGNALS[name], value)


def _threads():
    return dict.fromkeys(map(int, os.listdir("/proc/self/task")))


def _comm(path):
    try:
        with open(f"{path}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"  # it has ended


def _thread_functions(task, _):
    """None of a thread that C code has started."""
    thread = next((each for each in threading.enumerate() if each.native_id == task), None)
    functions = (getattr(thread, "_target", None), getattr(thread, "function", None), getattr(thread, "run", None))  # function: of a Timer
    return [function for function in functions if function is not None]


def _handler_functions(_, value):
    return [value] if callable(value) else []  # else SIG_DFL, SIG_IGN, or of C code


def _is_of_library(function, is_users):
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(getattr(type(function), "__call__", None), "__code__", None)
    return code is not None and not is_users(code.co_filename)  # a library gives no built-in function, such as time.sleep


def _thread_name(task):
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    return names.get(task) or _comm(f"/proc/self/task/{task}")


def _children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)
    except ChildProcessError:  # there are none, as after most cases
        return {}
    except OSError:
        pass  # a kernel before Linux 4.7
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="utf-8") as file:
                found.update((int(child), _comm(f"/proc/{child}")) for child in file.read().split())
        except OSError:
            pass  # the thread has just ended
    return found


def _descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # that of this very listing
        if not target.startswith(("/dev/nvidia", "/proc/self/fd")) and target != f"/proc/{os.getpid()}/fd":
            found[int(number)] = target
    return found


def _python_groups():
    yield Values("environment", lambda: dict(os.environ), _write_environment)
    yield Values("process", *_settings(cwd=(cwd, os.chdir), umask=(_umask, _umask), affinity=(lambda: os.sched_getaffinity(0), lambda v: os.sched_setaffinity(0, v)),
                                         niceness=(lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda v: os.setpriority(os.PRIO_PROCESS, 0, v))))
    yield Values("limits", *_settings(**{name: (functools.partial(resource.getrlimit, number), functools.partial(resource.setrlimit, number))
                                         for number, name in _LIMITS.items()}))
    yield Values("shared memory", _own_shared_memory, lambda name, _: os.unlink(f"/dev/shm/{name}"))
    yield Values("sys", *_attributes(sys, _SYS))
    yield Values("sys hooks", *_attributes(sys, _HOOKS), imports=True, functions=_handler_functions)
    yield Values("threading", *_attributes(threading, ["excepthook"]), imports=True, functions=_handler_functions)
    yield Values("gc", *_attributes(gc, ["callbacks"]), imports=True, functions=lambda _, callbacks: callbacks)
    yield Values("interpreter", *_settings(
        trace=(sys.gettrace, sys.settrace), profile=(sys.getprofile, sys.setprofile), recursion_limit=(sys.getrecursionlimit, sys.setrecursionlimit),
        switch_interval=(sys.getswitchinterval, sys.setswitchinterval),
        gc=(gc.isenabled, lambda on: gc.enable() if on else gc.disable()), gc_threshold=(gc.get_threshold, lambda v: gc.set_threshold(*v)),
        start_method=(lambda: multiprocessing.get_start_method(True), lambda v: multiprocessing.set_start_method(v, force=True))), imports=True)
    yield Values("warnings", lambda: {"filters": list(warnings.filters)}, _write_filters, imports=True)
    yield Values("logging", _loggers, _write_logger, imports=True)
    yield Values("signals", lambda: {name: _signal.getsignal(number) for name, number in _SIGNALS.items()}, _write_signal, imports=True,
                 functions=_handler_functions)
    yield Values("timers", lambda: {name: signal.getitimer(timer)[0] > 0 for name, timer in _TIMERS.items()}, lambda name, _: signal.setitimer(_TIMERS[name], 0))
    yield Values("signal mask", lambda: {signal.Signals(each).name: True for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())},
                 lambda name, value: signal.pthread_sigmask(signal.SIG_UNBLOCK if value is _MISSING else signal.SIG_BLOCK, [getattr(signal, name)]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "seterr"):
        yield Values("numpy", lambda: dict(numpy.geterr()), lambda name, value: numpy.seterr(**{name: value}), imports=True)


def _config_group(config):
    """Of a module of torch's settings: all are read only when the hash that it keeps has changed, or a limit, which has no part in it."""
    names = limits = known = values = None

    def read():
        nonlocal names, limits, known, values
        if names is None:  # here, where another version of torch may fail
            names = list(pickle.loads(config.save_config()))
            limits = [name for name in names if name in getattr(config, "_compile_ignored_keys", ()) and "limit" in name]  # the others are for debugging
        now = [config.get_hash(), *(getattr(config, name, _MISSING) for name in limits)]
        if now != known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some are deprecated
                known, values = now, {name: _copy(getattr(config, name, _MISSING)) for name in names}
        return values
    return Values(config.__name__, read, lambda name, value: setattr(config, name, _copy(value)), imports=True)


def _autocast_nesting(torch):
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _write_autocast_nesting(torch, value):
    """The cache is cleared where the outermost context ends, which would not come any more."""
    for _ in range(value, _autocast_nesting(torch)):
        torch.autocast_decrement_nesting()
    for _ in range(_autocast_nesting(torch), value):
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _torch_groups(torch):
    yield Values("torch defaults", *_settings(
        dtype=(torch.get_default_dtype, torch.set_default_dtype), device=(torch.get_default_device, lambda value: torch.set_default_device(None)),
        threads=(torch.get_num_threads, torch.set_num_threads)))
    yield Values("torch determinism", *_settings(
        algorithms=(lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
                    lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
        fill_uninitialized_memory=(lambda: torch.utils.deterministic.fill_uninitialized_memory,
                                   lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value))))
    backends = torch.backends
    matmul = backends.cuda.matmul
    # Through fp32_precision alone, where it is: the old names cannot be read after the new ones have been written.
    for name, owner in (("matmul", matmul), ("cudnn.conv", getattr(backends.cudnn, "conv", None)), ("cudnn.rnn", getattr(backends.cudnn, "rnn", None))):
        if hasattr(owner, "fp32_precision"):
            yield Values(f"torch {name}", *_attributes(owner, ["fp32_precision"]))
    if not hasattr(matmul, "fp32_precision"):
        yield Values("torch tf32", *_attributes(matmul, ["allow_tf32"]))
        yield Values("torch cudnn tf32", *_attributes(backends.cudnn, ["allow_tf32"]))
    yield Values("torch matmul reductions", *_attributes(
        matmul, ["allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"]))
    yield Values("torch cudnn", *_attributes(backends.cudnn, ["enabled", "benchmark", "deterministic", "benchmark_limit"]))
    kinds = [kind for kind in ("flash", "mem_efficient", "math", "cudnn") if hasattr(backends.cuda, f"{kind}_sdp_enabled")]
    yield Values("torch sdp", *_settings(**{kind: (getattr(backends.cuda, f"{kind}_sdp_enabled"), getattr(backends.cuda, f"enable_{kind}_sdp")) for kind in kinds}))
    libraries = [kind for kind in ("linalg", "blas") if hasattr(backends.cuda, f"preferred_{kind}_library")]
    yield Values("torch libraries", *_settings(**{kind: (getattr(backends.cuda, f"preferred_{kind}_library"),) * 2 for kind in libraries}))
    yield Values("torch modes", *_settings(
        grad=(torch.is_grad_enabled, torch._C._set_grad_enabled), anomaly=(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        **{f"autocast {device}": (lambda device=device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
                                  lambda value, device=device: (torch.set_autocast_enabled(device, value[0]), torch.set_autocast_dtype(device, value[1])))
           for device in ("cpu", "cuda")},
        **{"autocast nesting": (lambda: _autocast_nesting(torch), lambda value: _write_autocast_nesting(torch, value)),
           "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)}))
    if torch.cuda.is_initialized():
        # The device first: a stream is current on its device.
        yield Values("torch cuda", *_settings(device=(torch.cuda.current_device, torch.cuda.set_device), stream=(torch.cuda.current_stream, torch.cuda.set_stream)))
        if hasattr(torch.cuda, "get_per_process_memory_fraction"):
            yield Values("torch cuda memory", *_settings(fraction=(torch.cuda.get_per_process_memory_fraction, torch.cuda.set_per_process_memory_fraction)))
        # What was set last, in versions of torch that tell. No text puts back what it has changed.
        yield Values("torch allocator", lambda: {"settings": torch._C._accelerator_getAllocatorSettings()})
    yield Values("torch open modes", lambda: {
        "inference mode": torch.is_inference_mode_enabled(), "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(), "profiler": torch.autograd._profiler_enabled()})
    yield Values("torch open modes", lambda: {"saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None})
    for config in (sys.modules.get("torch._dynamo.config"), sys.modules.get("torch._inductor.config")):
        if hasattr(config, "get_hash"):
            yield _config_group(config)
    for module in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"]):  # torch.optim hides the name
        yield Values("torch hooks", *_attributes(module, [name for name, value in vars(module).items() if name.startswith("_global_") and "hooks" in name and hasattr(value, "clear")]))


# pytest changes these itself while a fixture is set up: what the fixture has changed is what differs at the item's end.
_OF_PYTEST = ("logging", "warnings")
# What the session of pytest.main has of its own, and puts back as it ends: of the environment PYTEST_VERSION alone.
_OF_SESSION = ("environment", "sys hooks", "threading", "logging", "warnings")
_LATER = object()


class Snapshot:
    """The state as it is now."""

    def __init__(self):
        groups = list(_python_groups())
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "nn"):
            groups += _torch_groups(torch)
        # At last: what nothing can put back.
        groups += [Values("threads", _threads, imports=True, describe=_thread_name, functions=_thread_functions), Values("children", _children),
                   Values("descriptors", _descriptors, imports=True)]
        self._groups = []  # (group, its values)
        self._meanwhile = {}  # of a group, by its index: values that are right for a while
        for group in groups:
            try:
                self._groups.append((group, group.read()))
            except Exception:  # a library without this setting, or of another version
                pass

    def _differing(self, group, known):
        now = group.read()
        if now is known or now == known:
            return [], now
        names = [name for name in {**known, **now} if name not in known or name not in now or known[name] != now[name]]
        if group.only_more:
            names = [name for name in names if name in now]
        return names, now

    def read(self):
        """What `expect_changes` compares with."""
        return [group.read() for group, _ in self._groups]

    def expect_changes(self, before):
        """What has changed since then is right until all is restored."""
        for index, ((group, _), old) in enumerate(zip(self._groups, before)):
            now = group.read()
            for name in {**old, **now}:
                if old.get(name, _MISSING) != now.get(name, _MISSING):
                    self._meanwhile.setdefault(index, {})[name] = _LATER if group.name in _OF_PYTEST else now.get(name, _MISSING)

    def _right(self, index):
        """The values that a group should have, without those that are _LATER: they are those it has."""
        group, known = self._groups[index]
        meanwhile = self._meanwhile.get(index)
        if not meanwhile:
            return known
        if _LATER in meanwhile.values():
            now = group.read()
            meanwhile.update({name: now.get(name, _MISSING) for name, value in meanwhile.items() if value is _LATER})
        return _with(known, meanwhile)

    def expect(self, group, name, value):
        """What is the right value from now on."""
        for each, known in self._groups:
            if each.name == group:
                known[name] = value

    def expect_end_of_session(self):
        """What pytest.main has put back as it ended is right from now on, and not what it was during the session."""
        for index, (group, known) in enumerate(self._groups):
            if group.name in _OF_SESSION:
                names, now = self._differing(group, self._right(index))
                changed = {name: now.get(name, _MISSING) for name in names if group.name != "environment" or name == "PYTEST_VERSION"}
                self._groups[index] = (group, _with(known, changed))

    def restore(self, is_users=None, all_groups=True):
        """Puts back what differs. Returns what differed, what could not be put back, and what a first import has changed, which is accepted from now on
        where the caller says that there was one: is_users(path), whether a file is no library's. Each is {group: [name, ...]}, without values.
        all_groups: else threads, files and the like, which something that goes on may have started, are left for a later call, and what
        `expect_changes` has seen is right."""
        differed, left, accepted = {}, {}, {}
        if all_groups:
            self._meanwhile = {}
        for index, (group, _) in enumerate(self._groups):
            known = self._right(index)
            names, now = self._differing(group, known)
            if not names or not all_groups and group.only_more:
                continue
            if is_users and group.imports:
                own = [name for name in names if group.functions and not all(_is_of_library(each, is_users) for each in group.functions(name, now.get(name)))]
                imported = [name for name in names if name not in own]
                if imported:
                    accepted.setdefault(group.name, []).extend(map(str, imported[:16]))
                    self._groups[index] = (group, _with(self._groups[index][1], {name: now.get(name, _MISSING) for name in imported}))
                    for name in imported:
                        self._meanwhile.get(index, {}).pop(name, None)
                    known = self._right(index)
                names = own
                if not names:
                    continue
            limit = time.monotonic() + 0.05  # a thread that has been joined may need a moment to end
            while group.write is None and names and time.monotonic() < limit:
                time.sleep(0.001)
                names, now = self._differing(group, known)
            if group.write is None:
                if not names:
                    continue
                left.setdefault(group.name, []).extend(_label(group, name, now) for name in names[:16])
                continue
            differed.setdefault(group.name, []).extend(map(str, names[:16]))
            for name in names:
                try:
                    group.write(name, known.get(name, _MISSING))
                except Exception:
                    pass  # found to differ below
            still, _ = self._differing(group, known)
            if still:
                left.setdefault(group.name, []).extend(map(str, still[:16]))
        return differed, left, accepted


def _with(values, changes):
    return {name: value for name, value in {**values, **changes}.items() if value is not _MISSING}


def _label(group, name, now):
    return f"{group.describe(name) if group.describe else now[name]} ({name})" if isinstance(name, int) else str(name)


def stop_helpers():
    """Ends the helper process that multiprocessing starts for shared memory, and which would stay."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None and getattr(tracker._resource_tracker, "_pid", None) is not None:
        tracker._resource_tracker._stop()


def seed(value):
    """All generators that libraries share, before each case."""
    random.seed(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(value % 2**32)
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.default_generator.manual_seed(value)
        if torch.cuda.is_initialized():  # else torch.manual_seed would keep each call for later
            torch.cuda.manual_seed_all(value)


def seed_anew():
    """Makes NumPy's generator differ between forked processes, as between started ones. Python's does so by itself; torch's never differs."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def reset_compiler():
    """Ends the processes of torch's compiler, and forgets what it has compiled in a case."""
    workers, dynamo = sys.modules.get("torch._inductor.async_compile"), sys.modules.get("torch._dynamo.utils")
    if workers is not None:
        workers.shutdown_compile_workers()
    if dynamo is not None and dynamo.counters:
        sys.modules["torch"].compiler.reset()
        dynamo.counters.clear()


# What libraries keep of a group or a case, by module.
_LIBRARIES = {
    "deepspeed.comm.comm": lambda comm: setattr(comm, "cdb", None),
    "megatron.core.parallel_state": lambda parallel: parallel.destroy_model_parallel(),
    "accelerate.state": lambda state: (state.AcceleratorState._reset_state(reset_partial_state=True), state.GradientState._reset_state()),
    "transformer_engine.pytorch.quantization": lambda module: module.FP8GlobalStateManager.reset(),
    "transformer_engine.pytorch.fp8": lambda module: module.FP8GlobalStateManager.reset(),  # an older version
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention":
        lambda module: module._attention_backends.update(backend_selection_requires_update=True),
}


def reset_libraries():
    """Puts them back as after their import. One that has changed since is left as it is."""
    for name, reset in _LIBRARIES.items():
        module = sys.modules.get(name)
        if module is not None:
            try:
                reset(module)
            except Exception:
                pass
