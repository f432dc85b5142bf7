"""Commands that use a trained run, and the page of all results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.cli.declare import DATA, IMAGES, MACHINE, RUN, TRUST, Argument, Commands, argument, path
from equipoise.cli.shared import machine_of, open_run, print_numbers, print_solver, print_table
from equipoise.lab.printable import printable, printable_text
from equipoise.lab.trust import Trust

if TYPE_CHECKING:
    from equipoise.lab.results.certify import Certified
    from equipoise.lab.runs.folder import Run
    from equipoise.lab.runs.machine import Machine

CHECKED = 1000  # test samples on which an exported file is compared with torch
COMMANDS = Commands()
command = COMMANDS.command


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
    help="number of training images, to whose latent vectors the density is fitted the first time and when this number "
    "changes (default: 2000, or as the last time; for a VAE, its prior is used unless this is given)",
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
    argument("-n", "--images", type=int, default=1000, metavar="N", help="number of test images (default: 1000)"),
    argument(
        "--features",
        choices=("classifier", "inception"),
        default="classifier",
        help="network whose features are compared: a small classifier that is part of equipoise, or the FID's "
        "Inception network, whose file you supply (default: classifier)",
    ),
    argument("--seed", type=int, default=0, metavar="N", help="seed of the samples (default: 0)"),
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
        help="IMAGE is already degraded (default: IMAGE is the truth and is degraded first)",
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
    argument("--steps", type=int, help="number of steps (default: 50 for jiio, 20 for the others)"),
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
    before = " (before the attack as well)" if found.succeeded and found.wrong_before else ""
    print(f"{'misclassified' if found.succeeded else 'still classified':<18}class {found.label}{before}")
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
    argument("--no-statistics", action="store_true", help="leave out the steps, residual and result of each sample"),
    argument("--opset", type=int, metavar="N", help="version of the ONNX operators (default: that of torch)"),
    argument("--check", action="store_true", help="compare the file with torch on test samples"),
    argument("--limit", type=int, help=f"number of samples for --check, evenly spaced (default: {CHECKED})"),
    DATA,
    argument("--threads", type=int, help="number of CPU threads"),
)
def export(arguments: argparse.Namespace) -> None:
    """Write the model of a trained run as an ONNX file, which runs without torch."""
    from equipoise.export import export_run
    from equipoise.lab.runs.machine import this_machine

    options = {name: getattr(arguments, name) for name in ("weights", "solver", "steps", "opset")}
    if not arguments.check and (arguments.limit is not None or arguments.data):
        given = "--data" if arguments.limit is None else "--limit"
        raise ValueError(f"{given} is for --check, which compares the file with torch on test samples: add --check.")
    check = (CHECKED if arguments.limit is None else arguments.limit) if arguments.check else None
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
    """Open a local page to try trained models and watch their equilibria being found."""
    from equipoise.page import run_page

    if arguments.threads is None:
        arguments.threads = 1  # two solves run at once, and small tensors gain little from more threads
    with machine_of(arguments) as machine:
        if not machine.leads:
            return
        run_page(arguments.runs, machine, arguments.host, arguments.port, Trust.of(arguments.trust), arguments.data)


@command(
    "equipoise convert MDEQ_TINY_Cls.pkl --as mdeq -o mdeq.safetensors",
    path("file", metavar="FILE", help="PyTorch checkpoint of the authors' code; nothing in it is run"),
    argument("--as", dest="kind", choices=("mdeq", "mondeq"), required=True, help="model that the file holds"),
    path("-o", "--out", metavar="FILE", help="file to write (default: FILE.safetensors in the current folder)"),
    argument("--m", type=float, default=1.0, help="monotonicity m of a monDEQ, which its file lacks (default: 1)"),
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
