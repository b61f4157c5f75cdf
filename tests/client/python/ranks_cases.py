"""Cases for the tests of Python ranks. `meet` stands for a collective where there is no torch."""
import ctypes
import functools
import os
import signal
import subprocess
import sys
import threading
import time


def meet(world, folder, step="meeting"):
    """Returns when all ranks have come."""
    with world.stage(step):
        open(os.path.join(folder, f"{step} {world.rank}"), "w", encoding="ascii").close()
        while any(not os.path.exists(os.path.join(folder, f"{step} {rank}")) for rank in range(world.size)):
            time.sleep(0.005)


def passes(world, text="hello"):
    print(text, "from rank", world.rank)
    return world.rank


def server():
    """The process that forked this rank."""
    return os.getppid()


def takes_no_world(a, b=2):
    return a + b


def fault(world, folder, kind):
    """The last rank has the fault, after all have met; the others wait for it in a second meeting."""
    meet(world, folder, "first")
    if world.rank == world.size - 1:
        with world.stage("fault"):
            FAULTS[kind](folder)
    meet(world, folder, "second")


def grow(_):
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(bytearray(1 << 26))


def raise_error(_):
    raise ValueError("planted")


def fail_assertion(_):
    out = 2
    assert out == 3


def write_pid(folder, pid):
    with open(os.path.join(folder, "pid"), "w", encoding="ascii") as file:
        file.write(str(pid))


def leave_child(folder):
    write_pid(folder, subprocess.Popen(["sleep", "1000"]).pid)


def leave_orphan(folder, **options):
    """Of a child that has ended."""
    output = subprocess.run([sys.executable, "-c", f"import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL, **{options}).pid)"],
                            check=True, stdout=subprocess.PIPE).stdout
    write_pid(folder, int(output))


def stop(_):
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS = {
    "exception": raise_error, "assertion": fail_assertion, "memory": grow, "exit": lambda _: sys.exit(3), "_exit": lambda _: os._exit(5),
    "abort": lambda _: os.abort(), "segmentation fault": lambda _: ctypes.string_at(0), "sleep": lambda _: time.sleep(1000),
    "GIL": lambda _: ctypes.PyDLL(None).sleep(1000), "stop": stop, "flood": lambda _: print("x" * 3_000_000),
    "great flood": lambda _: print("\n".join(["x" * 999] * 70_000)),
    "thread": lambda _: threading.Thread(target=time.sleep, args=[1000], name="left over", daemon=True).start(),
    "child": leave_child, "orphan": leave_orphan, "setsid orphan": lambda folder: leave_orphan(folder, start_new_session=True),
    "_exit with an orphan": lambda folder: (leave_orphan(folder, start_new_session=True), os._exit(5))}


def change_state(world):
    import gc
    import logging
    import random
    import resource
    import warnings
    os.environ["SECRET_OF_TEST"] = "hidden value"
    os.chdir("/")
    os.umask(0o77)
    sys.path.append("/nonexistent")
    sys.setrecursionlimit(5000)
    sys.setswitchinterval(0.5)
    sys.unraisablehook = threading.excepthook = print
    gc.callbacks.append(lambda *_: None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    logging.getLogger().setLevel(logging.DEBUG)
    logging.getLogger("mine").addHandler(logging.NullHandler())
    warnings.simplefilter("error")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    sys.stdout = open(os.devnull, "w", encoding="ascii")
    random.seed(99)


def be_nice(world):
    os.nice(1)


def draw(world):
    import random
    world.result("drawn", random.random())
    return [os.environ.get("SECRET_OF_TEST"), os.getcwd(), sys.getrecursionlimit(), "/nonexistent" in sys.path]


def leave_shared_memory(world, name=None):
    open(f"/dev/shm/{name or f'of_{os.getpid()}'}", "w", encoding="ascii").close()


def end_with_shared_memory(world, folder, kind):
    from multiprocessing.shared_memory import SharedMemory
    with open(os.path.join(folder, f"name {world.rank}"), "w", encoding="ascii") as file:
        file.write(SharedMemory(create=True, size=1).name)
    meet(world, folder)
    {"passes": lambda: None, "_exit": lambda: os._exit(5), "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL), "hang": lambda: time.sleep(1000)}[kind]()


def leave_file(world):
    os.open("/etc/hostname", os.O_RDONLY)


def open_many_files(world):
    files = [open("/etc/hostname", "rb") for _ in range(100)]
    return max(file.fileno() for file in files)


def leave_cycle(world):
    class Holder:
        pass
    holder = Holder()
    holder.itself, holder.file = holder, open("/etc/hostname", encoding="ascii")


def measure(world):
    with world.stage("before"):
        pass
    for index in world.iterations():
        with world.stage("forward"):
            with world.stage("attend"):
                time.sleep(0.001)
    world.check("out", [1.0, 2.0], [1.0, 2.5], against="reference", atol=0.6)
    world.result("index", index)


def traced_failure(world):
    for index in world.iterations():
        if index == 2:
            with world.stage("last"):
                assert world.rank == 0
        time.sleep(0.001)


def many_stages(world, count):
    for _ in range(count):
        with world.stage("short"):
            pass


def wrong(world):
    world.check("out", [1.0, float("nan")], [1.0, 2.0], atol=1e9)
    world.check("infinite", [1.0], [float("inf")], atol=1.0, rtol=1.0)
    world.check("the same", [float("-inf")], [float("-inf")])
    world.check("several", [[1, 2, 3], [4, 5, 6]], [[1, 2, 3.5], [4, 7, 6]])


def unsendable(world, what):
    deep = []
    for _ in range(100):
        deep = [deep]
    world.result("it", {"file": sys.stdin, "big": 1 << 64, "deep": deep, "long": "x" * (1 << 20)}[what])


def send_and_return(world, sent, returned):
    world.result("it", "x" * sent)
    return "x" * returned


def long_names(world, iterations=False):
    for number in range(100):
        world.check("x" * 50_000 + str(number), 1, 1)
    for _ in world.iterations() if iterations else ():
        for number in range(100):
            with world.stage("y" * 50_000 + str(number)):
                pass


def odd_results(world):
    world.result("numbers", [float("nan"), -2**63, 2**64 - 1])
    world.result("text", "half \udc80 of a pair")
    return float("inf")


def skips(world):
    import unittest
    raise unittest.SkipTest("not on a Sunday")


def environment(world, name):
    return os.environ.get(name)


async def coroutine(world):
    pass


def wrap(function):
    @functools.wraps(function)
    def wrapper(**arguments):
        return function(**arguments)
    return wrapper


wrapped_coroutine = wrap(coroutine)


@wrap
def wrapped_generator(world):
    yield


@wrap
async def wrapped_async_generator(world):
    yield


class AsyncCallable:
    async def __call__(self, world):
        pass


async_callable = AsyncCallable()
not_callable = 3
