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
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import equipoise
from equipoise.command_start import end_quietly
from equipoise.lab.printable import printable, printable_text
from equipoise.lab.trust import Trust, UntrustedName
from equipoise.options import UnknownOption, did_you_mean
from equipoise.registry import MissingPackage

if TYPE_CHECKING:
    from equipoise.lab.results.certify import Certified
    from equipoise.lab.runs.folder import Run
    from equipoise.lab.runs.machine import Machine

DEFAULT_RECIPE = "core/digits"


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest known word for a misspelled one."""

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)", message):
            known = [word.strip("' ") for word in match[2].split(",")]
            nearest = did_you_mean(match[1], known, cutoff=0.65)
            message = f"{message[: match.start()]}invalid choice {match[1]!r}; {nearest}known: {', '.join(known)}."
        if match := re.match(r"argument (\S+): invalid (int|float) value: (.*)", message):
            message = f"{match[1]} is {match[3]}; it must be a {'whole ' if match[2] == 'int' else ''}number."
        print(f"{self.prog}: {printable_text(message)}\nSee {self.prog} --help.", file=sys.stderr)
        raise SystemExit(2)

    def options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


# Commands and their arguments

Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and options for add_argument
Command = Callable[[argparse.Namespace], int | None]
COMMANDS: dict[str, tuple[Command, str, tuple[Argument, ...]]] = {}


def argument(*names: str, **options: Any) -> Argument:
    return names, options


def path(*names: str, **options: Any) -> Argument:
    return names, {"type": Path, **options}


def command(example: str, *arguments: Argument) -> Callable[[Command], Command]:
    """Register a function as the command of its name, "data_list" as "data list"; its docstring is the help."""

    def register(function: Command) -> Command:
        COMMANDS[function.__name__.replace("_", " ")] = (function, example, arguments)
        return function

    return register


def parser() -> Parser:
    """Return the parser of the whole command line."""
    top = Parser(
        prog="equipoise",
        description="Train, evaluate and reproduce equilibrium networks.",
        epilog="Example: equipoise train core/digits && equipoise report runs/core-digits-001",
    )
    top.add_argument("--version", action="version", version=f"equipoise {equipoise.__version__}")
    parents = {"": top.add_subparsers(metavar="COMMAND", dest="command", required=True, parser_class=Parser)}
    for name, (function, example, arguments) in COMMANDS.items():
        (parent, _, word), about = name.rpartition(" "), function.__doc__
        made = parents[parent].add_parser(word, help=about, description=about, epilog=f"Example: {example}")
        made.set_defaults(run=function, parser=made)
        for names, options in arguments:
            made.add_argument(*names, **options)
        made.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if name == "data":
            parents[name] = made.add_subparsers(metavar="ACTION", dest="action", required=True, parser_class=Parser)
    return top


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
DATA = path("--data", action="append", default=[], metavar="DIR", help="folder to search for data first; repeatable")
MACHINE = (
    argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if available)"),
    argument("--threads", type=int, help="number of CPU threads for torch"),
)


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
        print(f"equipoise: {printable_text(sentence)}", file=sys.stderr)
        return 2


def no_such_argument(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the message for unknown arguments; for ``--epochs 3``, it suggests the change to the recipe."""
    options: list[str] = arguments.parser.options()
    word, equals, value = words[0].partition("=")
    if not equals and len(words) > 1 and not words[1].startswith("-"):
        value = words[1]
    key, nearest = word.lstrip("-").replace("-", "_"), did_you_mean(word, options, cutoff=0.65)
    if word.startswith("--") and not nearest and hasattr(arguments, "changes"):
        if not hasattr(arguments, "recipe"):
            return (
                f"there is no argument {words[0]!r}; give options of the task as key=value: {key}={value or 'VALUE'}."
            )
        if keys := meant_keys(arguments.recipe, key):
            either = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
            return f"there is no argument {words[0]!r}; change a recipe with key=value: {either}."
    return f"there is no argument {words[0]!r}; {nearest}options: {', '.join(options)}."


