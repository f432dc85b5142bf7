"""Whether what an operator is about to compute fits into memory: better a sentence than a process that is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

ALWAYS = 2**26  # bytes, for which nobody is asked


def require_memory(operator: Any, purpose: str, *, recorded: bool) -> None:
    """Raise unless the memory at hand holds what a product with W or its resolvent takes.

    Args:
        purpose: named in the sentence.
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
    """Bytes that can be allocated on a device; None where that cannot be found out."""
    if device.type == "cuda":
        kept_by_torch = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept_by_torch
    if device.type != "cpu":
        return None
    found = [bytes for bytes in (machine_memory(), container_memory()) if bytes is not None]
    return min(found, default=None)


def machine_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What the machine has left, memory that it can take back from caches included."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system has it
        return None


def container_memory(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a limit on the container leaves; None without one."""
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))  # a cache of files gives way
    except (OSError, ValueError):  # no such files, or no limit: "max"
        return None


def in_words(count: int) -> str:
    """Bytes with a unit."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
