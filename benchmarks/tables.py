"""Tables of measurements: printed as they are made, stored as JSON, and printed again from there.

    python benchmarks/tables.py results/benchmarks/bench.json            # as bench.py printed them
    python benchmarks/tables.py results/benchmarks/bench.json --summary  # in Markdown, for the README
    python benchmarks/tables.py results/benchmarks/bench.json --solvers  # in Markdown, for docs/choosing.md
    python benchmarks/tables.py results/benchmarks/scaling.json --title fitted  # tables whose title starts like this

The JSON is written by ``bench.py --json FILE`` and the other benchmarks. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = dict[str, object]


def show(title: str, rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  " + "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]), flush=True)


def text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if value < 1e-2 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
    return str(value)


# --- what is stored ---------------------------------------------------------------------------------------------------

SOLVERS = {
    "Picard": "Picard()",
    "Anderson": "Anderson(6)",
    "Broyden": "Broyden(12)",
    "torchdeq plain": "torchdeq fixed_point_iter",
    "torchdeq Anderson": "torchdeq anderson",
    "torchdeq Broyden": "torchdeq broyden",
}
PROBLEMS = {
    "(i)": "dense, 512 units",
    "(ii)": "convolutional block, 32 x 32 x 32",
    "(iii)": "multiscale block, three resolutions",
}


def summary(tables: dict[str, list[Row]]) -> Iterable[str]:
    """Return the lines of a Markdown table: the time of a training step, memory, and the cost of one slow sample."""
    yield f"| | {' | '.join(SOLVERS)} |"
    yield "|---|" + "---:|" * len(SOLVERS)
    for number, name in PROBLEMS.items():
        yield line(f"time: {name}", table(tables, f"{number} ", "solve and differentiate"), "time ratio")
    yield line("memory: 200 steps, relative to 20", table(tables, "peak memory"), "growth")
    yield line("work: one slow sample of 128", table(tables, "one slow sample"), "ratio")


def solvers(tables: dict[str, list[Row]]) -> Iterable[str]:
    """Return the lines of a Markdown table: what each of our solvers needs for each problem."""
    yield "| problem | solver | evaluations to 1e-3 | to 1e-6 | backward, to 1e-6 | overhead | memory | time |"
    yield "|---|---|" + "---:|" * 6
    memory = table(tables, "peak memory")
    for number, name in PROBLEMS.items():
        forward = table(tables, f"{number} ", ": solve")
        step = table(tables, f"{number} ", "solve and differentiate")
        for solver in (solver for solver in SOLVERS.values() if not solver.startswith("torchdeq")):
            cells = [
                *(forward[solver][column] for column in ("calls to 0.001", "to 1e-06")),
                step[solver]["products to 1e-06"],
                f"{forward[solver]['overhead']:.2f}",
                f"{memory[solver]['states, 200 steps']:.0f}",
                f"{step[solver]['time ratio']:.2f}",
            ]
            yield f"| {name} | `{solver}` | {' | '.join(map(str, cells))} |"


def table(tables: dict[str, list[Row]], start: str, end: str = "") -> dict[str, Row]:
    """Return the rows of the table with a title like this, indexed by solver."""
    (rows,) = (rows for title, rows in tables.items() if title.startswith(start) and title.endswith(end))
    return {str(row["solver"]): row for row in rows}


def line(name: str, rows: dict[str, Row], column: str) -> str:
    values = [rows.get(solver, {}).get(column) for solver in SOLVERS.values()]
    return f"| {name} | {' | '.join('not reached' if value is None else f'{value:.2f}' for value in values)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print tables that a benchmark has stored.")
    parser.add_argument("file", type=Path, help="JSON written by a benchmark with --json")
    parser.add_argument("--title", metavar="START", help="print only tables whose title starts like this, no heading")
    parser.add_argument("--summary", action="store_true", help="print the comparison with torchdeq in Markdown")
    parser.add_argument("--solvers", action="store_true", help="print the solvers of equipoise in Markdown")
    arguments = parser.parse_args()
    stored = json.loads(arguments.file.read_text())
    if arguments.summary or arguments.solvers:
        print("\n".join((summary if arguments.summary else solvers)(stored["tables"])))
        return
    if arguments.title is None:
        print("\n".join(stored["heading"]))
    for title, rows in stored["tables"].items():
        if title.startswith(arguments.title or ""):
            show(title, rows)


if __name__ == "__main__":
    main()