def meant_keys(name: str, word: str) -> list[str]:
    """Return the full keys of a recipe, or of the first recipe of a table or figure, that end in a word."""
    from equipoise.lab.recipes.reading import RecipeError, full_keys, open_recipe

    try:
        tables = open_recipe(name).tables
        inside = [*(row["recipe"] for row in tables.get("rows", [])), *tables.get("recipes", [])]
        return full_keys(word, open_recipe(inside[0].split()[0]).tables if inside else tables)
    except (RecipeError, AttributeError, KeyError, IndexError, TypeError):
        return full_keys(word, {})


def is_a_defect(error: Exception) -> bool:
    """Return whether an error needs a traceback, because its message alone would not help a user."""
    from equipoise.solution import ConvergenceError

    if isinstance(error, KeyError | IndexError | UnicodeDecodeError):
        return True
    ours = isinstance(error, ConvergenceError) or type(error).__module__.startswith("equipoise.")
    return isinstance(error, RuntimeError) and not ours and not isinstance(error, NotImplementedError)


def machine_of(arguments: argparse.Namespace) -> AbstractContextManager[Machine]:
    from equipoise.lab.runs.machine import this_machine

    return this_machine(arguments.device, arguments.threads)


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
    from equipoise.lab.training.sweeps import train_sweep
    from equipoise.lab.training.trainer import train_run

    if arguments.recipe and "=" in arguments.recipe:  # `equipoise train optimizer.lr=0.1` changes the default recipe
        arguments.changes = [arguments.recipe, *arguments.changes]
        arguments.recipe = DEFAULT_RECIPE
    source = open_recipe(arguments.recipe, arguments.budget, arguments.changes, kind=Recipe)
    check(source)
    if arguments.report:
        import equipoise.lab.results.report  # noqa: F401  (a missing package shows now, not after training)
    with machine_of(arguments) as machine:
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
    with machine_of(arguments) as machine:
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
)
def reproduce(arguments: argparse.Namespace) -> int:
    """Train every row of a published table, and print published and measured numbers."""
    from equipoise.lab.results.reproduce import reproduce_table

    request = (arguments.recipe, arguments.budget, arguments.changes, arguments.runs)
    with machine_of(arguments) as machine:
        return to_the_end(machine, lambda: reproduce_table(*request, machine, arguments.data))


@command(
    "equipoise figure core/convergence --budget small",
    *(argument("recipe", metavar="FIGURE", help=ANY_RECIPE), *CHANGES, TRUST, DATA, *MACHINE),
    path(
        "--run", dest="trained", action="append", default=[], metavar="RUN", help="trained run to use, one per recipe"
    ),
    path("--out", metavar="FILE", help="file for the picture (default: in the folder of the figure or first --run)"),
)
def figure(arguments: argparse.Namespace) -> int:
    """Draw a published figure, training what it needs."""
    from equipoise.lab.results.reproduce import draw_figure

    request = (arguments.recipe, arguments.budget, arguments.changes, arguments.trained, arguments.runs)
    trust = Trust.of(arguments.trust)
    with machine_of(arguments) as machine:
        return to_the_end(machine, lambda: draw_figure(*request, machine, arguments.data, arguments.out, trust))


# Using a trained run


