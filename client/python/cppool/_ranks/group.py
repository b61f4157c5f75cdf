"""The warm process group of torch, made once and lent to every case."""
import ctypes
import datetime
import importlib
import json
import os
import sys
import time

from . import code

LIMIT = datetime.timedelta(days=1)  # the daemon ends what waits too long


def nccl_version(torch):
    """Of the library that is loaded: torch tells the one that it was built with."""
    if not torch.distributed.is_nccl_available():
        return 0, 0
    try:
        version = ctypes.c_int()
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(version))
        return version.value // 10000, version.value // 100 % 100, version.value % 100
    except (OSError, AttributeError):  # none is loaded by this name: it is part of torch's own libraries
        return tuple(torch.cuda.nccl.version())


def choose(backend, size, torch):
    """The backend's name ("none" without a group) and how many GPUs there are. Throws RuntimeError with what to do."""
    if torch is None or not torch.distributed.is_available():
        if backend not in ("auto", "none"):
            raise RuntimeError(f"the backend {backend} needs torch, which is not preloaded: start with --preload torch")
        return "none", 0
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if count else "gloo"
    if "nccl" in backend:
        if not count:
            raise RuntimeError(f"the backend {backend} needs a GPU, and torch sees none here: gloo works without")
        if size > count:
            if nccl_version(torch) < (2, 30):
                raise RuntimeError(f"{size} ranks on {count} GPUs need NCCL 2.30, and this torch has {'.'.join(map(str, nccl_version(torch)))}: "
                                   f"take the backend host, with gloo, or at most {count} ranks")
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return backend, count


