"""The fork server of Python ranks: `PYTHON FOLDER [--preload a,b]`, with a socket to the daemon as fd 0, or one that listens for several daemons.
README.md has the frames."""
import contextlib
import ctypes
import fcntl
import gc
import glob
import importlib
import importlib.util
import math
import os
import re
import select
import signal
import socket
import stat
import sys
import time
import traceback

FOLDER = os.path.dirname(os.path.abspath(__file__))
# Started by its path, so that ranks run in Pythons that do not have cppool, and under a name that no module of the user has.
_spec = importlib.util.spec_from_file_location("_cppool_ranks", os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER])
sys.modules["_cppool_ranks"] = importlib.util.module_from_spec(_spec)
from _cppool_ranks import code, group, rank, state  # noqa: E402
from _cppool_ranks.frames import BrokenFrame, Channel  # noqa: E402

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MARK = "CPPOOL_RANKS_OF"  # in the environment: the process that all of this ends with
# One thread each, since none survives a fork; libgomp hangs in the child after a parallel region in the parent. Ranks get the user's back.
SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
DEFAULTS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


def prctl(option, value):
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def log(text):
    print(f"cppool fork server: {text}", file=sys.stderr, flush=True)


def file_text(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def start_time(pid):
    """Empty: it has ended, though it may not have been reaped."""
    fields = file_text(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    return [] if fields[:1] in ([b"Z"], [b"X"]) else fields[19:20]


def namespace_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None  # another user's process, or one that has ended


def kill_abandoned():
    """Kills what earlier daemons, which are gone, have left: their ranks died with their fork servers, but not what had left the sessions."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for of in re.findall(rb"(?:^|\0)" + MARK.encode() + rb"=(\d+):(\d+)\0", file_text(f"/proc/{pid}/environ")):
            # The pid means another process in a container's namespace.
            if start_time(int(of[0])) != [of[1]] and int(pid) != os.getpid() and namespace_of(pid) == namespace_of("self"):
                log(f"process {pid} was left by the ranks of a daemon that is gone; it is killed")
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except OSError:
                    pass


def unforkable():
    """Why ranks cannot be forked with what is imported; None: they can. libcuda.so alone is no reason: the driver has not been started."""
    threads = [file_text(f"/proc/self/task/{task}/comm").decode().strip() for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    if threads:
        return f"it starts threads ({', '.join(threads[:4])})"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            return f"it opens {target}"
    return None


def shared_memory_of(pid, port, since, until=math.inf):
    """This user's files in /dev/shm that have the dead rank's pid or its world's port in their names and were made while it lived."""
    for entry in os.scandir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        if re.search(rf"(?<!\d)({pid}|{port})(?!\d)", entry.name) and not entry.name.startswith(state.RECORDS):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and since <= status.st_ctime <= until:
                    yield entry.path


def remove_shared_memory(pid, port, since):
    for path in [*shared_memory_of(pid, port, since), record_of(pid, port)]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def record_of(pid, port):
    """The file that a rank has while it lives, by which the next start finds what it leaves in /dev/shm, should the fork server and the daemon be killed
    at once. Its times say when it lived."""
    return f"/dev/shm/{state.RECORDS}{re.sub(r'[^0-9]', '', namespace_of('self') or '')}.{pid}.{port}"


def remove_unused(path):
    """Where no process has it open or mapped, in whatever container: only then the kernel grants a lease. Returns whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.unlink(path)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def remove_abandoned_memory():
    """Removes the names in /dev/shm of ranks that died with their fork servers and daemons. Their numbers may be another's since: what is in use stays."""
    try:
        folder = os.open("/dev/shm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    with contextlib.suppress(OSError):  # another start does it now: what both have open would stay
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_names_of_records()
    os.close(folder)


def remove_names_of_records():
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # of a lease that ends early
    for path in glob.glob(record_of("*", "*")):
        *_, pid, port = path.split(".")
        if not pid.isdigit() or not port.isdigit() or start_time(pid):
            continue
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if status.st_uid != os.getuid():  # whose processes may be hidden
                continue
            left = shared_memory_of(pid, port, status.st_atime, status.st_mtime + 5)  # seconds, for a rank that was about to say that it lives
            if all([remove_unused(each) for each in left]):
                os.unlink(path)  # else a later start tries again
    signal.signal(signal.SIGIO, signal.SIG_DFL)


class Parent:
    """Of processes that it forks: what else becomes its child has been left behind, and is killed."""

    def __init__(self, files):
        self.pid, self.children = os.getpid(), {}
        self.files = files  # of preloaded modules -> what identifies their content

    def watch(self, connection):
        """A poll for the connection, and for `wake`, which is readable when a child has ended."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.wake, self.wake_end = socket.socketpair()
        for own in (self.wake, self.wake_end):
            own.setblocking(False)
        signal.set_wakeup_fd(self.wake_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for each in (self.wake, connection):
            poll.register(each, select.POLLIN)
        return poll

    def unwatch(self):
        """In a child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for own in (self.wake, self.wake_end):
            own.close()

    def changed(self):
        return sorted(path for path, known in self.files.items() if code.signature(path) != known)

    def ended(self):
        """Reaps what has ended: of each child its pid, its status, and what is known of it."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self.children:
                    yield pid, status, self.children.pop(pid)

    def kill_strays(self):
        """A rank adopts what its children leave behind, a fork server what a dead rank does, and the first process what a dead fork server does."""
        killed, limit = set(), time.monotonic() + 1  # a process in an uninterruptible call cannot be waited for
        while time.monotonic() < limit:
            children = {int(child) for child in file_text(f"/proc/self/task/{self.pid}/children").split()} - set(self.children)
            alive = False
            for child in children:
                try:
                    os.kill(child, signal.SIGKILL)
                    killed.add(child)
                    alive |= os.waitpid(child, os.WNOHANG)[0] == 0
                except (ProcessLookupError, ChildProcessError):
                    pass
            if not children:
                break
            if alive:
                time.sleep(0.0005)
        return len(killed)


class Template(Parent):
    """Has imported the modules, and forks a fork server for each daemon that connects. Ends with the last of them; they die with it."""

    def serve(self, listener):
        """Returns a daemon's connection, in the fork server for it."""
        null = os.open(os.devnull, os.O_RDWR)
        for own in (1, 2):  # were the first daemon's, whose reader waits for their end
            os.dup2(null, own)
        os.close(null)
        poll = self.watch(listener)
        while True:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                self.wake.recv(4096)
            self.reap()
            while listener is not None:
                try:
                    connection, _ = listener.accept()
                except BlockingIOError:
                    break
                if self.changed():  # the daemon starts another one, under the same name
                    poll.unregister(listener)
                    listener.close()
                    listener = None
                elif self.fork(connection, listener):
                    return connection
                connection.close()
            if not self.children:
                os._exit(0)

    def fork(self, connection, listener):
        """True: in the child."""
        pid = os.fork()
        if pid != 0:
            self.children[pid] = None
            return False
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.pid:
            os._exit(1)
        os.setpgid(0, 0)  # the daemon kills it by its group
        self.unwatch()
        listener.close()
        return True

    def reap(self):
        for _ in self.ended():
            self.kill_strays()


class Server(Parent):
    """children: pid -> (rank, port, when it was forked)"""

    def __init__(self, channel, files, deferred, user_threads):
        super().__init__(files)
        self.channel, self.deferred, self.user_threads = channel, deferred, user_threads

    def begin(self, devices):
        """As the daemon would have started it: where it writes, and the devices that its ranks see."""
        descriptor = self.channel.descriptors.popleft()
        for own in (1, 2):
            os.dup2(descriptor, own)
        os.close(descriptor)
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
        count = getattr(sys.modules.get("torch.cuda"), "device_count", None)
        if hasattr(count, "cache_clear"):  # before torch 2.3
            count.cache_clear()

    def fork(self, frame):
        count = 5 if frame["rank"] == 0 else 4
        descriptors = [self.channel.descriptors.popleft() for _ in range(count)]
        since = time.time() - 0.01  # the clock of files is a tick behind
        try:
            sys.stderr.flush()
            pid = os.fork()
        except OSError as error:
            self.channel.send("forked", rank=frame["rank"], error=f"a rank cannot be forked: {error}")
        else:
            if pid == 0:
                self.become_rank(frame, descriptors, since)
            self.children[pid] = (frame["rank"], frame["port"], since)
            self.channel.send("forked", rank=frame["rank"], pid=pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def become_rank(self, frame, descriptors, since):
        """Does not return."""
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:
                os._exit(1)  # the server had died before
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            os.setsid()
            self.unwatch()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
                file.write("500")  # rather than the daemon or the shell
            self.channel.socket.close()
            rank.Rank(frame, descriptors, self.deferred, self.user_threads, record_of(os.getpid(), frame["port"]), since).main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # an ordinary exit would run what modules have registered in the server

    def kill(self, pid, number):
        if pid in self.children:
            try:
                os.kill(pid, number)
                if number == signal.SIGKILL:
                    os.killpg(pid, number)  # the rest of its session is found when it is reaped
            except ProcessLookupError:
                pass  # it has not made its group yet

    def reap(self):
        for pid, status, (number, port, since) in self.ended():
            killed = self.kill_strays()
            remove_shared_memory(pid, port, since)
            with contextlib.suppress(ConnectionError):  # the daemon has gone, as the socket's end tells
                self.channel.send("ended", rank=number, pid=pid, status=status, killed=killed)

    def end(self):
        """Ends all ranks and this process."""
        for pid in list(self.children):
            self.kill(pid, signal.SIGKILL)
        for pid, (_, port, since) in self.children.items():
            os.waitpid(pid, 0)
            remove_shared_memory(pid, port, since)
        self.children.clear()
        self.kill_strays()
        os._exit(0)

    def serve(self):
        poll = self.watch(self.channel.socket)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.wake.fileno() in ready:
                self.wake.recv(4096)
                self.reap()
            if self.channel.socket.fileno() in ready:
                for frame in self.channel.receive():
                    self.handle(frame)

    def handle(self, frame):
        if frame is None or frame["frame"] == "bye":
            self.end()
        elif frame["frame"] == "fork":
            self.fork(frame)
        elif frame["frame"] == "kill":
            self.kill(frame["pid"], frame["signal"])
        elif frame["frame"] == "check":
            self.channel.send("checked", changed=self.changed()[:16])
        elif frame["frame"] == "begin":
            self.begin(frame["devices"])
        else:
            raise BrokenFrame(f"unknown frame {frame['frame']!r:.80}")


def import_first_used():
    """Imports what a rank would import for its first snapshot and its first seed."""
    with contextlib.suppress(Exception):  # a rank meets it again, and reports it
        state.Snapshot()
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")


def fail(connection, listens, **members):
    """Tells all daemons that wait why there is no fork server, and ends."""
    while True:
        try:
            each = connection.accept()[0] if listens else connection
        except BlockingIOError:
            break
        with contextlib.suppress(OSError):
            Channel(each).send("ready", **members)
        if not listens:
            break
    os._exit(2)


def main(arguments):
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # until it reads fd 0, whose end it would not see before
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.path.pop(0)  # this folder
    connection = socket.socket(fileno=os.dup(0))
    listens = bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    if listens:
        connection.setblocking(False)
        own = f"{os.getpid()}:{b''.join(start_time('self')).decode()}"
        if os.environ.get(MARK) != own:  # it ends with this process, and not with the daemon that came first
            os.execve(sys.executable, [sys.executable, FOLDER, *arguments], {**os.environ, MARK: own})
    with open(os.devnull, "rb") as null:  # modules' helpers inherit fd 0, and none of the others
        os.dup2(null.fileno(), 0)
    environment = dict(os.environ)
    options = {"--preload": [], "--defer": []}
    for name, value in zip(arguments[::2], arguments[1::2]):
        options[name] = [module for module in value.split(",") if module]
    if sys.version_info < (3, 9):
        fail(connection, listens, error=f"{sys.executable} is Python {sys.version.split()[0]}: ranks need 3.9 or later", module=None, traceback="")
    kill_abandoned()
    remove_abandoned_memory()
    user_threads = {name: os.environ.get(name) for name in SINGLE}
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # of a pytest that started the daemon
    os.environ.update({**DEFAULTS, **os.environ, **SINGLE})
    code.preloaded.update(options["--preload"])
    import_ms, deferred = [], dict(entry.split("=", 1) for entry in options["--defer"])
    for module in options["--preload"]:
        if module in deferred:
            continue
        begin = time.perf_counter()
        try:
            importlib.import_module(module)
        except BaseException as error:
            fail(connection, listens, error=f"--preload {module}: it cannot be imported by {sys.executable}: {type(error).__name__}: {error}"[:8000]
                 + ": mend or install it there, or leave it out", module=module, traceback=traceback.format_exc()[-64000:])
        import_first_used()
        import_ms.append([module, round((time.perf_counter() - begin) * 1e3, 1)])
        why = unforkable()
        if why:
            log(f"{module} cannot be imported before the fork, since {why}; each rank imports it")
            defer = ",".join([*options["--defer"], f"{module}={why.replace(',', ';')}"])
            os.dup2(connection.fileno(), 0)
            os.execve(sys.executable, [sys.executable, FOLDER, "--preload", ",".join(options["--preload"]), "--defer", defer], environment)
    group.importers()
    code.modules()
    files = code.signatures = {path: code.signature(path) for path in set(code.files_of_modules(list(sys.modules)))}
    gc.collect()
    gc.freeze()  # ranks then share this memory, and do not search it
    prctl(PR_SET_PDEATHSIG, 0)
    try:
        if listens:
            connection = Template(files).serve(connection)
        server = Server(Channel(connection), files, list(deferred), user_threads)
        torch = sys.modules.get("torch")
        server.channel.send("ready", pid=server.pid, python=".".join(map(str, sys.version_info[:3])), torch=str(getattr(torch, "__version__", "")) or None,
                            preloaded=[module for module in options["--preload"] if module not in deferred],
                            deferred=[{"module": module, "why": why} for module, why in deferred.items()], import_ms=import_ms)
        server.serve()
    except BrokenFrame as error:
        log(error)
    except BaseException:
        traceback.print_exc()
    os._exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
