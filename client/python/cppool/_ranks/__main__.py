"""The fork server of Python ranks: `PYTHON FOLDER [--preload a,b]`, with a socket to the daemon as fd 0. README.md has the frames."""
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import re
import select
import signal
import socket
import sys
import time
import traceback

FOLDER = os.path.dirname(os.path.abspath(__file__))
# Started by its path, so that ranks run in Pythons that do not have cppool, and under a name that no module of the user has.
_spec = importlib.util.spec_from_file_location("_cppool_ranks", os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER])
sys.modules["_cppool_ranks"] = importlib.util.module_from_spec(_spec)
from _cppool_ranks import code, rank  # noqa: E402
from _cppool_ranks.frames import BrokenFrame, Channel  # noqa: E402

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MARK = "CPPOOL_RANKS_OF"  # in the environment: the daemon that all of this is for
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
    return file_text(f"/proc/{pid}/stat").rpartition(b") ")[2].split()[19:20]


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


def remove_shared_memory(pid, port, since):
    """Removes names in /dev/shm that have the dead rank's pid or its world's port in them and are not older than the rank."""
    for entry in os.scandir("/dev/shm") if os.path.isdir("/dev/shm") else ():
        try:
            if re.search(rf"(?<!\d)({pid}|{port})(?!\d)", entry.name) and entry.stat(follow_symlinks=False).st_ctime >= since:
                os.unlink(entry.path)
        except OSError:
            pass


class Server:
    def __init__(self, channel, deferred, user_threads):
        self.channel, self.deferred = channel, deferred
        self.pid, self.user_threads = os.getpid(), user_threads
        self.ranks = {}  # pid -> (rank, port, when it was forked)
        self.files = {}  # of preloaded modules -> what identifies their content

    def remember_files(self):
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if isinstance(path, str):
                self.files[path] = code.signature(path)

    def fork(self, frame):
        count = 5 if frame["rank"] == 0 else 4
        descriptors = [self.channel.descriptors.popleft() for _ in range(count)]
        try:
            sys.stderr.flush()
            pid = os.fork()
        except OSError as error:
            self.channel.send("forked", rank=frame["rank"], error=f"a rank cannot be forked: {error}")
        else:
            if pid == 0:
                self.become_rank(frame, descriptors)
            self.ranks[pid] = (frame["rank"], frame["port"], time.time())
            self.channel.send("forked", rank=frame["rank"], pid=pid)
        for descriptor in descriptors:
            os.close(descriptor)

    def become_rank(self, frame, descriptors):
        """Does not return."""
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:
                os._exit(1)  # the server had died before
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
                file.write("500")  # rather than the daemon or the shell
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.close(null)
            self.channel.socket.close()
            for own in (self.wake, self.wake_end):
                own.close()
            rank.Rank(frame, descriptors, self.deferred, self.user_threads).main()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # an ordinary exit would run what modules have registered in the server

    def kill(self, pid, number):
        if pid in self.ranks:
            try:
                os.kill(pid, number)
                if number == signal.SIGKILL:
                    os.killpg(pid, number)  # the rest of its session is found when it is reaped
            except ProcessLookupError:
                pass  # it has not made its group yet

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.ranks:
                number, port, since = self.ranks.pop(pid)
                killed = self.kill_strays()
                remove_shared_memory(pid, port, since)
                self.channel.send("ended", rank=number, pid=pid, status=status, killed=killed)

    def kill_strays(self):
        """A rank adopts what its children leave behind, and this server what a dead rank does: whatever else is a child of it is killed."""
        killed, limit = set(), time.monotonic() + 1  # a process in an uninterruptible call cannot be waited for
        while time.monotonic() < limit:
            children = {int(child) for child in file_text(f"/proc/self/task/{self.pid}/children").split()} - set(self.ranks)
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

    def end(self):
        """Ends all ranks and this process."""
        for pid in list(self.ranks):
            self.kill(pid, signal.SIGKILL)
        for pid, (_, port, since) in self.ranks.items():
            os.waitpid(pid, 0)
            remove_shared_memory(pid, port, since)
        self.ranks.clear()
        self.kill_strays()
        os._exit(0)

    def serve(self):
        self.wake, self.wake_end = socket.socketpair()
        for own in (self.wake, self.wake_end):
            own.setblocking(False)
        signal.set_wakeup_fd(self.wake_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for each in (self.wake, self.channel.socket):
            poll.register(each, select.POLLIN)
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
            self.channel.send("checked", changed=sorted(path for path, known in self.files.items() if code.signature(path) != known)[:16])
        else:
            raise BrokenFrame(f"unknown frame {frame['frame']!r:.80}")


def main(arguments):
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # until it reads fd 0, whose end it would not see before
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.path.pop(0)  # this folder
    environment = dict(os.environ)
    options = {"--preload": [], "--defer": []}
    for name, value in zip(arguments[::2], arguments[1::2]):
        options[name] = [module for module in value.split(",") if module]
    channel = Channel(socket.socket(fileno=0))
    if sys.version_info < (3, 9):
        channel.send("ready", error=f"{sys.executable} is Python {sys.version.split()[0]}: ranks need 3.9 or later", module=None, traceback="")
        os._exit(2)
    kill_abandoned()
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
            channel.send("ready", error=f"--preload {module}: it cannot be imported by {sys.executable}: {type(error).__name__}: {error}"[:8000],
                         module=module, traceback=traceback.format_exc()[-64000:])
            os._exit(2)
        import_ms.append([module, round((time.perf_counter() - begin) * 1e3, 1)])
        why = unforkable()
        if why:
            log(f"{module} cannot be imported before the fork, since {why}; each rank imports it")
            defer = ",".join([*options["--defer"], f"{module}={why.replace(',', ';')}"])
            os.execve(sys.executable, [sys.executable, FOLDER, "--preload", ",".join(options["--preload"]), "--defer", defer], environment)
    server = Server(channel, list(deferred), user_threads)
    server.remember_files()
    gc.collect()
    gc.freeze()  # ranks then share this memory, and do not search it
    prctl(PR_SET_PDEATHSIG, 0)
    torch = sys.modules.get("torch")
    channel.send("ready", pid=server.pid, python=".".join(map(str, sys.version_info[:3])), torch=str(getattr(torch, "__version__", "")) or None,
                 preloaded=[module for module in options["--preload"] if module not in deferred],
                 deferred=[{"module": module, "why": why} for module, why in deferred.items()], import_ms=import_ms)
    try:
        server.serve()
    except BrokenFrame as error:
        log(error)
    except BaseException:
        traceback.print_exc()
    os._exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
