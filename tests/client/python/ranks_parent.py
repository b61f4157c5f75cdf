"""A parent of Python ranks, for tests: does what the daemon does with a fork server and a world of ranks, in 150 lines of Python."""
import importlib.util
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

FOLDER = os.path.join(os.environ["CPPOOL_BUILD"], "share", "cppool", "_ranks")
_spec = importlib.util.spec_from_file_location("_frames", os.path.join(FOLDER, "frames.py"))
frames = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(frames)

LIMIT = 120  # of any wait: a backstop
GRACE = 0.2  # after the first failure, for one that explains more


def start_time(pid="self"):
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(") ")[2].split()[19]


class Reader(threading.Thread):
    """Puts the frames of a socket into a queue, each with whose it is; None at the end."""

    def __init__(self, connection, name, into):
        super().__init__(daemon=True)
        self.channel, self.source, self.into = frames.Channel(connection), name, into
        self.start()

    def run(self):
        while True:
            for frame in self.channel.receive():
                self.into.put((self.source, frame))
                if frame is None:
                    return


def drain(descriptor, into):
    """Collects what comes from a pipe."""
    def read():
        while True:
            text = os.read(descriptor, 1 << 16)
            if not text:
                return os.close(descriptor)
            into.append(text)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


class Server:
    def __init__(self, python=sys.executable, preload="", environment=None, of=None):
        ours, theirs = socket.socketpair()
        mark = of or f"{os.getpid()}:{start_time()}"
        self.log = []
        read, write = os.pipe()
        self.process = subprocess.Popen([python, FOLDER, *(["--preload", preload] if preload else [])], stdin=theirs, stdout=write, stderr=write,
                                        env={**os.environ, "CPPOOL_RANKS_OF": mark, **(environment or {})})
        theirs.close()
        os.close(write)
        self.drain = drain(read, self.log)
        self.frames = queue.Queue()
        self.reader = Reader(ours, "server", self.frames)
        self.ready = self.next("ready")

    def send(self, frame, **members):
        self.reader.channel.send(frame, **members)

    def next(self, name):
        frame = self.frames.get(timeout=LIMIT)[1]
        assert frame and frame["frame"] == name, (frame, self.text())
        return frame

    def text(self):
        return b"".join(self.log).decode()

    def end(self):
        """Its exit code."""
        self.send("bye")
        return self.process.wait(timeout=LIMIT)


class Rank:
    def __init__(self, server, rank, size, port, backend, listener, into):
        ours, theirs = socket.socketpair()
        page, (output, write_output), (stacks, write_stacks) = os.memfd_create("page"), os.pipe(), os.pipe()
        os.truncate(page, frames.Page.SIZE)
        self.page = frames.Page(os.dup(page))
        given = [theirs.fileno(), page, write_output, write_stacks, *([listener.fileno()] if rank == 0 else [])]
        line = frames.json.dumps({"frame": "fork", "rank": rank, "size": size, "local_rank": rank, "local_size": size, "node": 0, "host": "127.0.0.1",
                                  "port": port, "backend": backend})
        socket.send_fds(server.reader.channel.socket, [line.encode() + b"\n"], given)
        theirs.close()
        for descriptor in (page, write_output, write_stacks):
            os.close(descriptor)
        self.output, self.stacks = [], []
        self.drains = [drain(output, self.output), drain(stacks, self.stacks)]
        self.reader = Reader(ours, rank, into)
        self.pid = server.next("forked")["pid"]

    def send(self, frame, **members):
        try:
            self.reader.channel.send(frame, **members)
        except OSError:
            pass  # it has died, which its end tells

    def stage(self):
        """(phase, stage, iteration)"""
        while True:
            known = self.page.read()
            if known:
                return known


