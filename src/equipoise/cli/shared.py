"""What several commands do: open the machine and a run, print numbers and tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.lab.printable import printable

if TYPE_CHECKING:
    from equipoise.lab.runs.folder import Run
    from equipoise.lab.runs.machine import Machine


def machine_of(arguments: argparse.Namespace) -> AbstractContextManager[Machine]:
    from equipoise.lab.runs.machine import this_machine

    return this_machine(arguments.device, arguments.threads)


def open_run(arguments: argparse.Namespace, folder: str | Path | None = None) -> Run:
    from equipoise.lab.runs.folder import open_run

    return open_run(folder or arguments.folder, getattr(arguments, "trust", ()))


def print_numbers(metrics: dict[str, float]) -> None:
    from equipoise.lab.training.evaluate import format_metric

    for name, value in metrics.items():
        print(f"{name:<17} {format_metric(name, value)}")  # names may be longer


def print_solver(solver: dict[str, Any]) -> None:
    for direction, numbers in solver.items():
        steps, residual = numbers["steps"], numbers["residual"]
        print(
            f"{direction + ' solves':<18}{1 - numbers['failed']:.2%} of {numbers['samples']} converged; "
            f"steps median {steps['median']}, most {steps['most']}; "
            f"residual median {residual['median']:.1e}, worst {residual['worst']:.1e}"
        )


def print_table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns as wide as their content."""
    lines = [[printable(cell) for cell in row] for row in [heading, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
