"""Cases for the tests of Python ranks with torch on GPUs."""
import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import torch_cases

kept = []


def reduce(world):
    total = torch.full([1 << 20], world.rank + 1.0, device=world.device)
    for _ in world.iterations():
        with world.stage("reduce"):
            dist.all_reduce(total)
            total /= world.size * (world.size + 1) / 2
            total *= world.rank + 1
    world.check("total", total / (world.rank + 1), torch.ones_like(total), atol=1e-4)
    return [str(world.device), dist.get_backend(), world.group is dist.group.WORLD]


def lent(world):
    for backend in ("nccl", "cuda:nccl", None):
        dist.init_process_group(backend)
        group = dist.new_group(list(range(world.size)))
        one = torch.ones(1, device=world.device)
        dist.all_reduce(one, group=group)
        dist.destroy_process_group()
    return one.item()


def keeps_memory(world):
    kept.append(torch.ones(1 << 20, device=world.device))


def keeps_a_graph(world):
    graph, one = torch.cuda.CUDAGraph(), torch.ones(1 << 24, device=world.device)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of the group ask for events meanwhile
        one * 2
    kept.append(graph)


def keeps_a_pool(world):
    kept.append(torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(kept[-1]):
        torch.empty(1 << 24, device=world.device)


def keeps_most_memory(world):
    kept.append(torch.empty(torch.cuda.mem_get_info()[0] // 4 * 3, dtype=torch.uint8, device=world.device))


def needs_most_memory(world):
    torch.empty(torch.cuda.get_device_properties(world.device).total_memory // 2, dtype=torch.uint8, device=world.device)


def multiplies(world):
    matrix = torch.ones(256, 256, device=world.device)
    return (matrix @ matrix)[0, 0].item()


def changes_stream():
    torch.cuda.set_stream(torch.cuda.Stream())


def changes_device(world):
    torch.cuda.set_device((world.device.index + 1) % torch.cuda.device_count())


def device_and_stream():
    return [torch.cuda.current_device(), torch.cuda.current_stream() == torch.cuda.default_stream()]


def fault(world, kind):
    """The last rank has the fault while the others are in a collective."""
    one = torch.ones(1, device=world.device)
    dist.all_reduce(one)
    torch.cuda.synchronize()
    if world.rank == world.size - 1:
        with world.stage("fault"):
            FAULTS[kind](world)
    dist.all_reduce(one)
    torch.cuda.synchronize()


def raise_error(_):
    raise ValueError("planted")


def fail_assertion(world):
    assert torch.equal(torch.ones(2, device=world.device), torch.zeros(2, device=world.device))


def out_of_memory(world):
    held = [torch.empty(1 << 34, dtype=torch.uint8, device=world.device) for _ in range(100)]
    print(len(held))


def assert_on_device(world):
    table = torch.zeros(4, device=world.device)
    print(table[torch.tensor([1 << 20], device=world.device)])
    torch.cuda.synchronize()


def spin(world):
    torch.cuda._sleep(1 << 40)
    torch.cuda.synchronize()


FAULTS = {"exception": raise_error, "assertion": fail_assertion, "exit": lambda _: sys.exit(3), "_exit": lambda _: os._exit(5), "abort": lambda _: os.abort(),
          "segmentation fault": lambda _: ctypes.string_at(0), "sleep": lambda _: time.sleep(1000), "out of memory": out_of_memory,
          "assertion on the device": assert_on_device, "kernel that does not end": spin, "memory": lambda _: torch_cases.grow(),
          "GIL": lambda _: ctypes.PyDLL(None).sleep(1000), "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP)}
