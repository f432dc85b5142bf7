"""Measure time and peak memory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from torch.profiler import ProfilerActivity, profile


def seconds(run: Callable[[], object]) -> float:
    """Return the wall-clock time of one run."""
    began = perf_counter()
    run()
    return perf_counter() - began


def peak_of(run: Callable[[], object]) -> int:
    """Return the peak of additional memory during a run, in bytes.

    It is computed from torch's record of every allocation, which is exact and repeatable; the resident size of the
    process depends on what malloc keeps.
    """
    with quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Silence stderr: the profiler announces its start and stop from C++ at every log level."""
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)
