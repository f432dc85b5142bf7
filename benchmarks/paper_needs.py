"""What the papers' large models need on GPUs: flops and traffic of an image, memory, hours, machines, gradient traffic.

The model, solver, steps and batch size are those of a recipe. Its training step runs here as it is, but on a few small
images. Flops and bytes are sums of a part of the weights and a part proportional to batch size and pixels, which a few
image sizes determine; another one checks it. Memory does not depend on the number of solver steps, and is that of the
weights and that of feature maps, whose channels, pixels and batch size multiply: so it is measured with few steps, on
narrower models and larger batches, where the weights do not hide the images. The rest is arithmetic with the numbers
under "assumptions".
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from math import ceil, floor, prod
from typing import Any, NamedTuple

import torch

import equipoise as eq
from counting import count
from equipoise.lab.recipes import build
from equipoise.lab.recipes.reading import open_recipe
from equipoise.tasks.generation import Generation
from fitting import Variables, fit
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


class Size(NamedTuple):
    """Side and number of the images of a batch; C channels of the finest scale, None for the recipe's."""

    side: int
    batch: int
    channels: int | None = None


@dataclass(frozen=True)
class Paper:
    """A recipe, the sizes at which it is measured (the last one to check), and what its paper reports."""

    recipe: str
    classes: int
    terms: tuple[str, ...]  # of flops and bytes
    counted: tuple[Size, ...]
    remembered: tuple[Size, ...]
    gpu: str = ""  # as reported
    gpus: int = 0
    steps: int | None = None  # training steps; None: the recipe's epochs
    reported: str = ""


def memory_sizes(small: int, large: int, batch: int, check: Size) -> tuple[Size, ...]:
    """Return sizes that differ in width, pixels and batch."""
    sizes = (Size(small, batch, 8), Size(small, batch, 16), Size(small, batch, 32), Size(large, batch, 16))
    return (*sizes, Size(small, 2 * batch, 16), check)


PHOTOS = ("1", "B P"), (Size(32, 2), Size(64, 2), Size(64, 3)), memory_sizes(160, 224, 8, Size(224, 8, 40))
# The weights of a generator grow with the pixels, so two batch sizes tell their traffic from that of the images.
FACES = (
    ("1", "P", "B P"),
    (Size(8, 1), Size(8, 2), Size(16, 1), Size(16, 2)),
    memory_sizes(32, 64, 4, Size(64, 6, 32)),
)
PAPERS = (
    Paper("mdeq/imagenet-small", 1000, *PHOTOS),
    Paper("mdeq/imagenet-xl", 1000, *PHOTOS, "Quadro RTX 8000", 8),
    Paper("jiio/celeba", 0, *FACES, "RTX 2080 Ti", 4, reported="17.45 GB for a batch of 48"),
    Paper("mdeq/cityscapes-xl", 19, *PHOTOS, "Quadro RTX 8000", 8),
    Paper("jiio/celeba-100", 0, *FACES, "RTX 2080 Ti", 4, steps=25_000, reported="4.5 to 5 days"),
)
MEMORY = ("W", "B P", "B P C")
FEW = 3  # solver steps while memory is measured


# --- measuring --------------------------------------------------------------------------------------------------------


