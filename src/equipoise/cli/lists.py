"""Commands that list and check recipes, weights, runs, data and the installation."""

from __future__ import annotations

import argparse

from equipoise.cli.declare import DATA, MACHINE, Commands, argument, path
from equipoise.cli.shared import machine_of, open_run, print_numbers, print_table
from equipoise.lab.printable import printable

COMMANDS = Commands()
command = COMMANDS.command
ONLY_TO_ADD = ("limit", "note", "data", "device", "threads")  # options of `equipoise weights`


@command("equipoise recipes core/digits", argument("recipe", metavar="RECIPE", nargs="?", help="recipe to print"))
def recipes(arguments: argparse.Namespace) -> None:
    """List recipes, tables and figures, or print one."""
    from equipoise.lab.results.overview import recipe_rows, recipe_text

    if arguments.recipe:
        print(recipe_text(arguments.recipe), end="")
    else:
        print_table(("name", "kind", "paper", "data", "parameters", "title"), recipe_rows())


@command(
    "equipoise weights mondeq/mnist-fc",
    argument("name", metavar="NAME", nargs="?", help="shipped model whose card to print (default: list all)"),
    argument("--add", dest="folder", metavar="RUN", help="finished run whose model to add to the package"),
    argument("--as", dest="entry", metavar="NAME", help="name of the entry that --add writes, such as mondeq/mnist-fc"),
    argument("--weights", choices=("best", "last"), default="best", help="weights that --add ships (default: best)"),
    argument("--limit", type=int, help="number of test samples that --add measures on (default: all)"),
    argument("--note", default="", metavar="TEXT", help="remark for the card that --add writes"),
    *(DATA, *MACHINE),
)
def weights(arguments: argparse.Namespace) -> None:
    """List the trained models that ship with the package, print the card of one, or add one."""
    from equipoise.lab.results.overview import card_of, weights_rows

    if arguments.folder or arguments.entry:
        add_to_weights(arguments)
    elif given := [name for name in ONLY_TO_ADD if getattr(arguments, name) not in (None, "", [])]:
        raise ValueError(f"--{given[0]} is for --add RUN: omit it.")
    elif arguments.name:
        print(card_of(arguments.name), end="")
    else:
        print_table(("name", "model", "data", "parameters", "size", "test"), weights_rows())


def add_to_weights(arguments: argparse.Namespace) -> None:
    from equipoise.lab.results.add_weights import add_weights
    from equipoise.lab.results.weights_page import update_page

    if not (arguments.folder and arguments.entry):
        raise ValueError("--add RUN and --as NAME go together: equipoise weights --add RUN --as mondeq/mnist-fc.")
    if arguments.name:
        raise ValueError(f"NAME is {arguments.name!r}; --add takes its name from --as: leave NAME out.")
    options = {name: getattr(arguments, name) for name in ("weights", "limit", "note")}
    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        run = open_run(arguments)
        added = add_weights(run, arguments.entry, machine, arguments.data, **options)
    for kind, metrics in added.metrics.items():
        print_numbers({f"{name} in {kind}": value for name, value in metrics.items()})
    print(f"stored in         {added.card.stored}, {added.card.bytes:,} bytes")
    print(f"written           {printable(added.file)}, {added.file.with_suffix('.toml').name}")
    if page := update_page():
        print(f"table             {printable(page)}")


@command(
    "equipoise runs", path("folder", metavar="DIR", nargs="?", default="runs", help="folder of runs (default: runs)")
)
def runs(arguments: argparse.Namespace) -> None:
    """List runs."""
    from equipoise.lab.results.overview import run_rows

    if rows := run_rows(arguments.folder):
        print_table(("run", "recipe", "status", "epochs", "validation", "test", "time"), rows)
    else:
        print(f"no runs in {arguments.folder}; `equipoise train` creates one.")


@command("equipoise data get mnist")
def data(_: argparse.Namespace) -> None:
    """List, download and check data sets."""  # never called, since an action is required


@command("equipoise data list", DATA)
def data_list(arguments: argparse.Namespace) -> None:
    """List data sets and where they were found."""
    from equipoise.lab.results.overview import data_rows

    rows, hints = data_rows(arguments.data)
    print_table(("name", "samples", "found in", "terms"), rows)
    for name, how in hints.items():
        print(f"\nto get {name}: {how}")


@command(
    "equipoise data get mnist",
    argument("name", metavar="NAME", help="name of the data set"),
    path("--to", metavar="DIR", help="folder to download to (default: the cache folder)"),
)
def data_get(arguments: argparse.Namespace) -> None:
    """Download, check and unpack a data set."""
    from equipoise.lab.results.overview import get_data

    for file in get_data(arguments.name, arguments.to):
        print(printable(file))


@command(
    "equipoise data check mnist",
    argument("name", metavar="NAME", nargs="?", help="name of the data set (default: all that are present)"),
    DATA,
)
def data_check(arguments: argparse.Namespace) -> int:
    """Compare files with their published checksums, and check that they can be read."""
    from equipoise.lab.results.overview import check_rows

    rows, sound = check_rows(arguments.name, arguments.data)
    print_table(("set", "file", "verdict"), rows)
    return 0 if sound else 1


@command("equipoise doctor", DATA)
def doctor(arguments: argparse.Namespace) -> int:
    """Check the installation, devices and data, and solve a small problem."""
    from equipoise.lab.runs.doctor import examine

    return 0 if examine(arguments.data) else 1
