"""What the tests of the Python package share: pools of the fake daemon, and a server."""
import contextlib
import os
import pathlib
import subprocess
import time

import cppool

BUILD = os.environ["CPPOOL_BUILD"]
FAKE = os.path.join(BUILD, "bin", "cppool_fake_daemon")
MODULE = os.path.join(BUILD, "lib", "libcppool_cuda.so")
FAKE_DRIVER = os.path.join(BUILD, "tests", "kernels", "module", "fake_driver")  # its results are set by environment variables
ROOT = pathlib.Path(__file__).parents[3]
NAIVE = ROOT / "kernels/examples/naive.c"  # a kernel of cppool/attention.h
SHORT = {"daemon": FAKE, "start_limit": 60.0, "grace": 0.2, "kill_grace": 0.3}


def gpus():
    """How many GPUs CUDA shows a process of the caller."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(device not in ("", "-1") for device in visible.split(","))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=False).stdout
    except OSError:
        listed = ""
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def fake_pool(world_size=2, **options):
    return cppool.Pool(world_size, **{**SHORT, **options})


def do(what, **params):
    return {"do": what, **params}


def eventually(holds):
    """A backstop, not a measurement."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if holds():
            return True
        time.sleep(0.005)
    return False


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "XZ"
    except OSError:  # ESRCH of the read too: it has ended since the file was opened
        return False


def children_of(pid):
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:  # the thread has ended
            found += [int(child) for child in file.read().split()]
    return found


@contextlib.contextmanager
def serving(folder):
    """The socket of a server that runs meanwhile."""
    socket = os.path.join(str(folder), "socket")
    command = [os.path.join(BUILD, "bin", "cppool"), "serve", "--socket", socket]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert "serves at" in server.stderr.readline()
        try:
            yield socket
        finally:
            server.terminate()
            assert "has ended" in server.stderr.read()


def launcher(folder, agents=2):
    """The words of a launcher: a script that starts so many agents here."""
    script = os.path.join(str(folder), "launch")
    with open(script, "w", encoding="ascii") as file:
        file.write(f"#!/bin/sh\nfor i in $(seq 0 {agents - 1}); do CPPOOL_AGENTS={agents} CPPOOL_AGENT_INDEX=$i \"$@\" & done; wait\n")
    os.chmod(script, 0o700)
    return f"'{script}'"
