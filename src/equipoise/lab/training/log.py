"""Telling how training goes: a JSONL file always, TensorBoard when installed, a bar on a terminal, else plain lines."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

from equipoise.lab.files import WriteError, finite
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine


class Log:
    """Where a run's numbers go. Only the leading process writes.

    Example:
        >>> with Log(run, machine, samples=12 * 55000) as log:
        ...     log.write(kind="step", step=20, loss=0.3)
        ...     log.tell("epoch 1/12  accuracy 93.1%")
    """

    def __init__(self, run: Run, machine: Machine, samples: int, done: int = 0, step: int = 0):
        self.run, self.machine = run, machine
        self.samples, self.done, self.step = samples, done, step  # to train on, of them done, after so many steps
        self.file: Any = None
        self.board: Any = None
        self.bar: Any = None

    def __enter__(self) -> Log:
        if self.machine.leads:
            from tqdm import tqdm

            self.file = self.run.log.open("ab", buffering=0)
            self.board = tensorboard(self.run, self.step)
            shown = sys.stderr.isatty()
            self.bar = tqdm(
                total=self.samples,
                initial=self.done,
                unit=" samples",
                unit_scale=True,
                disable=not shown,
                dynamic_ncols=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self.file, self.board, self.bar):
            if part is not None:
                part.close()

    def write(self, **record: Any) -> None:
        """One line of the log, and its numbers in TensorBoard."""
        if self.file is None:
            return
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        end = self.file.seek(0, os.SEEK_END)
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.file.truncate(end)  # a line is written whole or not at all
            raise WriteError(f"{self.run.log} could not be written: {error.strerror}.") from error
        if self.board is not None:
            for name, value in numbers(record, ""):
                self.board.add_scalar(name, value, record["step"])

    def advance(self, samples: int, text: str) -> None:
        """So many samples further; the text stands beside the bar."""
        if self.bar is not None and not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(samples)

    def tell(self, text: str) -> None:
        """A line for the person watching."""
        if self.bar is not None:
            if self.bar.disable:
                print(text, flush=True)
            else:
                self.bar.write(text)


def tensorboard(run: Run, step: int) -> Any:
    """A writer beside the log, or None when tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(run.folder / "tensorboard"), purge_step=step)


def numbers(record: dict[str, Any], prefix: str) -> list[tuple[str, float]]:
    """Every number in nested tables, under its dotted name."""
    found = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "epoch", "phase"):
            found.append((prefix + name, float(value)))
    return found
