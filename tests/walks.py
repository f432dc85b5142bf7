"""Count the files of the package that a call enters: how far a reader has to walk to follow it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import equipoise

PACKAGE = Path(equipoise.__file__).parent


def files_entered(call: Callable[[], object]) -> list[str]:
    """Call a function and return the files of the package whose functions it calls, in any thread.

    What runs because a module is imported meanwhile does not count, nor does generated code, such as the ``__init__``
    of a dataclass, which has no file.
    """
    entered: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)) and name not in entered and not importing(frame):
            entered.add(name)

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return sorted(Path(name).relative_to(PACKAGE).as_posix() for name in entered)


def importing(frame: FrameType | None) -> bool:
    """Whether a frame is, or was called from, the body of one of the package's modules."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        frame = frame.f_back
    return False
