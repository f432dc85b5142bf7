"""Peak memory of a training run: of the process on a CPU, of torch's tensors on a GPU."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring: return what earlier runs of this process have freed to the system, and forget their peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(AttributeError, OSError, TypeError):  # another C library, another system
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Return the peak since the last reset, in bytes; None where it is not known.

    On a CPU it is the resident memory of the whole process, torch and the data included.
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