class Outcome:
    """Of a load or a run: the status of the case, the rank that caused a failure, and what all have reported."""

    def __init__(self, reports, failures):
        self.reports, self.ended = reports, {}  # ended: where the ranks were replaced, as output and stacks
        explained = sorted(failures, key=lambda each: each.get("culprit") is None)  # the first one that is a rank's own
        worst = explained[0] if explained else {}
        self.status = worst.get("status", "passed")
        self.culprit, self.kind, self.error = worst.get("culprit"), worst.get("kind"), worst.get("error", "")
        self.traceback, self.stage = worst.get("traceback", ""), worst.get("stage")
        self.left = {name: entries for report in reports.values() for name, entries in report.get("left", {}).items()}
        self.differed = {name: entries for report in reports.values() for name, entries in report.get("differed", {}).items()}


class World:
    """Ranks that are replaced after a failure and when they have left something behind."""

    def __init__(self, server, size, backend="auto"):
        self.server, self.size, self.backend = server, size, backend
        self.ids = itertools.count(1)
        self.fork()

    def fork(self):
        self.frames = queue.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ranks = [Rank(self.server, rank, self.size, listener.getsockname()[1], self.backend, listener, self.frames) for rank in range(self.size)]
        self.ready = {}
        while len(self.ready) < self.size:
            rank, frame = self.frames.get(timeout=LIMIT)
            assert frame and frame["frame"] == "ready" and "error" not in frame, (frame, self.output(rank), self.server.text())
            self.ready[rank] = frame

    def output(self, rank):
        return b"".join(self.ranks[rank].output).decode("utf-8", "replace")

    def kill(self):
        """Returns {rank: the frame `ended`}, also of those that have died by themselves."""
        for rank in self.ranks:
            self.server.send("kill", pid=rank.pid, signal=signal.SIGKILL)
        ended = [self.server.next("ended") for _ in self.ranks]
        for rank in self.ranks:
            for thread in rank.drains:
                thread.join(LIMIT)
        return {frame["rank"]: frame for frame in ended}

    def load(self, **members):
        return self.ask("load", **members)

    def run(self, **members):
        return self.ask("run", **members)

    def replace(self, outcome):
        outcome.ended, outcome.output = self.kill(), [self.output(rank) for rank in range(self.size)]
        outcome.stacks = [b"".join(rank.stacks).decode() for rank in self.ranks]
        self.fork()

    def ask(self, op, **members):
        """Sends a frame to all ranks and collects their reports, or how they have ended."""
        number = next(self.ids)
        for rank in self.ranks:
            rank.send(op, id=number, **members)
        reports, failures, gone, waiting = {}, [], set(), set()
        limit = time.monotonic() + LIMIT
        while len(reports) + len(gone) < self.size:
            try:
                rank, frame = self.frames.get(timeout=max(0, limit - time.monotonic()))
            except queue.Empty:
                assert failures, f"no report in {LIMIT} s: {[rank.stage() for rank in self.ranks]}"
                break  # the others wait for the one that has failed
            if frame is None:
                gone.add(rank)
                failures.append({"status": "error", "kind": "died", "culprit": rank, "error": f"rank {rank} died"})
            elif frame["frame"] == "report":
                assert frame["id"] == number and frame["rank"] == rank
                reports[rank] = frame
                if frame["status"] != "passed" and op == "load":
                    failures.append(frame)
                elif frame["status"] in ("failed", "skipped") and not any(each["frame"] == "mark" for each in failures if "frame" in each):
                    failures.append(frame)
            elif "error" in frame:
                failures.append(frame)
            else:  # waits for `go`
                waiting.add(rank)
                if len(waiting) == self.size:
                    waiting.clear()
                    until = members.get("repeat", 1) if not members.get("sampling") else min(frame["iteration"] + 3, 6)
                    for each in self.ranks:
                        each.send("go", id=number, until=until)
            if failures and op == "run":
                limit = min(limit, time.monotonic() + GRACE)
        outcome = Outcome(reports, failures)
        if gone or (op == "run" and (outcome.left or outcome.status not in ("passed", "skipped"))):
            self.replace(outcome)
        return outcome
