"""Batches of a split in a seeded order, read ahead while the model computes, and the seeds of every step."""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from equipoise.lab.data import Batch, Split


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


def training_rows(samples: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """Return the rows of every batch of an epoch, over all processes: every sample once, in a new order each epoch."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed_of(seed, "order", epoch)))
    return list(order.split(batch_size))


def batches(split: Split, rows: Iterable[Tensor], device: torch.device) -> Iterator[Batch]:
    """Yield the batches with these rows, on the device; each is read while the one before it is in use."""
    pinned = device.type == "cuda"

    def read(wanted: Tensor) -> Batch:
        batch = split.read(wanted)
        return tuple(tensor.pin_memory() for tensor in batch) if pinned else batch

    def placed(batch: Batch) -> Batch:
        return tuple(tensor.to(device, non_blocking=pinned) for tensor in batch)

    with ThreadPoolExecutor(1, thread_name_prefix="loader") as reader:
        ahead: Future[Batch] | None = None
        try:
            for wanted in rows:
                previous, ahead = ahead, reader.submit(read, wanted)
                if previous is not None:
                    yield placed(previous.result())
            if ahead is not None:
                yield placed(ahead.result())
        finally:
            if ahead is not None:
                ahead.cancel()