@command(
    "equipoise evaluate runs/core-mnist-001 --task robustness radius=0.1 steps=10",
    *(*RUN, TRUST),
    argument(
        "changes", metavar="key=value", nargs="*", default=[], help="options of the task or --certify, e.g. radius=0.1"
    ),
    argument("--task", help="task to evaluate on (default: the run's own)"),
    argument(
        "--certify",
        action="store_true",
        help="compute certified radii, within which the class of an image cannot change, and attack the images "
        "(monDEQ); options: samples=200 steps=20 radii=[0.1,0.5] for the attacks, relative=1e-6 for the solves",
    ),
    argument("--split", choices=("train", "val", "test"), default="test", help="split to evaluate on (default: test)"),
    argument("--limit", type=int, help="number of samples, evenly spaced over the split (default: all)"),
    path("--json", metavar="FILE", help="also write the numbers to a file"),
    *(DATA, *MACHINE),
)
def evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate a trained run."""
    from equipoise.lab.files import write_json

    if arguments.certify and arguments.task:
        raise ValueError("--certify and --task are mutually exclusive: omit one; only classification can be certified.")
    run = open_run(arguments)
    options = {name: getattr(arguments, name) for name in ("split", "weights", "changes", "limit")}
    with machine_of(arguments) as machine:
        if arguments.certify:
            from equipoise.lab.results.certify import certify_run

            certified = certify_run(run, machine, arguments.data, **options)
            record, code = certified.record(), 1 if certified.violations else 0
            print_certified(certified, run)
        else:
            from equipoise.lab.results.trained import evaluate_run

            evaluation = evaluate_run(run, machine, arguments.data, task=arguments.task, **options)
            record, code = evaluation.record(), 0
            if machine.leads:
                print_numbers(evaluation.metrics)
                print_solver(evaluation.solver)
        if arguments.json and machine.leads:
            write_json(arguments.json, record)
    return code


def print_certified(certified: Certified, run: Run) -> None:
    print(certified.certificate)
    print_numbers({"accuracy": certified.accuracy, "median radius": certified.median_radius})
    attacks = certified.attacks()
    radii = sorted({0.0, certified.largest, *(entry.radius for entry in certified.attacked)})
    under = [{entry.radius: f"{entry.accuracy:.2%}" for entry in entries} for entries in attacks.values()]
    rows = [(f"{r:.3g}", f"{certified.accuracy_at(r):.2%}", *(column.get(r, "") for column in under)) for r in radii]
    print_table(("radius", "certified", *(f"under {name}" for name in attacks)), rows)
    if attacks:
        count = f"{certified.violations} of {certified.inside}"
        print(f"violations        {count} attacks inside a certified radius succeeded")
    print(f"written           {run.folder / 'certified.json'}, {run.folder / 'certified.png'}")


@command(
    "equipoise predict runs/core-mnist-001 seven.png",
    *(*RUN, TRUST, IMAGES, *MACHINE),
    argument("--json", action="store_true", help="print one line of JSON per image"),
)
def predict(arguments: argparse.Namespace) -> int:
    """Classify images with a trained run."""
    from equipoise.lab.results.predict import predict_images

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return "(" + ", ".join(f"{name} {shown(entry)}" for name, entry in value.items()) + ")"
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    code = 0
    with machine_of(arguments) as machine:
        if not machine.leads:
            return code
        for prediction in predict_images(open_run(arguments), arguments.images, machine, arguments.weights):
            if prediction.answer is None:
                code = 2
            elif arguments.json:
                print(json.dumps({"image": str(prediction.image), **prediction.answer}), flush=True)
            else:
                answer = ", ".join(f"{name} {shown(value)}" for name, value in prediction.answer.items())
                print(f"{printable(prediction.image)}: {answer}", flush=True)
            if prediction.note:
                label = "note" if prediction.answer else "equipoise"
                print(f"{label}: {printable_text(prediction.note)}", file=sys.stderr)
    return code


@command(
    "equipoise segment runs/mdeq-camvid-small-001 street.png -o seen.png",
    *(*RUN, TRUST, IMAGES, *MACHINE),
    path(
        *("-o", "--out"),
        metavar="OUT",
        help="picture to write (.png), or folder (default: IMAGE-segmented.png in the current folder); the class of "
        "each pixel is written beside it, as OUT-classes.png",
    ),
    argument(
        "--window",
        type=int,
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="process an image in overlapping windows of this size (default: as in the run's evaluation)",
    ),
)
def segment(arguments: argparse.Namespace) -> None:
    """Segment images of any size with a trained run."""
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


def picture(default: str) -> Argument:
    return path("-o", "--out", default=Path(default), metavar="FILE", help=f"picture to write (default: {default})")


LATENTS = argument(
    "--latents",
    type=int,
    metavar="N",
    help="training images to whose latent vectors the density is fitted, the first time (default 2000; a VAE has a "
    "prior, which is used unless this is given)",
)


@command(
    "equipoise sample runs/jiio-celeba-001 -n 64 -o faces.png",
    *(*RUN, picture("samples.png"), TRUST, DATA, *MACHINE),
    argument("-n", "--samples", type=int, default=64, metavar="N", help="number of images (default: 64)"),
    argument("--seed", type=int, default=0, metavar="N", help="seed of the samples (default: 0)"),
    LATENTS,
)
def sample(arguments: argparse.Namespace) -> None:
    """Generate images with a trained generator."""
    from equipoise.lab.results.sample import sample_images

    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        density = sample_images(
            open_run(arguments),
            machine,
            arguments.out,
            arguments.samples,
            seed=arguments.seed,
            weights=arguments.weights,
            latents=arguments.latents,
            folders=arguments.data,
        )
    print(f"written           {printable(arguments.out)}")
    if density is None:
        print("density           prior of the VAE, N(0, I)")
    else:
        size = density.size
        kind = "diagonal" if size.diagonal else "full"
        print(f"density           {size.components} Gaussians ({kind} covariance) of codes of {size.code} numbers")


@command(
    "equipoise distance runs/jiio-celeba-001 -n 1000 --features classifier",
    *(*RUN, TRUST, DATA, *MACHINE),
    argument("-n", "--images", type=int, default=1000, metavar="N", help="number of test images (default 1000)"),
    argument(
        "--features",
        choices=("classifier", "inception"),
        default="classifier",
        help="network whose features are compared: a small classifier that is part of equipoise, or the FID's "
        "Inception network, whose file you supply (default: classifier)",
    ),
    argument("--seed", type=int, default=0, metavar="N", help="seed of the samples (default 0)"),
    LATENTS,
    path("--json", metavar="FILE", help="also write the numbers to a file"),
)
def distance(arguments: argparse.Namespace) -> None:
    """Compare test images with the images of a trained generator by a Fréchet distance, such as the FID."""
    from equipoise.lab.files import write_json
    from equipoise.lab.results.distance import run_distances

    names = ("seed", "weights", "latents")
    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        options = {name: getattr(arguments, name) for name in names}
        run, features = open_run(arguments), arguments.features
        found = run_distances(run, machine, features, arguments.images, folders=arguments.data, **options)
    print(f"distance          {found.distance} from {found.images} test images")
    print(f"features          {found.features}")
    print(f"reconstructions   {found.reconstructions:.4g}")
    if found.optimised is not None:
        print(f"by joint steps    {found.optimised:.4g}")
    print(f"samples           {found.samples:.4g} ({found.images} samples)")
    print(f"training images   {found.training:.4g} ({found.training_images} training images, for comparison)")
    if found.note:
        print(f"note              {found.note}")
    if arguments.json:
        write_json(arguments.json, found.record())


@command(
    "equipoise interpolate runs/jiio-celeba-001 a.png b.png -o between.png",
    *(*RUN, picture("interpolation.png"), TRUST, *MACHINE),
    path("first", metavar="IMAGE", help="image file to start from"),
    path("second", metavar="IMAGE", help="image file to end with"),
    argument("--frames", type=int, default=8, metavar="N", help="number of images, both ends included (default: 8)"),
)
def interpolate(arguments: argparse.Namespace) -> None:
    """Interpolate between the latent vectors of two images."""
    from equipoise.lab.results.sample import interpolate_images

    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        run, files = open_run(arguments), (arguments.first, arguments.second)
        for note in interpolate_images(run, machine, *files, arguments.out, arguments.frames, arguments.weights):
            print(f"note              {note}")
        print(f"written           {printable(arguments.out)}")


@command(
    "equipoise restore runs/jiio-celeba-001 face.png --inpaint 10 -o strip.png",
    *(*RUN, TRUST, path("image", metavar="IMAGE", help="image file")),
    argument("--inpaint", type=int, metavar="SIDE", help="hide a random square of this side, in pixels, and fill it"),
    path("--mask", metavar="FILE", help="fill the pixels that are black in this file, an image of the size of IMAGE"),
    argument("--denoise", type=float, metavar="SIGMA", help="noise of this standard deviation; pixels are in [-1, 1]"),
    argument("--deblur", type=float, metavar="SIGMA", help="Gaussian blur of this standard deviation, in pixels"),
    argument("--upscale", type=int, metavar="FACTOR", help="enlarge an image that was shrunk by this factor"),
    argument(
        "--degraded",
        action="store_true",
        help="IMAGE is degraded already (default: IMAGE is the truth, and is degraded first)",
    ),
    argument("--steps", type=int, default=100, metavar="N", help="number of joint steps (default: %(default)s)"),
    argument("--seed", type=int, default=0, metavar="N", help="seed of the square or the noise (default: 0)"),
    path("-o", "--out", metavar="FILE", help="strip to write (default: IMAGE-restored.png in the current folder)"),
    *MACHINE,
)
def restore(arguments: argparse.Namespace) -> None:
    """Restore an image with a trained generator: inpaint, denoise, deblur or upscale."""
    from equipoise.lab.results.restore import Request, restore_image

    names = ("inpaint", "mask", "denoise", "deblur", "upscale")
    given = [name for name in names if getattr(arguments, name) is not None]
    if len(given) != 1:
        got = " and ".join(f"--{name}" for name in given) or "none"
        raise ValueError(f"give exactly one of {', '.join(f'--{name}' for name in names)}; got {got}.")
    problem = None if arguments.mask else given[0]
    amount = None if problem is None else getattr(arguments, problem)
    options = {name: getattr(arguments, name) for name in ("mask", "degraded", "steps", "seed")}
    request = Request(arguments.image, problem, amount, **options)
    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        restored = restore_image(open_run(arguments), request, machine, arguments.out, arguments.weights)
    print(f"written           {printable(restored.strip)}")
    for note in restored.notes:
        print(f"note              {note}")
    print(f"misfit            {restored.misfit:.4g} (mean squared error of the measurements)")
    if restored.quality:
        quality = restored.quality.items()
        rows = [(n, f"{ratio:.2f} dB", "-" if ssim != ssim else f"{ssim:.3f}") for n, (ratio, ssim) in quality]
        print_table(("image", "PSNR", "SSIM"), rows)


@command(
    "equipoise attack runs/jiio-mnist-clean-001 seven.png --radius 0.5 -o panel.png",
    *(*RUN, TRUST, path("image", metavar="IMAGE", help="image file"), *MACHINE),
    argument("--label", help="true class, by name or number (default: the class that the run predicts)"),
    argument("--norm", choices=("l2", "linf"), default="l2", help="norm of the perturbation (default: l2)"),
    argument("--radius", type=float, default=1.0, help="largest norm, with pixels in [0, 1] (default: 1)"),
    argument("--attack", choices=("jiio", "pgd", "foolbox"), default="jiio", help="method (default: jiio)"),
    argument("--steps", type=int, help="number of steps (default: 50 of jiio, 20 of the others)"),
    path(
        *("-o", "--out"),
        metavar="FILE",
        help="picture to write (default: IMAGE-attacked.png in the current folder)",
    ),
)
def attack(arguments: argparse.Namespace) -> None:
    """Perturb an image so that a trained run misclassifies it, and draw it before and after."""
    from equipoise.lab.results.attack import attack_image

    names = ("label", "norm", "radius", "attack", "steps")
    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        options = {name: getattr(arguments, name) for name in names}
        run, weights = open_run(arguments), arguments.weights
        found = attack_image(run, arguments.image, machine, arguments.out, weights, **options)
    if found.note:
        print(f"note              {found.note}")
    for title, answer in (("clean", found.clean), ("attacked", found.attacked)):
        print(f"{title:<18}{', '.join(f'{name} {value:.3f}' for name, value in answer.items())}")
    print(f"distance          {found.distance:.4g} ({arguments.norm}, radius {arguments.radius:g})")
    print(f"{'misclassified' if found.succeeded else 'still classified':<18}class {found.label}")
    print(f"written           {printable(found.picture)}")


@command(
    "equipoise export runs/mondeq-mnist-fc-001 model.onnx --check",
    *RUN,
    path("out", metavar="FILE", help="file to write, ending in .onnx"),
    TRUST,
    argument(
        "--steps",
        type=int,
        metavar="N",
        help="number of steps of every solve, written out without a loop (default: each sample stops by its residual)",
    ),
    argument("--solver", metavar="NAME", help="solver of every equilibrium, e.g. anderson (default: the run's own)"),
    argument("--no-statistics", action="store_true", help="return the outputs only, no steps, residuals and results"),
    argument("--opset", type=int, metavar="N", help="version of the ONNX operators (default: that of torch)"),
    argument("--check", action="store_true", help="compare the file with torch on test samples"),
    argument("--limit", type=int, default=1000, help="number of samples for --check, evenly spaced (default: 1000)"),
    DATA,
    argument("--threads", type=int, help="number of CPU threads"),
)
def export(arguments: argparse.Namespace) -> None:
    """Write the model of a trained run as an ONNX file, which runs without torch."""
    from equipoise.export import export_run
    from equipoise.lab.runs.machine import this_machine

    options = {name: getattr(arguments, name) for name in ("weights", "solver", "steps", "opset")}
    check = arguments.limit if arguments.check else None
    with this_machine("cpu", arguments.threads) as machine:
        if not machine.leads:
            return
        run, statistics = open_run(arguments), not arguments.no_statistics
        exported, agreement = export_run(
            run, machine, arguments.out, check=check, folders=arguments.data, statistics=statistics, **options
        )
    print(f"written           {printable_text(str(exported).splitlines()[0])}")
    for line in str(exported).splitlines()[1:]:
        title, _, listed = line.partition(": ")
        print(f"{title:<18}{listed}")
    if agreement:
        print(f"check             {agreement}")


@command(
    "equipoise report runs/core-digits-001 runs/core-digits-002",
    path("folders", metavar="RUN", nargs="+", help="folder of a run or sweep"),
    path("--out", metavar="FILE", help="file to write (default: report.html in the folder of the first run)"),
    *(TRUST, DATA, *MACHINE),
)
def report(arguments: argparse.Namespace) -> None:
    """Write an HTML page with curves, pictures and numbers of one or several runs."""
    folders: list[Path] = []
    for folder in arguments.folders:
        folders += sorted(folder.glob("seed-*")) if (folder / "sweep.json").exists() else [folder]
    with machine_of(arguments) as machine:
        print_report(machine, arguments.data, [open_run(arguments, folder) for folder in folders], arguments.out)


def print_report(machine: Machine, folders: Sequence[Path], runs: list[Run], out: Path | None) -> None:
    from equipoise.lab.results.report import write_report

    path = write_report(runs, machine, folders, out)
    if machine.leads:
        print(f"report            {printable(path)}")


@command(
    "equipoise results --add runs/mondeq-mnist-fc-001 --as mondeq/mnist-fc",
    path(
        "--add", metavar="FOLDER", help="finished run, sweep, table or figure to copy into the folder of results first"
    ),
    argument("--as", dest="name", metavar="NAME", help="name of the result that is added, such as mondeq/mnist-fc"),
    argument("--check", action="store_true", help="write nothing; exit with code 1 if the page is out of date"),
    path("--folder", default=Path("results"), metavar="DIR", help="folder of results (default: results)"),
    path("--out", default=Path("docs/results.md"), metavar="FILE", help="page to write (default: docs/results.md)"),
)
def results(arguments: argparse.Namespace) -> int:
    """Generate the page of all results, with every table and claim of the papers, from a folder of stored results."""
    from equipoise.lab.results.results_page import difference, results_page, write_page

    if (arguments.add is None) != (arguments.name is None) or (arguments.add and arguments.check):
        raise ValueError("--add FOLDER and --as NAME go together, without --check.")
    if arguments.add is not None:
        from equipoise.lab.results.add_result import add_result

        for file in add_result(arguments.add, arguments.name, arguments.folder):
            print(f"stored            {printable(file)}")
    if arguments.check:
        if text := difference(results_page(arguments.folder, arguments.out), arguments.out):
            print(text)
            return 1
        print(f"up to date        {printable(arguments.out)}")
        return 0
    page = write_page(arguments.folder, arguments.out)
    print(f"claims            {', '.join(f'{count} {mark}' for mark, count in sorted(page.marks.items())) or 'none'}")
    print(f"rows              {page.measured} of {page.rows} measured")
    for file, moved in page.stale:
        print(f"stale             {printable(file)}: {', '.join(moved[:3])}{', ...' if moved[3:] else ''}")
    print(f"written           {printable(arguments.out)}")
    return 0


@command(
    "equipoise page --run runs/jiio-celeba-001",
    argument("--run", dest="runs", action="append", default=[], metavar="RUN", help="trained run to show; repeatable"),
    argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"),
    argument("--port", type=int, default=8421, help="port, or 0 for a free one (default: %(default)s)"),
    *(TRUST, DATA, *MACHINE),
)
def page(arguments: argparse.Namespace) -> None:
    """Open a local page on which trained models can be tried, and watched while they are solved."""
    from equipoise.page import run_page

    if arguments.threads is None:
        arguments.threads = 1  # two solves run at once, and small tensors gain little from more threads
    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        run_page(arguments.runs, machine, arguments.host, arguments.port, Trust.of(arguments.trust), arguments.data)


def open_run(arguments: argparse.Namespace, folder: str | Path | None = None) -> Run:
    from equipoise.lab.runs.folder import open_run

    return open_run(folder or arguments.folder, getattr(arguments, "trust", ()))


def print_numbers(metrics: dict[str, float]) -> None:
    from equipoise.lab.training.evaluate import format_metric

    for name, value in metrics.items():
        print(f"{name:<17} {format_metric(name, value)}")  # names may be longer


def print_solver(solver: dict[str, Any]) -> None:
    for direction, numbers in solver.items():
        steps, residual = numbers["steps"], numbers["residual"]
        print(
            f"{direction + ' solves':<18}{1 - numbers['failed']:.2%} of {numbers['samples']} converged; "
            f"steps median {steps['median']}, most {steps['most']}; "
            f"residual median {residual['median']:.1e}, worst {residual['worst']:.1e}"
        )


def print_table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns as wide as their content."""
    lines = [[printable(cell) for cell in row] for row in [heading, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


@command(
    "equipoise convert MDEQ_TINY_Cls.pkl --as mdeq -o mdeq.safetensors",
    path("file", metavar="FILE", help="PyTorch checkpoint of the authors' code; nothing in it is run"),
    argument("--as", dest="kind", choices=("mdeq", "mondeq"), required=True, help="model that the file holds"),
    path("-o", "--out", metavar="FILE", help="file to write (default: FILE.safetensors in the current folder)"),
    argument("--m", type=float, default=1.0, help="m of a monDEQ, which is not part of its file (default: 1)"),
)
def convert(arguments: argparse.Namespace) -> None:
    """Convert a published checkpoint of MDEQ or monDEQ into one that the other commands and eq.load open."""
    from equipoise.lab.runs.published.convert import convert
    from equipoise.lab.runs.published.plan import listed

    converted = convert(arguments.file, arguments.kind, arguments.out, m=arguments.m)
    print(f"model             {converted.title}; {converted.parameters:,} parameters")
    print(f"used              {len(converted.used)} tensors: {listed(map(printable, converted.used))}")
    for part in converted.left_out:
        print(f"left out          {listed(map(printable, part.names))}: {part.reason}")
    if converted.added:
        print(f"not in the file   {listed(converted.added)}")
    for note in converted.notes:
        print(f"note              {note}")
    print(f"written           {printable(converted.file)}")


# Lists


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
    argument("--add", dest="folder", metavar="RUN", help="finished run whose model to ship, in the package's folder"),
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
    elif arguments.name:
        print(card_of(arguments.name), end="")
    else:
        print_table(("name", "model", "data", "parameters", "size", "test"), weights_rows())


def add_to_weights(arguments: argparse.Namespace) -> None:
    from equipoise.lab.results.add_weights import add_weights

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


@command("equipoise runs", path("folder", metavar="DIR", nargs="?", default="runs", help="folder (default: runs)"))
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
    path("--to", metavar="DIR", help="folder to download it to (default: the cache folder)"),
)
def data_get(arguments: argparse.Namespace) -> None:
    """Download, check and unpack a data set."""
    from equipoise.lab.results.overview import get_data

    for path in get_data(arguments.name, arguments.to):
        print(printable(path))


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
    """Check installation, devices, data and a short solve."""
    from equipoise.lab.runs.doctor import examine

    return 0 if examine(arguments.data) else 1
