"""Check that what an operator is about to compute fits into memory, before the process is killed for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from equipoise.operators.base import MonotoneOperator

ALWAYS = 2**26  # bytes that are never checked


def require_memory(operator: MonotoneOperator, purpose: str, *, recorded: bool) -> None:
    """Raise unless the available memory holds what a product with W or its resolvent takes.

    Args:
        purpose: name of the computation, for the message.
        recorded: whether autograd keeps what W is made from.
    """
    like = operator.example
    parts = [count * like.element_size() for count in operator.footprint()]
    kept = sum(parts)
    needed = int(max(operator.peak * kept, kept + 2 * max(parts) if recorded else 0))
    if needed <= ALWAYS or (available := available_memory(like.device)) is None or needed <= available:
        return
    raise torch.OutOfMemoryError(
        f"{type(operator).__name__}({operator.extra_repr()}) needs {in_words(needed)} to compute {purpose}, of which "
        f"it keeps {in_words(kept)}, and {in_words(available)} are available on {like.device}. What it keeps grows "
        "with height x width x channels^2: use fewer channels or smaller images."
    )


def available_memory(device: torch.device) -> int | None:
    """Return the number of bytes that can be allocated on a device; None if it cannot be determined."""
    if device.type == "cuda":
        kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept_by_torch
    limits = (machine_memory(), container_memory()) if device.type == "cpu" else ()
    return min((limit for limit in limits if limit is not None), default=None)


def machine_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the machine's available memory, including caches that it can reclaim."""
    try:
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system has it
        return None


def container_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that a limit on the container leaves; None without a limit."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))  # cached files can be dropped
    except (OSError, ValueError):  # no such files, or no limit: "max"
        return None


def in_words(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
