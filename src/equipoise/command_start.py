"""Ctrl-C while the command ``equipoise`` is still being imported: it ends with a word instead of a traceback.

Importing torch takes seconds, and an exception raised in the middle of it comes out as whatever the interrupted module
makes of it. This file is imported before torch, and does nothing in a program that merely uses the library.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def is_the_command() -> bool:
    """Whether this process was started as ``equipoise`` or ``python -m equipoise``."""
    modules = [word for before, word in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if before == "-m"]
    return modules[:1] == ["equipoise"] or Path(sys.argv[0] if sys.argv else "").stem == "equipoise"


def end_quietly(number: int, _: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)  # nothing has begun that would need an end


def imports_are_done() -> None:
    """From here on Ctrl-C is an exception again, which the command handles."""
    if signal.getsignal(signal.SIGINT) is end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_quietly)