def step_of(paper: Paper, phase: int, size: Size, steps: int | None = None) -> Step:
    """Return the training step of a phase of a recipe, on random images, with all solver steps, or ``steps``, taken."""
    torch.manual_seed(0)
    channels = [] if size.channels is None else [f"model.channels={[size.channels << i for i in range(4)]}"]
    source = open_recipe(paper.recipe, overrides=channels)
    recipe, where = source.phase(phase), source.where_in(phase)
    shape, classes = (3, size.side, size.side), paper.classes
    names = tuple(map(str, range(classes)))
    facts = {"shape": shape, "classes": classes, "class_names": names, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    order = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
    model = build.build_model(recipe, facts, where).to(memory_format=order)  # type: ignore[call-overload]
    for layer in (module for module in model.modules() if isinstance(module, eq.Equilibrium)):
        layer.tolerance, layer.on_failure = limited(steps or layer.tolerance.max_steps), "ignore"
        if isinstance(rule := layer.gradient, eq.ImplicitGradient) and rule.tolerance is not None:
            layer.gradient = replace(rule, tolerance=limited(steps or rule.tolerance.max_steps))
    task = build.build_task(recipe, facts, where)
    if isinstance(task, Generation) and steps:
        task.steps, task.penalty_from = steps, 1
    images = torch.rand(size.batch, *shape).contiguous(memory_format=order)
    pixels = shape[1:] if recipe.task.name == "segmentation" else ()
    labels = torch.zeros(size.batch, *pixels, dtype=torch.long)
    return Step(model.train(), lambda net: task.loss(net, (images, labels))[0])


@dataclass(frozen=True)
class Linear:
    """A quantity of a step, ``fixed`` + batch * ``each``, and its error on the size that was not fitted."""

    fixed: float
    each: float
    error: float

    @classmethod
    def through(
        cls, terms: Sequence[str], points: Sequence[Variables], values: Sequence[float], model: Variables
    ) -> Linear:
        """Fit all but the last value; the result holds for the variables of ``model``."""
        found = fit(terms, points[:-1], values[:-1])
        fixed = found({**model, "B": 0})
        return cls(fixed, found({**model, "B": 1}) - fixed, found(points[-1]) / values[-1] - 1)

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
    """Measure the steps of every phase of a recipe."""
    recipe = open_recipe(paper.recipe).recipe
    crop = recipe.task.options.get("crop") or [recipe.data.options["size"]] * 2
    real = step_of(paper, 0, Size(crop[0], 1)).model  # only built
    W, C = sum(p.numel() for p in real.parameters()), channels_of(real)
    model = {"P": prod(crop), "C": C, "W": W}
    phases = []
    for number, phase in enumerate(recipe.phases):
        counts = [count(step_of(paper, number, size)) for size in paper.counted]
        points = [{"B": size.batch, "P": size.side**2} for size in paper.counted]
        work = [
            Linear.through(paper.terms, points, values, model)
            for values in ([c.flops for c in counts], [c.bytes for c in counts])
        ]
        peaks, points = [], []
        for size in paper.remembered:
            step = step_of(paper, number, size, FEW)
            points.append({"B": size.batch, "P": size.side**2, "C": channels_of(step.model), "W": step.parameters})
            peaks.append(peak_of(step))
        phases.append(Phase(phase.name or "", phase.epochs, *work, Linear.through(MEMORY, points, peaks, model)))
    copies = 1 + {"sgd": 1, "adam": 2}[recipe.optimizer.name]
    images = images_of(recipe.data.name)
    return Needs(paper, W, 4 * copies * W, recipe.training.batch_size, images, phases)


def channels_of(model: Any) -> int:
    return model.size.channels[0]


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


def tables(needs: list[Needs]) -> dict[str, list[Row]]:
    """Return the tables by title."""
    share, assumed = f"{SUSTAINED:.0%}", GPUS["A100 80 GB"]
    data_sheets: list[Row] = [
        {"GPU": gpu.name, "GB": gpu.gigabytes, "Tflop/s, float32": gpu.teraflops, "GB/s": gpu.bandwidth}
        for gpu in GPUS.values()
    ]
    return {
        "cost of a step: batch x (per image) + (per step); errors: at the size that was not fitted": cost_table(needs),
        "assumed: peaks of data sheets": data_sheets,
        f"GPUs for the recipe's batch ({USABLE:.0%} of their memory), and hours at {share} of their peaks": (
            gpu_table(needs)
        ),
        f"averaging gradients over {PER_MACHINE} x {assumed.name}, beside the step": traffic_table(needs, assumed),
        f"the papers' hardware; GB and days are computed, at {share} of its peaks": paper_table(needs),
    }
