"""Cases for the tests of Python ranks with torch."""
import ctypes
import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def reduce(world):
    total = torch.full([4], world.rank + 1.0)
    with world.stage("reduce"):
        dist.all_reduce(total)
    world.check("total", total, torch.full([4], world.size * (world.size + 1) / 2))
    return [str(world.device), world.group is dist.group.WORLD]


def digest(world):
    """Of sums over all ranks, over pairs, and of what each has drawn."""
    drawn = torch.randn(1000) * (world.rank + 1)
    total, pairs = drawn.clone(), drawn.clone()
    dist.all_reduce(total)
    groups = [dist.new_group([first, first + 1]) for first in range(0, world.size, 2)]
    dist.all_reduce(pairs, group=groups[world.rank // 2])
    return hashlib.sha256(bytes(torch.cat([drawn, total, pairs]).view(torch.uint8).tolist())).hexdigest()


def fault(world, kind):
    """The last rank has the fault while the others are in a collective, which is the second one of the group."""
    dist.all_reduce(torch.ones(1))
    if world.rank == world.size - 1:
        with world.stage("fault"):
            FAULTS[kind]()
    dist.all_reduce(torch.ones(1))


def raise_error():
    raise ValueError("planted")


def fail_assertion():
    assert torch.equal(torch.ones(2), torch.zeros(2))


def grow():
    import resource
    pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 28), resource.RLIM_INFINITY))
    held = []
    while True:
        held.append(torch.ones(1 << 22))


FAULTS = {"exception": raise_error, "memory": grow, "assertion": fail_assertion, "exit": lambda: sys.exit(3), "_exit": lambda: os._exit(5), "abort": os.abort,
          "segmentation fault": lambda: ctypes.string_at(0), "sleep": lambda: time.sleep(1000), "GIL": lambda: ctypes.PyDLL(None).sleep(1000),
          "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP)}


def group_of_one_rank(world):
    """The last rank makes a group that the others do not make."""
    if world.rank == world.size - 1:
        with world.stage("fault"):
            dist.new_group(list(range(world.size)))
    dist.all_reduce(torch.ones(1))


def hang_in_a_group(world, others):
    """Rank 1 keeps rank 0 waiting in their group; the others have finished, or are in a collective of the world."""
    pair = dist.new_group([0, 1])
    if world.rank == 1:
        with world.stage("fault"):
            time.sleep(1000)
    if world.rank == 0:
        dist.all_reduce(torch.ones(1), group=pair)
    elif others == "wait":
        dist.barrier()


def lent(world):
    """As a test does that torchrun starts; once more by each name that the backend has here."""
    assert dist.is_initialized()
    total = 0
    for backend in ("gloo", "cpu:gloo", None):
        dist.init_process_group(backend, init_method="env://", timeout=__import__("datetime").timedelta(seconds=100))
        group = dist.new_group(list(range(world.size)))
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        total += one.item()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return total


def init_with(world, **arguments):
    dist.init_process_group(**arguments)
    dist.init_process_group(**arguments)


def own(world):
    """A group of the case's own, over torchrun's variables."""
    assert not dist.is_initialized() and world.group is None
    dist.init_process_group("gloo")
    group = dist.new_group(list(range(world.size)))
    one = torch.ones(1)
    dist.all_reduce(one, group=group)
    assert dist.get_world_size() == world.size
    return one.item()


def leaves_groups(world):
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=dist.new_group(list(range(world.size))))


def changes_state(world):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_cache_enabled(False)
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def leaves_a_mode_open(world):
    torch.utils._python_dispatch.TorchDispatchMode().__enter__()


def leaves_autocast_open(world):
    for _ in range(2):
        torch.autocast("cpu").__enter__()
    return cast_twice(world)


def cast_twice(world):
    """What a weight gives before and after an optimizer's step, each in a context of its own."""
    weight, sums = torch.nn.Parameter(torch.ones(2, 2)), []
    for _ in range(2):
        with torch.autocast("cpu"):
            sums.append((torch.ones(2, 2) @ weight).sum().item())
        with torch.no_grad():
            weight.mul_(2)
    return sums


def leaves_hooks_open(world):
    torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor * 2).__enter__()


def gradient(world):
    x = torch.ones(1, requires_grad=True)
    (x * x).backward()
    return [x.grad.item(), torch.cuda.is_initialized()]


def changes_compiler_settings(world):
    torch._dynamo.config.recompile_limit = 3
    torch._inductor.config.max_autotune = True


def compiler_settings(world):
    return [torch._dynamo.config.recompile_limit, torch._inductor.config.max_autotune]


def draws(world):
    world.result("drawn", torch.rand(1).item())
    world.result("product", torch.ones(500, 500).matmul(torch.ones(500, 500)).sum().item())  # threads of libgomp, after the fork


def wrong(world):
    world.check("out", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.25]), against="no_cp", atol=0.1, rtol=0.05)
    world.check("nan", torch.tensor([float("nan")]), torch.tensor([1.0]), atol=1e9)


kept = {}  # as a library's own globals, which no snapshot knows


def set_dtype(_):
    torch.set_default_dtype(torch.float64)


def set_variable(_):
    os.environ["OF_LIBRARY"] = "1"


def register_hook(_):
    torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: out * 2)


def make_group(world):
    return dist.new_group(list(range(world.size)))


LEAKS = {"dtype": set_dtype, "variable": set_variable, "hook": register_hook, "group": make_group}


def leaks(world, kind, keep):
    """keep: as a library that sets it again at its next use, or uses a group by its name, which is destroyed by then."""
    group = LEAKS[kind](world)
    if keep:
        kept.update({"group": group.group_name} if group else {"again": LEAKS[kind]})


def holds_a_group(world):
    kept["held"] = make_group(world)


def needs_no_leak(world):
    kept.get("again", lambda _: None)(world)
    dist.distributed_c10d._resolve_process_group(kept.get("group", dist.group.WORLD.group_name))
    assert len(dist.distributed_c10d._world.pg_names) == 1
    assert torch.ones(1).dtype == torch.float32 and "OF_LIBRARY" not in os.environ
    assert torch.nn.Identity()(torch.ones(1)).item() == 1
