"""Exit the command ``equipoise`` without a traceback on Ctrl-C while it is still being imported.

Importing torch takes seconds, and interrupting it may raise any exception. This module is imported before torch, and
does nothing in a program that uses the library.
"""

import os
import signal
import sys
from pathlib import Path


def is_the_command() -> bool:
    """Return whether this process was started as ``equipoise`` or ``python -m equipoise``."""
    modules = [word for before, word in zip(sys.orig_argv, sys.orig_argv[1:], strict=False) if before == "-m"]
    return modules[:1] == ["equipoise"] or Path(sys.argv[0] if sys.argv else "").stem == "equipoise"


def end_quietly(number: int, _: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)  # nothing needs to be cleaned up yet


if is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_quietly)
