"""What the papers' large models need on GPUs: flops and traffic of an image, memory, hours, machines, gradient traffic.

The model, solver, steps and batch size are those of a recipe. Its training step runs here as it is, but on a few small
images: flops, bytes and peak memory are sums of a part that depends on the weights alone and of a part proportional to
batch size and pixels, so two image sizes determine both; a third one checks it. Memory does not depend on the number of
solver steps, so it is measured with few of them, on larger images, where the part of the weights does not hide that of
the images. The rest is arithmetic with the numbers under "assumptions".
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from math import ceil, floor, prod

import torch

import equipoise as eq
from counting import count
from equipoise.lab.recipes import build
from equipoise.lab.recipes.reading import RecipeFile, open_recipe
from equipoise.tasks.generation import Generation
from measuring import peak_of
from tables import Row
from training_steps import Step, limited

# --- assumptions ------------------------------------------------------------------------------------------------------

SUSTAINED = 0.4  # of a GPU's peak rate of float32 operations, and of its bandwidth
USABLE = 0.9  # of a GPU's memory: the rest is for the allocator, cuDNN and NCCL
PER_MACHINE = 8  # GPUs


@dataclass(frozen=True)
class GPU:
    """Peak rates of a data sheet: float32 without tensor cores."""

    name: str
    gigabytes: float
    teraflops: float
    bandwidth: float  # GB/s


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("RTX 2080 Ti", 11, 13.4, 616),
        GPU("Quadro RTX 8000", 48, 16.3, 672),
        GPU("A100 80 GB", 80, 19.5, 2039),
        GPU("H100 SXM", 80, 67, 3350),
    )
}
LINKS = {"10 Gbit/s": 1.25, "PCIe 3.0 x16": 12.0, "100 Gbit/s": 12.5, "NVLink 3": 250.0}  # GB/s, one direction


@dataclass(frozen=True)
class Paper:
    """A recipe, what is measured of it, and what its paper reports."""

    recipe: str
    classes: int
    sides: tuple[int, int, int]  # of the images whose steps are counted: two to fit, one to check
    memory_sides: tuple[int, int, int]  # of those whose memory is measured
    gpu: str = ""  # as reported
    gpus: int = 0
    steps: int | None = None  # training steps; None: the recipe's epochs
    reported: str = ""


SMALL, LARGE = (32, 64, 96), (192, 256, 320)
FACES = (16, 24, 32), (32, 48, 64)
PAPERS = (
    Paper("mdeq/imagenet-small", 1000, SMALL, LARGE),
    Paper("mdeq/imagenet-large", 1000, SMALL, LARGE, "RTX 2080 Ti", 4),
    Paper("mdeq/imagenet-xl", 1000, SMALL, LARGE, "Quadro RTX 8000", 8),
    Paper("mdeq/cityscapes-xl", 19, SMALL, LARGE, "Quadro RTX 8000", 8),
    Paper("jiio/celeba", 0, *FACES, "RTX 2080 Ti", 4, reported="17.45 GB for a batch of 48"),
    Paper("jiio/celeba-100", 0, *FACES, "RTX 2080 Ti", 4, steps=25_000, reported="4.5 to 5 days"),
)
BATCH = 2  # images measured
FEW = 3  # solver steps while memory is measured


# --- measuring --------------------------------------------------------------------------------------------------------


def step_of(source: RecipeFile, phase: int, side: int, classes: int, steps: int | None = None) -> Step:
    """Return the training step of a phase of a recipe, on random images, with all solver steps, or ``steps``, taken."""
    torch.manual_seed(0)
    recipe, where = source.phase(phase), source.where_in(phase)
    names = tuple(map(str, range(classes)))
    facts = {"shape": (3, side, side), "classes": classes, "class_names": names, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    order = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
    model = build.build_model(recipe, facts, where).to(memory_format=order)  # type: ignore[call-overload]
    for layer in (module for module in model.modules() if isinstance(module, eq.Equilibrium)):
        layer.tolerance, layer.on_failure = limited(steps or layer.tolerance.max_steps), "ignore"
        if isinstance(rule := layer.gradient, eq.ImplicitGradient) and rule.tolerance is not None:
            layer.gradient = replace(rule, tolerance=limited(steps or rule.tolerance.max_steps))
    task = build.build_task(recipe, facts, where)
    if isinstance(task, Generation) and steps:
        task.steps, task.penalty_from = steps, 1
    images = torch.rand(BATCH, 3, side, side).contiguous(memory_format=order)
    labels = torch.zeros((BATCH, side, side) if recipe.task.name == "segmentation" else BATCH, dtype=torch.long)
    return Step(model.train(), lambda net: task.loss(net, (images, labels))[0])


@dataclass(frozen=True)
class Linear:
    """A quantity of a step, ``fixed`` + batch * ``each``, and its error on the size that was not fitted."""

    fixed: float
    each: float
    error: float

    @classmethod
    def through(cls, sides: Sequence[int], values: Sequence[float], pixels: int) -> Linear:
        """Return the line through the values at the first two sizes, for images of so many pixels."""
        first, second, third = (BATCH * side**2 for side in sides)
        slope = (values[1] - values[0]) / (second - first)
        fixed = values[0] - slope * first
        return cls(fixed, slope * pixels, (fixed + slope * third) / values[2] - 1)

    def __call__(self, batch: float) -> float:
        return self.fixed + batch * self.each


@dataclass(frozen=True)
class Phase:
    """What a training step of one phase of a recipe costs."""

    name: str
    epochs: int
    flops: Linear
    bytes: Linear
    memory: Linear


@dataclass(frozen=True)
class Needs:
    """What the training of a recipe costs."""

    paper: Paper
    parameters: int
    resident: float  # bytes of weights and optimizer state
    batch: int
    images: int  # of an epoch
    phases: list[Phase]

    def steps(self, phase: Phase) -> float:
        if self.paper.steps is not None:
            return self.paper.steps
        return phase.epochs * self.images / self.batch

    def memory(self, batch: float) -> float:
        """Return the bytes that the costliest phase needs for ``batch`` images."""
        return self.resident + max(phase.memory(batch) for phase in self.phases)

    def fitting(self, gpu: GPU) -> int:
        """Return how many images of a batch fit into a GPU."""
        room = USABLE * gpu.gigabytes * 1e9 - self.resident
        return max(0, min(floor((room - phase.memory.fixed) / phase.memory.each) for phase in self.phases))

    def hours(self, gpu: GPU) -> tuple[float, float]:
        """Return the GPU hours of the whole training, by flops and by bytes; those of the weights count once."""
        steps = [(self.steps(phase), phase) for phase in self.phases]
        flops = sum(count * phase.flops(self.batch) for count, phase in steps)
        moved = sum(count * phase.bytes(self.batch) for count, phase in steps)
        return flops / (SUSTAINED * gpu.teraflops * 1e12) / 3600, moved / (SUSTAINED * gpu.bandwidth * 1e9) / 3600


def measure(paper: Paper) -> Needs:
    """Measure the steps of every phase of a recipe on small images."""
    source = open_recipe(paper.recipe)
    recipe = source.recipe
    crop = recipe.task.options.get("crop") or [recipe.data.options["size"]] * 2
    phases, step = [], None
    for number, phase in enumerate(recipe.phases):
        counts = [count(step_of(source, number, side, paper.classes)) for side in paper.sides]
        peaks = []
        for side in paper.memory_sides:
            step = step_of(source, number, side, paper.classes, FEW)
            peaks.append(peak_of(step))
        lines = (
            Linear.through(sides, values, prod(crop))
            for sides, values in (
                (paper.sides, [c.flops for c in counts]),
                (paper.sides, [c.bytes for c in counts]),
                (paper.memory_sides, peaks),
            )
        )
        phases.append(Phase(phase.name or "", phase.epochs, *lines))
    assert step is not None
    copies = 1 + {"sgd": 1, "adam": 2}[recipe.optimizer.name]
    return Needs(
        paper,
        step.parameters,
        4 * copies * step.parameters,
        recipe.training.batch_size,
        images_of(recipe.data.name),
        phases,
    )


def images_of(data: str) -> int:
    """Return the number of training images of a data set."""
    return tomllib.loads((resources.files("equipoise.lab.data") / "catalogue.toml").read_text())[data]["train"]


# --- tables -----------------------------------------------------------------------------------------------------------


def cost_table(needs: list[Needs]) -> list[Row]:
    rows: list[Row] = []
    for need in needs:
        for phase in need.phases:
            rows.append(
                {
                    "recipe": need.paper.recipe,
                    "phase": phase.name.partition(":")[0] or "all",
                    "parameters": f"{need.parameters:,}",
                    "batch": need.batch,
                    "Tflop per image": phase.flops.each / 1e12,
                    "GB moved per image": phase.bytes.each / 1e9,
                    "MB per image": phase.memory.each / 1e6,
                    "MB per step": phase.memory.fixed / 1e6,
                    "MB resident": need.resident / 1e6,
                    "error: flops": percent(phase.flops.error),
                    "bytes": percent(phase.bytes.error),
                    "memory": percent(phase.memory.error),
                }
            )
    return rows


def gpu_table(needs: list[Needs]) -> list[Row]:
    rows: list[Row] = []
    for need in needs:
        for gpu in GPUS.values():
            fit = min(need.fitting(gpu), need.batch)
            by_flops, by_bytes = need.hours(gpu)
            row: Row = {"recipe": need.paper.recipe, "batch": need.batch, "GPU": gpu.name, "images that fit": fit}
            if fit:
                gpus = ceil(need.batch / fit)
                row |= {
                    "GPUs": gpus,
                    "machines": ceil(gpus / PER_MACHINE),
                    "GB on each": need.memory(ceil(need.batch / gpus)) / 1e9,
                    "hours by flops": by_flops,
                    "hours by bytes": by_bytes,
                    "GPU hours": max(by_flops, by_bytes),
                    "days": max(by_flops, by_bytes) / gpus / 24,
                }
            rows.append(row)
    return rows


def traffic(parameters: int, processes: int) -> float:
    """Return the bytes that each process sends in a ring all-reduce of float32 gradients."""
    return 4 * parameters * 2 * (processes - 1) / processes


def traffic_table(needs: list[Needs], gpu: GPU, gpus: int = PER_MACHINE) -> list[Row]:
    """Compare the time to average gradients over ``gpus`` GPUs with the time of a training step there."""
    rows: list[Row] = []
    for need in needs:
        last = need.phases[-1]
        flops, moved = last.flops(need.batch) / gpus, last.bytes(need.batch) / gpus
        step = max(flops / (SUSTAINED * gpu.teraflops * 1e12), moved / (SUSTAINED * gpu.bandwidth * 1e9))
        sent = traffic(need.parameters, gpus)
        row: Row = {"recipe": need.paper.recipe, "GPUs": gpus, "MB sent per step": sent / 1e6, "step, ms": 1e3 * step}
        rows.append(row | {f"{link}, ms": sent / rate / 1e6 for link, rate in LINKS.items()})
    return rows


def paper_table(needs: list[Needs]) -> list[Row]:
    """Set what the papers report beside what follows from the measurements."""
    rows: list[Row] = []
    for need in needs:
        paper = need.paper
        if not paper.gpu:
            continue
        gpu, share = GPUS[paper.gpu], need.batch / paper.gpus
        hours = max(need.hours(gpu))
        rows.append(
            {
                "recipe": paper.recipe,
                "hardware in the paper": f"{paper.gpus} x {paper.gpu}",
                "also reported": paper.reported or None,
                "GB on each": need.memory(share) / 1e9,
                "of": gpu.gigabytes,
                "GB in all": need.memory(need.batch) / 1e9,
                "days": hours / paper.gpus / 24,
            }
        )
    return rows


def percent(error: float) -> str:
    return f"{error:+.1%}"


def tables(report: Callable[[str], object] = print) -> dict[str, list[Row]]:
    """Measure all papers and return their tables by title."""
    needs = []
    for paper in PAPERS:
        report(f"measuring {paper.recipe}")
        needs.append(measure(paper))
    share = f"{SUSTAINED:.0%}"
    return {
        "cost of a training step: batch x (per image) + (per step); errors: on the image size that was not fitted": (
            cost_table(needs)
        ),
        f"GPUs for the recipe's batch, and hours at {share} of a GPU's peak flops and bandwidth": gpu_table(needs),
        f"averaging gradients over {PER_MACHINE} A100, beside the step itself": traffic_table(
            needs, GPUS["A100 80 GB"]
        ),
        f"the papers' hardware; GB and days: computed, at {share} of its peak": paper_table(needs),
    }
