"""Escape names and texts from elsewhere so that they are safe to print."""

import re

# What terminals and browsers act on: control characters other than line breaks and tabs, marks that change the
# direction of writing, and bytes of a file name that are not valid characters.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
