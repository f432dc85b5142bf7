"""Where a result comes from: the commit of the package, and the machine's processor."""

import platform
import subprocess
from functools import cache
from pathlib import Path

import equipoise


@cache
def commit(folder: Path = Path(equipoise.__file__).parent) -> str | None:
    """Return the commit that a package's folder is checked out from, with "-dirty" after it if a file was changed.

    None if the package does not come from a git checkout, or git is not installed.
    """
    git = ["git", "--no-optional-locks", "-C", str(folder)]

    def ask(*words: str) -> str:
        done = subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", "__init__.py")  # else it is installed inside somebody else's repository
        return ask("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def processor() -> str:
    """Return the name of the processor, such as "AMD EPYC 7763 64-Core Processor"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
