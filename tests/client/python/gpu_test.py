"""Pools in a process that uses the GPUs itself: with a CUDA context, threads, forks, and PyTorch where it is installed."""
import ctypes
import os
import subprocess
import sys
import threading

import pytest

import cppool
from support import gpus

LIBRARIES = ("libcudart", "libnccl", "libcppool_cuda")
pytestmark = pytest.mark.skipif(gpus() == 0, reason="there is no GPU")


def loaded():
    with open("/proc/self/maps", encoding="utf-8") as file:
        maps = file.read()
    return {name for name in LIBRARIES if name in maps}


def check_cuda(result):
    assert result == 0, f"the CUDA driver returned {result}"


def use_pools(world_size):
    """In this process, in threads, and in a forked child."""
    with cppool.Pools(backend="cuda") as pools:
        results = []
        threads = [threading.Thread(target=lambda: results.append(pools.run({"seed": 7}, world_size=world_size))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [result.ok for result in results] == [True] * 4, [result.describe() for result in results]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if pools.run({"seed": 8}, world_size=world_size).ok else 2
                pools.stop()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert pools.run({"seed": 9}, world_size=world_size).ok


def test_process_with_a_cuda_context():
    before = loaded()
    driver = ctypes.CDLL("libcuda.so.1")
    check_cuda(driver.cuInit(0))
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    check_cuda(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check_cuda(driver.cuCtxSetCurrent(context))
    check_cuda(driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
    use_pools(min(2, gpus()))
    check_cuda(driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(7), ctypes.c_size_t(1 << 20)))  # the context is as before
    check_cuda(driver.cuCtxSynchronize())
    check_cuda(driver.cuMemFree_v2(memory))
    assert loaded() == before


def test_process_that_never_uses_cuda():
    program = ("import cppool\nwith cppool.Pools(backend='cuda') as pools:\n    assert pools.run(world_size=1).ok\n"
               "assert 'libcuda' not in open('/proc/self/maps').read()\n")
    subprocess.run([sys.executable, "-c", program], check=True)


def test_process_with_torch():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1024, device="cuda")
    use_pools(min(2, gpus()))
    assert float(tensor.sum()) == 1024.0