@code.until_next_import
def importers():
    """Modules that have names of the functions which Group replaces: torch's, and preloaded ones that import them from there."""
    modules = [module for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    return [(module, name) for module in modules for name in ("init_process_group", "destroy_process_group") if name in vars(module)]


class Group:
    """Replaces init_process_group and destroy_process_group by functions that lend the warm group."""

    def __init__(self, seat, backend, count, torch):
        """seat: the Rank, for its place in the world."""
        self.torch, self.dist = torch, torch.distributed
        self.c10d = importlib.import_module("torch.distributed.distributed_c10d")
        self.rank, self.size, self.backend = rank, size, backend = seat.rank, seat.size, backend
        self.device = torch.device("cuda", seat.local_rank % count) if count else torch.device("cpu")
        if count:
            torch.cuda.set_device(self.device)
            torch.ones(1, device=self.device)
        self.store = self.dist.TCPStore(seat.host, seat.port, size, rank == 0, LIMIT, wait_for_workers=False, multi_tenant=True,
                                        master_listen_fd=os.dup(seat.listener) if seat.listener is not None else None)
        self.taken, self.own, self.hidden, self.begun = False, False, [], 0
        self.warm = None
        if backend != "none":
            self.dist.init_process_group(backend, store=self.dist.PrefixStore("warm", self.store), rank=rank, world_size=size, timeout=LIMIT,
                                         device_id=self.device if count and "nccl" in backend else None)
            self.dist.all_reduce(torch.ones(1, device=self.device if "nccl" in backend else "cpu"))
            self.warm = self.dist.group.WORLD
            self.limit = LIMIT
        self.init, self.destroy = self.dist.init_process_group, self.dist.destroy_process_group
        for module, name in importers():
            for function, own in ((self.init, self._lend), (self.destroy, self._give_back)):
                if vars(module)[name] is function:
                    setattr(module, name, own)

    def _maps(self):
        world = self.c10d._world
        names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state", "pg_flight_recorder_hooks")
        return [getattr(world, name) for name in names if hasattr(world, name)]

    def begin(self, case, own, limit):
        """Before a case. own: the case makes its own group. limit: of a collective."""
        self.case, self.own, self.taken, self.begun = case, own, False, time.time_ns()
        self.c10d._world.group_count = 1  # names as in a fresh process, over keys that no case before has used
        if self.warm is None:
            return
        if own:
            self.hidden = [dict(each) for each in self._maps()]
            for each in self._maps():
                each.clear()
            torch_c = self.torch._C._distributed_c10d
            torch_c._unregister_process_group(self.warm.group_name)
            self.c10d._world.group_count = 0
            self.c10d._update_default_pg(None)
        else:
            self.c10d._world.pg_map[self.warm] = (self.c10d._world.pg_map[self.warm][0], self.dist.PrefixStore(f"case{case}", self.store))
            self._set_limit(limit)

    def end(self):
        """After a case: destroys what it has left, and returns its groups' names."""
        left = []
        world = self.c10d._world
        if self.own or self.warm is None:
            left = list(world.pg_names.values())
            if self.dist.is_initialized():
                self.destroy()
            for each, saved in zip(self._maps(), self.hidden):
                each.update(saved)
            if self.hidden:
                self.torch._C._distributed_c10d._register_process_group(self.warm.group_name, self.warm)
            self.hidden = []
        else:
            left = self._destroy_others()
        if self.warm is not None:
            self.c10d._update_default_pg(self.warm)
        return [str(name) for name in left]

    def _set_limit(self, limit):
        if limit != self.limit:
            if hasattr(self.dist, "set_timeout"):
                self.dist.set_timeout(limit, self.warm)
            else:  # an older torch
                self.c10d._set_pg_timeout(limit, self.warm)
            self.limit = limit

    def _destroy_others(self):
        names = [(group, name) for group, name in self.c10d._world.pg_names.items() if group is not self.warm]
        for group, _ in names:
            self.destroy(group)
        return [name for _, name in names]

    def _lend(self, backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, group_name="", pg_options=None, device_id=None, **more):
        if self.own or self.warm is None:
            if store is None and init_method in (None, "env://"):  # torchrun's store, without keys of cases before
                store, init_method = self.dist.PrefixStore(f"own{self.case}", self.store), None
                rank = rank if rank >= 0 else int(os.environ["RANK"])
                world_size = world_size if world_size > 0 else int(os.environ["WORLD_SIZE"])
            return self.init(backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id, **more)
        if self.taken and self.dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        asked = {"rank": rank if rank >= 0 else int(os.environ.get("RANK", self.rank)),
                 "world_size": world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", self.size)),
                 "backend": str(backend).lower() if backend is not None else self.backend}
        for name, warm in (("rank", self.rank), ("world_size", self.size), ("backend", self.backend)):
            if asked[name] != warm and not (name == "backend" and self._by_device(backend) == self._by_device(warm)):
                raise ValueError(f"init_process_group asks for the {name} {asked[name]}, and the warm group has {warm}: own_group makes a group of the case's own; "
                                 "under cppool torchrun, which has no such option, CUDA_VISIBLE_DEVICES= gives the backend gloo")
        if pg_options is not None or more.get("_ranks"):
            raise ValueError("init_process_group with pg_options or _ranks needs own_group: the warm group has been made without")
        self.taken = True
        self.c10d._update_default_pg(self.warm)
        if timeout is not None:
            self._set_limit(timeout)

    def _by_device(self, backend):
        """What `backend` means here: nccl and cuda:nccl are the same, and without a GPU gloo and cpu:gloo."""
        devices = {"cpu", self.device.type}
        return {device: name for device, name in self.c10d.BackendConfig(self.dist.Backend(backend)).get_device_backend_map().items() if device in devices}

    def _give_back(self, group=None):
        if self.own or self.warm is None or not self.dist.is_initialized() or group not in (None, self.warm):
            return self.destroy(group)
        self._destroy_others()
        self.c10d._world.group_count = 1
        self.c10d._world.pg_map[self.warm] = (self.c10d._world.pg_map[self.warm][0], self.dist.PrefixStore("again", self.c10d._world.pg_map[self.warm][1]))
        self.taken = False
        self.c10d._update_default_pg(None)

    def last_collectives(self):
        """Of each group the last one of this case in torch's flight recorder, which names what a rank waits in."""
        last, members, world, default = {}, {}, self.c10d._world, self.dist.group.WORLD
        if default is not None and (default.rank(), default.size()) == (self.rank, self.size):  # else its ranks are not ours
            members = {name: list(world.pg_group_ranks.get(group, ())) for group, name in dict(world.pg_names).items()}
        for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            try:
                entries = json.loads(getattr(self.torch._C._distributed_c10d, dump)()).get("entries", ())
            except Exception:  # not of this torch, or no such backend
                continue
            for entry in entries:
                if entry.get("time_created_ns", self.begun) < self.begun:  # names and numbers of groups come again
                    continue
                name = (entry.get("process_group") or ["?"])[0]
                operation, state = str(entry.get("profiling_name")), str(entry.get("state"))
                if operation.startswith("gloo:") and entry.get("retired"):  # its state stays "scheduled"
                    state = "completed"
                last[name] = {"group": str(name), "number": entry.get("collective_seq_id") or entry.get("op_id"), "name": operation, "state": state}
                if members.get(name):
                    last[name]["ranks"] = members[name]
        return list(last.values())
