"""The machine that a command runs on: device, threads, memory, cooperating processes, random numbers."""

import atexit
import ctypes
import gc
import hashlib
import os
import platform
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.nn  # imported when there is a process group, its default arguments would keep it forever
from torch import Tensor
from torch import distributed as dist

from equipoise.tasks import Sums

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """One process among ``world``; all of them have the same model, and each has its own part of every batch."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, in each of them."""
        if self.world > 1:
            values = values.to(self.device, copy=True)  # summed in place
            dist.all_reduce(values)
        return values.cpu()

    def total(self, sums: Sums) -> Sums:
        """Sum every entry over all processes, in the same order in each of them."""
        return {name: self.sum(sums[name].to(torch.float64)) for name in sorted(sums)}

    def gather(self, sums: Sums) -> list[Sums]:
        """Return the sums of every process, in the order of the processes."""
        shares: list[Sums] = [{} for _ in range(self.world)]
        for name in sorted(sums):
            own = sums[name].to(self.device, torch.float64)
            each = [torch.empty_like(own) for _ in shares] if self.world > 1 else [own]
            if self.world > 1:
                dist.all_gather(each, own)
            for share, value in zip(shares, each, strict=True):
                share[name] = value.cpu()
        return shares

    def share(self, value: T | None) -> T:
        """Return the leading process's value in every process; the others may pass None."""
        box: list[Any] = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with the leading process's values."""
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Wait for every process."""
        if self.world > 1:
            dist.barrier()

    def own_part(self, rows: Tensor) -> Tensor:
        """Return this process's rows of a batch; the sizes of the parts differ by at most one."""
        return rows[self.rank :: self.world]


@contextmanager
def this_machine(device: str | None = None, threads: int | None = None) -> Iterator[Machine]:
    """Yield the machine, connected with the other processes if torchrun started them.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps"; None selects a GPU if available
        threads: number of CPU threads of torch; None keeps torch's choice
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads is {threads}; it must be at least 1.")
        torch.set_num_threads(threads)
    keep_freed_memory()
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device, local if world > 1 else None)
    if world == 1:
        yield Machine(chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    atexit.register(release, [dist.group.WORLD])
    try:
        yield Machine(chosen, rank, world)
    finally:
        dist.destroy_process_group()


def release(groups: list[Any]) -> None:
    """Free process groups at the end of the process, as their last owner.

    The last owner may otherwise be a DistributedDataParallel, which the frames of an error keep longer than
    ``destroy_process_group`` does. It waits for gloo's thread while it holds the interpreter's lock. That thread may be
    waiting for the lock, to free the tensors of its last exchange: then the process never ends.
    """
    gc.collect()  # a model in a reference cycle
    groups.clear()


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks instead of returning them to the system.

    It returns every block above 32 MB, the size of a batch of equilibria, and each new one then costs a page fault
    every 4 kB: adding two such tensors takes four times as long (measured). On other systems nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@cache
def processor() -> str:
    """Return the name of the processor, such as "AMD EPYC 7763 64-Core Processor"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring: return memory that this process has freed to the system, and reset the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(AttributeError, OSError, TypeError):  # another C library, another system
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Return the peak since the last reset, in bytes; None if it is unknown.

    On a CPU it is the resident memory of the whole process, including torch and the data.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return None
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def choose_device(name: str | None, local_rank: int | None) -> torch.device:
    """Return the device of that name, after a test; one GPU per process if several share a machine."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and device.index is None and local_rank is not None:
            device = torch.device("cuda", local_rank)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device is {name!r}, which this machine cannot use: {str(error).splitlines()[0]}") from None
    return device


def seed_of(*parts: object) -> int:
    """Return a seed that depends on every part and on nothing else: (run's seed, purpose, step, process)."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "big") >> 1


def seed_everything(*parts: object) -> torch.Generator:
    """Seed every random number generator, and return one more for the batch's augmentation.

    Called before every step, so that no generator carries state from one step to the next: a run that is resumed at a
    step draws what it would have drawn.
    """
    seed = seed_of(*parts)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    return torch.Generator().manual_seed(seed_of(*parts, "augmentation"))
