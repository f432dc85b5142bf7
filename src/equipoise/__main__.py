"""``python -m equipoise``: the command line, also for torchrun."""

import sys

from equipoise.cli import main

if __name__ == "__main__":
    sys.exit(main())
