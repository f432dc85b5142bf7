"""How commands are declared: tables of functions with their arguments, and the arguments that several share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and options for add_argument
Command = Callable[[argparse.Namespace], int | None]


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def path(*names: str, **options: Any) -> Argument:
    return names, {"type": Path, **options}


def existing_folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


class Commands(dict[str, tuple[Command, str, tuple[Argument, ...]]]):
    """Commands by name, each a function with an example and arguments."""

    def command(self, example: str, *arguments: Argument) -> Callable[[Command], Command]:
        """Register a function as the command of its name, "data_list" as "data list"; its docstring is the help."""

        def register(function: Command) -> Command:
            self[function.__name__.replace("_", " ")] = (function, example, arguments)
            return function

        return register


ANY_RECIPE = (
    "name listed by `equipoise recipes`, or a .toml file, which can import modules and run any code: use only files "
    "that you trust"
)
RUN = (
    argument("folder", metavar="RUN", help="folder of a run, file of weights, or name listed by `equipoise weights`"),
    argument("--weights", choices=("best", "last"), default="best", help="weights to use (default: best)"),
)
IMAGES = path("images", metavar="IMAGE", nargs="+", help="image file")
CHANGES = (
    argument("changes", metavar="key=value", nargs="*", default=[], help="recipe changes, e.g. optimizer.lr=0.01"),
    argument("--budget", help="smoke (seconds), small (a few epochs) or paper (the recipe as written; the default)"),
    path("--runs", default=Path("runs"), metavar="DIR", help="folder for new runs (default: runs)"),
)
TRUST = argument(
    "--trust",
    action="append",
    default=[],
    metavar="MODULE",
    help="allow opened files to import this module, which runs its code; otherwise they can use only equipoise's own "
    "code; repeatable",
)
DATA = argument(
    "--data",
    type=existing_folder,
    action="append",
    default=[],
    metavar="DIR",
    help="folder to search for data first; repeatable",
)
MACHINE = (
    argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if available)"),
    argument("--threads", type=int, help="number of CPU threads for torch"),
)
