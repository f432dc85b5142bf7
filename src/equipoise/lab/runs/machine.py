"""The machine a command runs on: device, threads, and the processes that share the work."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from equipoise.tasks import Sums


@dataclass(frozen=True)
class Machine:
    """One process among ``world``; all of them see the same model and each its own part of every batch."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, in every one."""
        if self.world > 1:
            values = values.to(self.device, copy=True)  # summed in place
            dist.all_reduce(values)
        return values.cpu()

    def total(self, sums: Sums) -> Sums:
        """Sums over all processes; entries are added in the same order in every one."""
        return {name: self.sum(sums[name].to(torch.float64)) for name in sorted(sums)}

    def share(self, value: Any) -> Any:
        """The leading process's value, in every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """The leading process's values of these tensors, in every process."""
        for tensor in tensors if self.world > 1 else ():
            dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def this_machine(device: str | None = None, threads: int | None = None) -> Iterator[Machine]:
    """The machine, joined with the other processes when torchrun started them.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps"; None takes a GPU if there is one.
        threads: of torch on the CPU; None leaves torch's choice.
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
    try:
        yield Machine(chosen, rank, world)
    finally:
        dist.destroy_process_group()


def keep_freed_memory() -> None:
    """Let glibc hand freed blocks out again instead of returning them to the system.

    It returns every block above 32 MB, the size of a batch of equilibria, and each new one then costs a page fault
    every 4 kB: adding two such tensors takes four times as long (measured). Elsewhere nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another system
        return
    M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def choose_device(name: str | None, local_rank: int | None) -> torch.device:
    """The device of that name, checked; one GPU per process when several share a machine."""
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
