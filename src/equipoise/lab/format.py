"""Words for numbers, and names that are safe to print."""

from __future__ import annotations

import re
from typing import Any

# What terminals and browsers act on: control characters but line ends and tabs, marks that turn the direction of
# writing, and bytes of a file's name that are no text.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(name: str, value: Any) -> str:
    """A number as people write it; the name says what it is."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if "accuracy" in name or name == "converged":
        return percent(value)
    if name == "time":
        return duration(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def percent(share: float) -> str:
    return "100%" if share == 1 else f"{share:.2%}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def printable(name: object) -> str:
    """A name, such as a file's, with a backslash escape for every character that a terminal would act on.

    Example:
        >>> printable("cat\x1b[2J.png")
        'cat\\x1b[2J.png'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(name))


def printable_text(text: str) -> str:
    """The same for a text of several lines, whose ends and tabs stay."""
    return CONTROLS.sub(lambda found: printable(found[0]), text)
