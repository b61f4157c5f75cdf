"""What a case is given as `world`."""
import contextlib
import json
import math
import statistics
import sys
import time

from .frames import CASE, WAITS, finite

MAX_RESULTS, MAX_CHECKS, MAX_SLICES = 1 << 20, 4096, 16384
PIECE = 1 << 20  # elements of tensors that are compared at a time


class Cancelled(BaseException):
    """The case is not wanted any more. No `except Exception` of the case stops it."""


class NotRun(Exception):
    """Another rank could not begin, so that none does."""


def _flat(value):
    """Its numbers, and its shape, of nested lists or what has `tolist`."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        parts = [_flat(each) for each in value]
        return [number for numbers, _ in parts for number in numbers], [len(parts), *(parts[0][1] if parts else [])]
    return [float(value)], []


def _compare_tensors(torch, got, wanted, atol, rtol):
    """In fp64 where the first one is, a piece after the other, which bounds the memory for it."""
    device = got.device if isinstance(got, torch.Tensor) else wanted.device
    got, wanted = (torch.as_tensor(each).detach().to(device) for each in (got, wanted))
    if got.shape != wanted.shape:
        raise ValueError(f"the shapes differ: {list(got.shape)} and {list(wanted.shape)}")
    shape, got, wanted = list(got.shape), got.reshape(-1), wanted.reshape(-1)
    largest = norm = total = count = 0.0
    worst, furthest = None, (0.0, 0.0)
    for begin in range(0, got.numel(), PIECE):
        g, w = (each[begin:begin + PIECE].to(torch.float64) for each in (got, wanted))
        error = torch.where(g == w, torch.zeros_like(g), (g - w).abs())
        bad = ~((error == 0) | (error <= atol + rtol * w.abs()) & error.isfinite())
        at = error.nan_to_num(nan=math.inf).argmax()
        finite_squares = torch.where(w.isfinite(), w, torch.zeros_like(w)).square()
        numbers = [error.max(), finite_squares.sum(), error.square().sum(), bad.sum(), at, g.take(at), w.take(at)]
        most, of_wanted, of_error, wrong, at, *pair = torch.stack([each.to(torch.float64) for each in numbers]).tolist()  # one wait for the device
        if worst is None or not most <= largest and not math.isnan(largest):
            worst, furthest, largest = begin + int(at), pair, most
        norm, total, count = norm + of_wanted, total + of_error, count + int(wrong)
    return shape, largest, math.sqrt(norm), math.sqrt(total), count, worst, *furthest


def compare(got, wanted, atol, rtol):
    """Largest error, RMS of the error over RMS of `wanted`, whether each |got - wanted| <= atol + rtol * |wanted|, and where not: the members
    `worst` and `bad` of a check. Not finite: it does not hold, except for infinities that are the same on both sides."""
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(each, torch.Tensor) for each in (got, wanted)):
        shape, largest, norm, total, count, worst, a, b = _compare_tensors(torch, got, wanted, atol, rtol)
    else:
        (got, shape), (wanted, wanted_shape) = _flat(got), _flat(wanted)
        if shape != wanted_shape or len(got) != len(wanted):
            raise ValueError(f"the shapes differ: {shape} and {wanted_shape}")
        errors = [0.0 if a == b else abs(a - b) for a, b in zip(got, wanted)]
        largest = math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)
        norm, total = math.sqrt(sum(b * b for b in wanted if math.isfinite(b))), math.sqrt(sum(error * error for error in errors))
        count = sum(not (error == 0 or error <= atol + rtol * abs(b) and math.isfinite(error)) for error, b in zip(errors, wanted))
        worst = max(range(len(errors)), key=lambda at: math.inf if math.isnan(errors[at]) else errors[at], default=None)
        a, b = (got[worst], wanted[worst]) if errors else (0.0, 0.0)
    holds = count == 0
    located = {} if holds else {"worst": {"index": _unravelled(worst, shape), "got": a, "wanted": b}, "bad": count}
    return largest, total / norm if norm else (0.0 if total == 0 else math.inf), holds, located


def _unravelled(at, shape):
    index = []
    for size in reversed(shape):
        at, place = divmod(at, size)
        index.insert(0, place)
    return index


class _Timeline:
    """When the main thread, and on a GPU its stream, passed from one stage to the next."""

    WARMUP = -2

    def __init__(self, on_gpu):
        self._cuda = sys.modules["torch"].cuda if on_gpu else None
        self._marks = []  # [stage from here on, iteration, nanoseconds of the host, event]
        self._dropped = 0
        self._error_ns = 0
        if self._cuda:
            self._base = self._cuda.Event(enable_timing=True)
            self._cuda.synchronize()
            before = time.monotonic_ns()
            self._base.record()
            self._base.synchronize()
            self._base_ns = (before + time.monotonic_ns()) // 2
            self._error_ns = self._base_ns - before

    def mark(self, stage, iteration):
        if len(self._marks) > MAX_SLICES:
            self._dropped += 1
            return
        event = None
        if self._cuda:
            event = self._cuda.Event(enable_timing=True)
            event.record()
        self._marks.append([stage, iteration, time.monotonic_ns(), event])

    def name_last(self, stage):
        """The iteration that began last has no stage: it is one itself."""
        self._marks[-1][0] = stage

    def member(self):
        """`trace` of the report. On a GPU all work must be over."""
        names, host, stream = {}, [], []
        for (stage, iteration, begin, event), (_, _, end, next_event) in zip(self._marks, self._marks[1:]):
            if not stage:
                continue
            name = names.setdefault(stage, len(names))
            host.append([name, iteration, begin, end])
            if event is not None:
                stream.append([name, iteration, *(self._base_ns + int(self._base.elapsed_time(each) * 1e6) for each in (event, next_event))])
        return {"names": list(names), "host": host if stream else [], "stream": stream or host, "dropped": self._dropped,
                "clock_error_us": self._error_ns / 1e3}


class World:
    """The ranks of a case, seen from one of them. What a case reports through it is in the answer of the daemon."""

    def __init__(self, rank, run, page, ask, device=None, group=None):
        """run: the frame. ask(iteration, samples): the rank waits for the daemon's decision, and returns until which iteration it goes on."""
        self.id, (self.rank, self.size) = run["id"], rank
        self.device, self.group = device, group  #: a torch.device and a process group; None without torch
        self.failed_stage = ""
        self.checks, self.results = [], {}
        self._run, self._page, self._ask = run, page, ask
        self._stages = []  # open ones
        self._times = []  # [iteration or None, stage, begin, end]
        self._iteration = None
        self._begun = 0
        self._warms_up = False
        self._on_gpu = device is not None and device.type == "cuda"
        self._timeline = _Timeline(self._on_gpu) if run.get("trace") else None
        self.result_bytes = 0

    @contextlib.contextmanager
    def stage(self, name):
        """Times a part of the case, and names it while it lasts. Within another stage it is a part of that."""
        self._stages.append(str(name))
        path = "/".join(self._stages)
        self._page.write(CASE, path, self._begun)
        entry = [self._iteration, path, self._now(), None]
        self._times.append(entry)
        self._mark()
        try:
            yield
        except BaseException:
            self.failed_stage = self.failed_stage or path
            raise
        finally:
            entry[3] = self._now()
            self._stages.pop()
            self._mark()
            self._page.write(CASE, "/".join(self._stages), self._begun)

    def check(self, name, got, wanted, against="reference", atol=0.0, rtol=0.0):
        """Compares numbers, lists, arrays or tensors; a check that does not hold fails the case when it has ended. Returns whether it holds."""
        if not self._run.get("checks", True):
            return True
        if len(self.checks) == MAX_CHECKS:
            raise ValueError(f"a rank of a case has at most {MAX_CHECKS} checks")
        largest, relative, holds, located = compare(got, wanted, atol, rtol)
        self.checks.append({"tensor": str(name), "against": str(against), "rank": self.rank, "max_abs_err": largest, "rel_err": relative,
                            "tolerance": float(atol), "ok": holds, **located})
        return holds

    def result(self, name, value):
        """Adds a value to the answer: anything that JSON can express, 1 MiB in all with what the function returns. NaN and infinities become None."""
        try:
            text = json.dumps(finite(value, words=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"the result {name!r} cannot be sent as JSON: {error}") from None
        self.result_bytes += len(text) + len(str(name)) + 6
        if self.result_bytes > MAX_RESULTS:
            raise ValueError(f"the results of this rank have more than {MAX_RESULTS} bytes with {name!r}")
        self.results[str(name)] = json.loads(text)

    def iterations(self):
        """Yields the iterations to time, after those to warm up: of all ranks the same, begun by all or none."""
        if self._begun:
            raise RuntimeError("iterations() is for one loop of a case")
        until = self._decide(0)
        for _ in range(self._run.get("warmup", 0)):
            yield self._begin(None)
        done, goes_on = 0, True
        while goes_on:
            for index in range(done, until):
                known = len(self._times)
                begin = self._now()
                yield self._begin(index)
                if len(self._times) == known:
                    self._times.append([index, "iteration", begin, self._now()])
                    if self._timeline:
                        self._timeline.name_last("iteration")
                        self._mark()
            self._warms_up = False
            done, goes_on = until, False
            if self._run.get("sampling"):
                until = self._decide(done)
                goes_on = until > done
        self._iteration = None
        self._mark()

    def _mark(self):
        if self._timeline:
            iteration = self._iteration if self._iteration is not None else _Timeline.WARMUP if self._warms_up else -1
            self._timeline.mark("/".join(self._stages), iteration)

    def _begin(self, index):
        self._iteration, self._warms_up = index, index is None
        self._begun += 1
        self._mark()
        self._page.write(CASE, "/".join(self._stages), self._begun)
        return index if index is not None else -1

    def _decide(self, iteration):
        stage = "/".join(self._stages)
        self._page.write(WAITS, stage, self._begun)
        until = self._ask(iteration, self.samples() if iteration else [])
        self._page.write(CASE, stage, self._begun)
        return until

    def _now(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = sys.modules["torch"].cuda.Event(enable_timing=True)
        event.record()
        return event

    def _by_stage(self):
        """stage -> iteration (None: outside) -> milliseconds. On a GPU all work must be over."""
        if self._on_gpu:
            sys.modules["torch"].cuda.synchronize()
        found = {}
        for iteration, stage, begin, end in self._times:
            if end is not None:
                each = found.setdefault(stage, {})
                each[iteration] = each.get(iteration, 0.0) + (begin.elapsed_time(end) if self._on_gpu else (end - begin) * 1e3)
        return found

    def trace(self):
        """Members of the report."""
        return {"trace": self._timeline.member()} if self._timeline else {}

    def samples(self):
        """Of each timed iteration, the stages that are no part of another one."""
        return [[stage, [ms for iteration, ms in times.items() if iteration is not None]]
                for stage, times in self._by_stage().items() if "/" not in stage and any(iteration is not None for iteration in times)]

    def gpu_ms(self):
        """The median of the timed iterations, or the time outside of them."""
        return [[stage, statistics.median([ms for iteration, ms in times.items() if iteration is not None] or times.values())]
                for stage, times in self._by_stage().items()]
