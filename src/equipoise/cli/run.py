"""Parse the command line and run its command, and the commands that train.

A user error prints a sentence, an interrupted training run the command that continues it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import equipoise
from equipoise.cli import lists, trained
from equipoise.cli.declare import ANY_RECIPE, CHANGES, DATA, MACHINE, TRUST, Commands, argument, path
from equipoise.cli.mistakes import Parser, is_a_defect, no_such_argument
from equipoise.cli.trained import print_report
from equipoise.command_start import end_quietly
from equipoise.lab.printable import printable, printable_text
from equipoise.lab.trust import Trust, UntrustedName
from equipoise.options import UnknownOption
from equipoise.registry import MissingPackage

if TYPE_CHECKING:
    from equipoise.lab.runs.machine import Machine

DEFAULT_RECIPE = "core/digits"
COMMANDS = Commands()
command = COMMANDS.command


def parser() -> Parser:
    """Return the parser of the whole command line."""
    top = Parser(
        prog="equipoise",
        description="Train, evaluate and reproduce equilibrium networks.",
        epilog="Example: equipoise train core/digits && equipoise report runs/core-digits-001",
    )
    top.add_argument("--version", action="version", version=f"equipoise {equipoise.__version__}")
    parents = {"": top.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)}
    for name, (function, example, arguments) in {**COMMANDS, **trained.COMMANDS, **lists.COMMANDS}.items():
        (parent, _, word), about = name.rpartition(" "), function.__doc__
        made = parents[parent].add_parser(word, help=about, description=about, epilog=f"Example: {example}")
        made.set_defaults(run=function, parser=made)
        for names, options in arguments:
            made.add_argument(*names, **options)
        made.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if name == "data":
            parents[name] = made.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. User errors print a sentence, not a traceback."""
    if signal.getsignal(signal.SIGINT) is end_quietly:  # imports are done
        signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments, rest = parser().parse_known_args(words)
    if hasattr(arguments, "changes"):  # argparse ends a list at the first option
        more = [word for word in rest if re.match(r"[\w.-]+=", word) and not word.startswith("-")]
        arguments.changes = [*arguments.changes, *more]
        rest = [word for word in rest if word not in more]
    if rest:
        arguments.parser.error(no_such_argument(arguments, rest))
    try:
        return arguments.run(arguments) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UntrustedName as error:
        if arguments.traceback:
            raise
        typed = list(sys.argv[1:] if words is None else words)
        again = ["equipoise", *typed, *(word for module in error.modules for word in ("--trust", module))]
        print(f"equipoise: {error.reason} run: {shlex.join(again)}", file=sys.stderr)
        return 2
    except (ValueError, LookupError, OSError, ImportError, UnknownOption, RuntimeError, NotImplementedError) as error:
        if arguments.traceback or is_a_defect(error):
            raise
        sentence = str(error)
        if isinstance(error, ModuleNotFoundError) and not isinstance(error, MissingPackage):
            package = (error.name or "").partition(".")[0]
            sentence = f"the package {package!r} is not installed: pip install 'equipoise[lab]'."
        if isinstance(error, OSError) and error.filename and error.strerror:  # not one of ours
            sentence = f"{error.filename}: {error.strerror}."
        print(f"equipoise: {printable_text(sentence)}", file=sys.stderr)
        return 2


# Training


@command(
    "equipoise train core/mnist --budget small optimizer.lr=0.005 seeds=3",
    argument(
        "recipe", metavar="RECIPE", nargs="?", default=DEFAULT_RECIPE, help=f"{ANY_RECIPE} (default: %(default)s)"
    ),
    *(*CHANGES, DATA, *MACHINE),
    argument("--report", action="store_true", help="write a report at the end of training"),
)
def train(arguments: argparse.Namespace) -> int:
    """Train a recipe."""
    from equipoise.lab.recipes.build import check
    from equipoise.lab.recipes.reading import budget_changes, open_recipe
    from equipoise.lab.recipes.schema import Recipe
    from equipoise.lab.runs.machine import this_machine
    from equipoise.lab.training.sweeps import train_sweep
    from equipoise.lab.training.trainer import train_run

    if arguments.recipe and "=" in arguments.recipe:  # `equipoise train optimizer.lr=0.1` changes the default recipe
        arguments.changes = [arguments.recipe, *arguments.changes]
        arguments.recipe = DEFAULT_RECIPE
    source = open_recipe(arguments.recipe, arguments.budget, arguments.changes, kind=Recipe)
    check(source)
    if arguments.report:
        import equipoise.lab.results.report  # noqa: F401  (a missing package shows now, not after training)
    with this_machine(arguments.device, arguments.threads) as machine:
        if source.budgeted and machine.leads:
            print(f"{'budget ' + arguments.budget:<18}{budget_changes([source])}", flush=True)
        write = partial(print_report, machine, arguments.data) if arguments.report else None
        begin = train_run if source.recipe.seeds == 1 else train_sweep
        return to_the_end(machine, lambda: begin(source, arguments.runs, machine, arguments.data, write))


