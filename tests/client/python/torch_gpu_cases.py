"""Cases for the tests of Python ranks with torch on GPUs."""
import ctypes
import os
import sys
import time

import torch
import torch.distributed as dist

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
    for _ in range(2):
        dist.init_process_group("nccl")
        group = dist.new_group(list(range(world.size)))
        one = torch.ones(1, device=world.device)
        dist.all_reduce(one, group=group)
        dist.destroy_process_group()
    return one.item()


def keeps_memory(world):
    kept.append(torch.ones(1 << 20, device=world.device))


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
          "assertion on the device": assert_on_device, "kernel that does not end": spin}
