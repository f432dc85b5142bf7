"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence

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
