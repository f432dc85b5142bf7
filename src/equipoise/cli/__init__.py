"""The command ``equipoise``."""

from equipoise.cli.run import main, parser

__all__ = ["main", "parser"]