@command(
    "equipoise resume runs/core-mnist-001",
    path("folder", metavar="RUN", help="folder of a run, a sweep, a table or a figure"),
    path("--out", metavar="FILE", help="file for a figure's picture (default: in the folder)"),
    *(TRUST, DATA, *MACHINE),
)
def resume(arguments: argparse.Namespace) -> int:
    """Resume a stopped run, with results bit-identical to those of an uninterrupted one."""
    from equipoise.lab.runs.machine import this_machine
    from equipoise.lab.training.sweeps import resume_folder, threads_of

    folder, proceed = arguments.folder, resume_folder
    if (folder / "result.json").is_file():  # of a run, or of a sweep
        print(f"{printable(folder)} is finished, so there is nothing to continue; its result:")
    arguments.threads = arguments.threads or threads_of(folder)
    if (folder / "reproduce.json").exists():
        from equipoise.lab.results.reproduce import continue_table as proceed
    elif (folder / "figure.json").exists():
        from equipoise.lab.results.reproduce import continue_figure

        proceed = partial(continue_figure, out=arguments.out)
    if arguments.out is not None and not isinstance(proceed, partial):
        raise ValueError(f"--out is for figures, and {folder} is not the folder of a figure: omit --out.")
    trust = Trust.of(arguments.trust)
    with this_machine(arguments.device, arguments.threads) as machine:
        return to_the_end(machine, lambda: proceed(folder, machine, arguments.data, trust=trust))


def to_the_end(machine: Machine, work: Callable[[], object]) -> int:
    """Run training; if it is stopped, print the command that continues it."""
    from equipoise.lab.training.trainer import Stopped

    try:
        work()
    except Stopped as stopped:
        if machine.leads:
            print(f"stopped at step {stopped.step} and saved; continue with: {shlex.join(stopped.resume)}")
        return 128 + stopped.number
    return 0


@command(
    "equipoise reproduce core/table --budget small",
    *(argument("recipe", metavar="TABLE", help=ANY_RECIPE), *CHANGES, DATA, *MACHINE),
    argument(
        "--row",
        dest="rows",
        action="append",
        default=[],
        metavar="LABEL",
        help="train only this row, and those that share its training run; repeatable (default: all rows)",
    ),
)
def reproduce(arguments: argparse.Namespace) -> int:
    """Train the rows of a published table, and print published and measured numbers."""
    from equipoise.lab.results.reproduce import reproduce_table
    from equipoise.lab.runs.machine import this_machine

    request = (arguments.recipe, arguments.budget, arguments.changes, arguments.runs)
    with this_machine(arguments.device, arguments.threads) as machine:
        return to_the_end(machine, lambda: reproduce_table(*request, machine, arguments.data, arguments.rows))


@command(
    "equipoise figure core/convergence --budget small",
    *(argument("recipe", metavar="FIGURE", help=ANY_RECIPE), *CHANGES, TRUST, DATA, *MACHINE),
    argument(
        "--run",
        dest="trained",
        action="append",
        default=[],
        metavar="RUN",
        help="trained run to use, one per recipe: folder, file of weights, or name listed by `equipoise weights`",
    ),
    path("--out", metavar="FILE", help="file for the picture (default: in the folder of the figure or first --run)"),
)
def figure(arguments: argparse.Namespace) -> int:
    """Draw a published figure, training what it needs."""
    from equipoise.lab.results.reproduce import draw_figure
    from equipoise.lab.runs.machine import this_machine

    request = (arguments.recipe, arguments.budget, arguments.changes, arguments.trained, arguments.runs)
    trust = Trust.of(arguments.trust)
    with this_machine(arguments.device, arguments.threads) as machine:
        return to_the_end(machine, lambda: draw_figure(*request, machine, arguments.data, arguments.out, trust))
