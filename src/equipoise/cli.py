"""The command ``equipoise``."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import equipoise
from equipoise.command_start import imports_are_done
from equipoise.lab.format import printable, printable_text
from equipoise.options import did_you_mean
from equipoise.registry import MissingPackage, Trust, UnknownOption, UntrustedName

if TYPE_CHECKING:
    from equipoise.lab.recipes.recipe import Source
    from equipoise.lab.runs.folder import Run
    from equipoise.lab.runs.machine import Machine

DEFAULT_RECIPE = "core/digits"


class Parser(argparse.ArgumentParser):
    """A parser that answers a misspelt word with the nearest one it knows."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            known = [word.strip("' ") for word in found[2].split(",")]
            message = (
                f"there is no {found[1]!r}; {did_you_mean(found[1], known, cutoff=0.65)}known: {', '.join(known)}."
            )
        print(f"{self.prog}: {printable_text(message)}\nSee {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)

    def options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def parser() -> Parser:
    """The whole command line; every command has an example."""
    top = Parser(
        prog="equipoise",
        description="Train, look at and reproduce equilibrium networks.",
        epilog="Example: equipoise train core/digits && equipoise report runs/core-digits-001",
    )
    top.add_argument("--version", action="version", version=f"equipoise {equipoise.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)

    def command(
        name: str, run: Callable[[Any], int | None], about: str, example: str, parent: Any = commands
    ) -> Parser:
        made = parent.add_parser(name, help=about, description=about, epilog=f"Example: {example}")
        made.set_defaults(run=run, parser=made)
        made.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
        return made

    def recipe_arguments(made: Parser, what: str, default: str | None = None) -> None:
        made.add_argument(
            "recipe",
            metavar=what,
            nargs="?" if default else None,
            default=default,
            help="see `equipoise recipes`; or a .toml file, which may name modules of its own and so run any code: use "
            "only one that you trust" + (f" (default: {default})" if default else ""),
        )
        made.add_argument(
            "changes",
            metavar="key=value",
            nargs="*",
            default=[],  # without it argparse calls them required
            help="changes of the recipe, such as optimizer.lr=0.01",
        )
        made.add_argument(
            "--budget",
            help="how much to spend: smoke (seconds), small (a few epochs), paper (as is; the default)",
        )
        made.add_argument(
            "--runs",
            type=Path,
            default=Path("runs"),
            metavar="DIR",
            help="where the run's folder is made (default: runs)",
        )

    def data_argument(made: Parser) -> None:
        made.add_argument(
            "--data",
            type=Path,
            action="append",
            default=[],
            metavar="DIR",
            help="look for data here first; may be given several times",
        )

    def trust_argument(made: Parser) -> None:
        made.add_argument(
            "--trust",
            action="append",
            default=[],
            metavar="MODULE",
            help="let the files that are opened name code of this module, which importing it runs; without it they run "
            "none but the package's. May be given several times",
        )

    def machine_arguments(made: Parser, data: bool = True) -> None:
        if data:
            data_argument(made)
        made.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
        made.add_argument("--threads", type=int, help="threads of torch on the CPU")

    made = command(
        "train", train, "Train a recipe.", "equipoise train core/mnist --budget small optimizer.lr=0.005 seeds=3"
    )
    recipe_arguments(made, "RECIPE", DEFAULT_RECIPE)
    made.add_argument("--report", action="store_true", help="write the report when training has ended")
    machine_arguments(made)

    made = command(
        "resume", resume, "Continue a run that was stopped, bit for bit.", "equipoise resume runs/core-mnist-001"
    )
    made.add_argument("folder", metavar="RUN", type=Path, help="folder of a run, a sweep, a table or a figure")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write a figure's picture (default: the folder)"
    )
    trust_argument(made)
    machine_arguments(made)

    made = command(
        "evaluate",
        evaluate,
        "Measure a trained run.",
        "equipoise evaluate runs/core-mnist-001 --task robustness radius=0.1 steps=10",
    )
    made.add_argument("folder", metavar="RUN", type=Path)
    trust_argument(made)
    made.add_argument(
        "changes",
        metavar="key=value",
        nargs="*",
        default=[],
        help="options of the task, such as radius=0.1, or of --certify",
    )
    made.add_argument("--task", help="measure under another task than the run's own")
    made.add_argument(
        "--certify",
        action="store_true",
        help="prove how far images can be changed with the answer staying the same, and attack them (monDEQ); options: "
        "samples=200 steps=20 radii=[0.1,0.5] of the attacks, relative=1e-6 of the solves",
    )
    made.add_argument("--split", choices=("train", "val", "test"), default="test")
    made.add_argument("--weights", choices=("best", "last"), default="best")
    made.add_argument("--limit", type=int, help="only so many samples, from all over the split")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to a file, too")
    machine_arguments(made)

    made = command(
        "predict", predict, "Say what a trained run makes of images.", "equipoise predict runs/core-mnist-001 seven.png"
    )
    made.add_argument("folder", metavar="RUN", type=Path)
    trust_argument(made)
    made.add_argument("images", metavar="IMAGE", type=Path, nargs="+")
    made.add_argument("--weights", choices=("best", "last"), default="best")
    made.add_argument("--json", action="store_true", help="print one line of JSON per image")
    machine_arguments(made, data=False)

    made = command(
        "segment",
        segment,
        "Say what a trained run sees where in images of any size.",
        "equipoise segment runs/mdeq-camvid-small-001 street.png -o seen.png",
    )
    made.add_argument("folder", metavar="RUN", type=Path)
    trust_argument(made)
    made.add_argument("images", metavar="IMAGE", type=Path, nargs="+")
    made.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="OUT",
        help="the picture's file (.png), or a folder (default: IMAGE-segmented.png in the current folder); the class "
        "number of each pixel is written beside it, as OUT-classes.png",
    )
    made.add_argument(
        "--window",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="go over an image in overlapping windows of this size (default: as in the run's evaluation)",
    )
    made.add_argument("--weights", choices=("best", "last"), default="best")
    machine_arguments(made, data=False)

    made = command(
        "report",
        report,
        "Write a page with curves, pictures and numbers of one or several runs.",
        "equipoise report runs/core-digits-001 runs/core-digits-002",
    )
    made.add_argument("folders", metavar="RUN", type=Path, nargs="+")
    trust_argument(made)
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it (default: report.html in the first run's folder)"
    )
    machine_arguments(made)

    made = command(
        "reproduce",
        reproduce,
        "Train every row of a published table and print paper beside measured.",
        "equipoise reproduce core/table --budget small",
    )
    recipe_arguments(made, "TABLE")
    machine_arguments(made)

    made = command(
        "figure",
        figure,
        "Draw a published figure, training what it needs.",
        "equipoise figure core/convergence --budget small",
    )
    recipe_arguments(made, "FIGURE")
    made.add_argument(
        "--run",
        dest="trained",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="a trained run to draw from, in the order of the figure's recipes",
    )
    trust_argument(made)
    made.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write the picture (default: in the folder of the figure, or of the first --run)",
    )
    machine_arguments(made)

    made = command(
        "recipes", recipes, "List recipes, tables and figures, or print one.", "equipoise recipes core/digits"
    )
    made.add_argument("recipe", metavar="RECIPE", nargs="?")

    made = command("runs", runs, "List runs.", "equipoise runs")
    made.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("runs"))

    data = command("data", lambda _: None, "List, get and check data sets.", "equipoise data get mnist")
    actions = data.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    made = command("list", data_list, "List data sets and where they were found.", "equipoise data list", actions)
    data_argument(made)
    made = command("get", data_get, "Download a data set, check it, unpack it.", "equipoise data get mnist", actions)
    made.add_argument("name", metavar="NAME")
    made.add_argument("--to", type=Path, metavar="DIR", help="where to keep it (default: the cache folder)")
    made = command(
        "check",
        data_check,
        "Compare files with their published checksums and read them.",
        "equipoise data check mnist",
        actions,
    )
    made.add_argument("name", metavar="NAME", nargs="?", help="default: every set that is found")
    data_argument(made)

    made = command("doctor", doctor, "Check installation, devices, data and a short solve.", "equipoise doctor")
    data_argument(made)
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Mistakes of the user get a sentence, not a traceback."""
    imports_are_done()
    top = parser()
    arguments, rest = top.parse_known_args(words)
    if hasattr(arguments, "changes"):  # argparse takes no more of a list once an option has come between
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
    except BrokenPipeError:  # the reader of a pipe has gone, as `| head` does
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
        print(f"equipoise: {printable_text(sentence(error))}", file=sys.stderr)
        return 2


def no_such_argument(arguments: Any, words: Sequence[str]) -> str:
    """A sentence for words that no command has; for ``--epochs 3``, with the change of the recipe that is meant."""
    options: list[str] = arguments.parser.options()
    word, equals, value = words[0].partition("=")
    if not equals and len(words) > 1 and not words[1].startswith("-"):
        value = words[1]
    near = did_you_mean(word, options, cutoff=0.65)
    if word.startswith("--") and not near and (keys := meant_keys(arguments, word.lstrip("-").replace("-", "_"))):
        either = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
        return f"there is no argument {words[0]!r}; a recipe is changed by key=value: {either}."
    if word.startswith("--") and not near and hasattr(arguments, "changes") and not hasattr(arguments, "recipe"):
        change = f"{word.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
        return f"there is no argument {words[0]!r}; an option of the task is given as key=value: {change}."
    return f"there is no argument {words[0]!r}; {near}options: {', '.join(options)}."


def meant_keys(arguments: Any, word: str) -> list[str]:
    """Return the full keys of the recipe that end in a word; empty if the command takes no recipe or no key does."""
    from equipoise.lab.recipes.recipe import RecipeError, full_keys, open_recipe

    if not hasattr(arguments, "recipe") or not hasattr(arguments, "changes"):
        return []
    try:
        tables = open_recipe(arguments.recipe).tables
        inside = [*(row["recipe"] for row in tables.get("rows", [])), *tables.get("recipes", [])]  # of table or figure
        return full_keys(word, open_recipe(inside[0].split()[0]).tables if inside else tables)
    except (RecipeError, AttributeError, KeyError, IndexError, TypeError):
        return full_keys(word, {})


def is_a_defect(error: Exception) -> bool:
    """Whether an error says nothing to a person: a traceback then helps more."""
    from equipoise.solution import ConvergenceError

    if isinstance(error, KeyError | IndexError | UnicodeDecodeError):
        return True
    ours = isinstance(error, ConvergenceError) or type(error).__module__.startswith("equipoise.")
    return isinstance(error, RuntimeError) and not ours and not isinstance(error, NotImplementedError)


def sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and not isinstance(error, MissingPackage):
        package = (error.name or "").partition(".")[0]
        return f"the package {package!r} is not installed: pip install 'equipoise[lab]'."
    return str(error)


def machine_of(arguments: Any) -> Any:
    from equipoise.lab.runs.machine import this_machine

    return this_machine(arguments.device, arguments.threads)


# Training


def train(arguments: Any) -> int:
    from equipoise.lab.recipes import recipe as lab_recipes
    from equipoise.lab.recipes.build import check
    from equipoise.lab.results.reproduce import shrunk
    from equipoise.lab.results.sweeps import train_recipe

    if arguments.recipe and "=" in arguments.recipe:  # `equipoise train optimizer.lr=0.1` changes the default recipe
        arguments.changes = [arguments.recipe, *arguments.changes]
        arguments.recipe = DEFAULT_RECIPE
    require_recipe(lab_recipes.open_recipe(arguments.recipe), arguments.recipe)  # before a budget that it has not
    source = lab_recipes.open_recipe(arguments.recipe, arguments.budget, arguments.changes)
    check(source)
    if arguments.report:
        import equipoise.lab.results.report  # noqa: F401  (a package that it misses shows now, not after training)
    with machine_of(arguments) as machine:
        if source.budgeted and machine.leads:
            print(f"{'budget ' + arguments.budget:<18}{shrunk([source])}", flush=True)
        return to_the_end(
            machine,
            lambda: train_recipe(source, arguments.runs, machine, arguments.data, report=arguments.report),
        )


def require_recipe(source: Source, name: str) -> None:
    from equipoise.lab.recipes.recipe import FigureSpec, RecipeError, Table, kind_of

    verb = {Table: "reproduce", FigureSpec: "figure"}.get(kind_of(source))
    if verb:
        raise RecipeError(
            f"{name} is a {'table' if verb == 'reproduce' else 'figure'}, not a recipe: equipoise {verb} {name}."
        )


def to_the_end(machine: Machine, work: Callable[[], object]) -> int:
    """Run training; when it is asked to stop, say how to go on."""
    from equipoise.lab.results.sweeps import Stopped

    try:
        work()
    except Stopped as stopped:
        if machine.leads:
            print(f"stopped at step {stopped.step} and saved; continue with: {shlex.join(stopped.resume)}")
        return 128 + stopped.number
    return 0


def resume(arguments: Any) -> int:
    from equipoise.lab.results.reproduce import continue_figure, continue_table
    from equipoise.lab.results.sweeps import resume_folder, threads_of

    if (arguments.folder / "result.json").is_file():  # of a run, or of a sweep
        print(f"{printable(arguments.folder)} is finished, so that there is nothing to continue; its result:")
    arguments.threads = arguments.threads or threads_of(arguments.folder)
    begun: dict[str, Callable[..., object]] = {
        "reproduce.json": continue_table,
        "figure.json": partial(continue_figure, out=arguments.out),
    }
    found = next((name for name in begun if (arguments.folder / name).exists()), None)
    if arguments.out is not None and found != "figure.json":
        raise ValueError(
            f"--out is where a figure's picture goes, and {arguments.folder} is not the folder of a figure."
        )
    go_on, trust = begun[found] if found else resume_folder, Trust.of(arguments.trust)
    with machine_of(arguments) as machine:
        return to_the_end(machine, lambda: go_on(arguments.folder, machine, arguments.data, trust=trust))


# Looking


def evaluate(arguments: Any) -> int:
    from equipoise.lab.files import write_json
    from equipoise.lab.results.trained import evaluate_run

    if arguments.certify:
        return certify(arguments)
    with machine_of(arguments) as machine:
        found = evaluate_run(
            open_run(arguments),
            machine,
            arguments.data,
            split=arguments.split,
            weights=arguments.weights,
            task=arguments.task,
            changes=arguments.changes,
            limit=arguments.limit,
        )
        if machine.leads:
            print_numbers(found.metrics)
            print_solver(found.solver)
            if arguments.json:
                write_json(arguments.json, found.record())
    return 0


def certify(arguments: Any) -> int:
    from equipoise.lab.files import write_json
    from equipoise.lab.results.certify import certify_run

    if arguments.task:
        raise ValueError("--certify and --task exclude each other: what is certified is classification.")
    run = open_run(arguments)
    with machine_of(arguments) as machine:
        found = certify_run(
            run,
            machine,
            arguments.data,
            split=arguments.split,
            weights=arguments.weights,
            changes=arguments.changes,
            limit=arguments.limit,
        )
    print(found.certificate)
    print_numbers({"accuracy": found.accuracy, "median radius": found.median_radius})
    attacks = found.attacks()
    radii = sorted({0.0, found.largest, *(entry.radius for entry in found.attacked)})
    under = [{entry.radius: f"{entry.accuracy:.2%}" for entry in entries} for entries in attacks.values()]
    rows = [(f"{r:.3g}", f"{found.accuracy_at(r):.2%}", *(column.get(r, "") for column in under)) for r in radii]
    print_table(("radius", "certified", *(f"under {name}" for name in attacks)), rows)
    if attacks:
        print(f"violations        {found.violations} of {found.inside} attacks inside a certified radius succeeded")
    print(f"written           {run.folder / 'certified.json'}, {run.folder / 'certified.png'}")
    if arguments.json:
        write_json(arguments.json, found.record())
    return 1 if found.violations else 0


def print_numbers(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        print(f"{name:<18}{value:.2%}" if "accuracy" in name else f"{name:<18}{value:.4g}")


def print_solver(solver: dict[str, Any]) -> None:
    for direction, numbers in solver.items():
        steps, residual = numbers["steps"], numbers["residual"]
        print(
            f"{direction + ' solves':<18}{1 - numbers['failed']:.2%} of {numbers['samples']} converged; "
            f"steps median {steps['median']}, most {steps['most']}; "
            f"residual median {residual['median']:.1e}, worst {residual['worst']:.1e}"
        )


def predict(arguments: Any) -> int:
    from equipoise.lab.results.predict import predict_images

    code = 0
    with machine_of(arguments) as machine:
        if not machine.leads:
            return code
        for found in predict_images(open_run(arguments), arguments.images, machine, arguments.weights):
            if found.answer is None:
                code = 2
            elif arguments.json:
                print(json.dumps({"image": str(found.image), **found.answer}), flush=True)
            else:
                answer = ", ".join(f"{name} {shown(value)}" for name, value in found.answer.items())
                print(f"{printable(found.image)}: {answer}", flush=True)
            if found.note:
                print(f"{'note' if found.answer else 'equipoise'}: {printable_text(found.note)}", file=sys.stderr)
    return code


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {shown(entry)}" for name, entry in value.items()) + ")"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def segment(arguments: Any) -> None:
    from equipoise.lab.results.segment import segment_images

    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        run, window = open_run(arguments), arguments.window
        for segmented in segment_images(run, arguments.images, machine, arguments.out, arguments.weights, window):
            print(f"written           {printable(segmented.picture)}, {printable(segmented.classes)}")
            if segmented.note:
                print(f"note              {segmented.note}")
            print_solver(segmented.solver)
            print_table(("class", "share"), [(name, f"{share:.2%}") for name, share in segmented.shares.items()])


def report(arguments: Any) -> None:
    from equipoise.lab.results.report import write_report

    with machine_of(arguments) as machine:
        runs = [open_run(arguments, folder) for folder in run_folders(arguments.folders)]
        path = write_report(runs, machine, arguments.data, arguments.out)
        if machine.leads:
            print(f"report            {printable(path)}")


def run_folders(folders: list[Path]) -> list[Path]:
    """Sweeps stand for their runs."""
    found: list[Path] = []
    for folder in folders:
        found += sorted(folder.glob("seed-*")) if (folder / "sweep.json").exists() else [folder]
    return found


def open_run(arguments: Any, folder: Path | None = None) -> Run:
    from equipoise.lab.runs import folder as lab_runs

    return lab_runs.open_run(folder or arguments.folder, arguments.trust)


def reproduce(arguments: Any) -> int:
    from equipoise.lab.results.reproduce import reproduce_table

    with machine_of(arguments) as machine:
        return to_the_end(
            machine,
            lambda: reproduce_table(
                arguments.recipe, arguments.budget, arguments.changes, arguments.runs, machine, arguments.data
            ),
        )


def figure(arguments: Any) -> int:
    from equipoise.lab.results.reproduce import draw_figure

    with machine_of(arguments) as machine:
        return to_the_end(
            machine,
            lambda: draw_figure(
                arguments.recipe,
                arguments.budget,
                arguments.changes,
                arguments.trained,
                arguments.runs,
                machine,
                arguments.data,
                arguments.out,
                Trust.of(arguments.trust),
            ),
        )


def recipes(arguments: Any) -> None:
    from equipoise.lab.results.overview import recipe_rows, recipe_text

    if arguments.recipe:
        print(recipe_text(arguments.recipe), end="")
    else:
        print_table(("name", "kind", "paper", "data", "parameters", "title"), recipe_rows())


def runs(arguments: Any) -> None:
    from equipoise.lab.results.overview import run_rows

    rows = run_rows(arguments.folder)
    if rows:
        print_table(("run", "recipe", "status", "epochs", "validation", "test", "time"), rows)
    else:
        print(f"no runs in {arguments.folder}; `equipoise train` makes one.")


# Data


def data_list(arguments: Any) -> None:
    from equipoise.lab.results.overview import data_rows

    rows, hints = data_rows(arguments.data)
    print_table(("name", "samples", "found in", "terms"), rows)
    for name, how in hints.items():
        print(f"\nto get {name}: {how}")


def data_get(arguments: Any) -> None:
    from equipoise.lab.results.overview import get_data

    for path in get_data(arguments.name, arguments.to):
        print(printable(path))


def data_check(arguments: Any) -> int:
    from equipoise.lab.results.overview import check_rows

    rows, sound = check_rows(arguments.name, arguments.data)
    print_table(("set", "file", "verdict"), rows)
    return 0 if sound else 1


def doctor(arguments: Any) -> int:
    from equipoise.lab.runs.doctor import examine

    return 0 if examine(arguments.data) else 1


def print_table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as what stands in them."""
    lines = [[printable(cell) for cell in row] for row in [heading, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
