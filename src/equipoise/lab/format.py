"""Format metrics and durations for people, and escape names so that they are safe to print."""

import re

# What terminals and browsers act on: control characters other than line breaks and tabs, marks that change the
# direction of writing, and bytes of a file name that are not valid characters.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def format_metric(name: str, value: float | str | None) -> str:
    """Format a value by the name of its metric: accuracies in percent, times as durations.

    Example:
        >>> format_metric("test accuracy", 0.98055)
        '98.06%'
    """
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
    """Escape every character of a name that a terminal would act on.

    Example:
        >>> printable("cat\x1b[2J.png")
        'cat\\x1b[2J.png'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in str(name))


def printable_text(text: str) -> str:
    """Escape the same characters in a text of several lines, keeping line breaks and tabs."""
    return CONTROLS.sub(lambda match: printable(match[0]), text)
