"""Restore an image file with a trained generator: a strip of what was given, some steps, and the result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.lab.data.files.images import read_image_file
from equipoise.lab.files import whole
from equipoise.lab.printable import printable
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.results.png_files import new_png
from equipoise.lab.results.sample import LARGEST_SEED, open_generator
from equipoise.lab.results.trained import progress_bar
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.options import option, options, require_number
from equipoise.tasks.degradations import KINDS, Degradation
from equipoise.tasks.image_quality import ssim
from equipoise.tasks.physics import LinearPhysics, Mask
from equipoise.tasks.restoration import Panel, Restoration, network_panels, strip_figure, strip_panels
from equipoise.tasks.restore_images import STEPS

PROBLEMS = tuple(problem for problem in KINDS if problem != "reconstruct")
MOST_STEPS = 1_000_000
MOST_NOISE = 1000  # standard deviation; squares of much larger numbers overflow
SMALLEST = 11  # side of the window of the structural similarity


@options
class Request:
    """An image to restore, and how it is degraded.

    Args:
        image: image file.
        problem: "inpaint", "denoise", "deblur" or "upscale", see :class:`~equipoise.tasks.degradations.Degradation`;
            None if there is a mask.
        amount: amount of the degradation.
        mask: image file with the size of ``image``, black where pixels are hidden.
        degraded: whether the image is degraded already; otherwise it is the truth, and is degraded first.
        steps: number of joint steps.
        seed: seed of the place of the hidden square, or of the noise.
    """

    image: Path
    problem: str | None = option(default=None, among=PROBLEMS, optional=True)
    amount: float | None = None
    mask: Path | None = None
    degraded: bool = option(default=False, kind=bool)
    steps: int = STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("--steps", self.steps, at_least=1, at_most=MOST_STEPS, whole=True)
        require_number("--seed", self.seed, at_least=0, at_most=LARGEST_SEED, whole=True)
        if (self.problem is None) == (self.mask is None):
            raise ValueError("Request needs exactly one of problem and mask.")
        if self.problem == "denoise" and self.amount is not None and self.amount > MOST_NOISE:
            raise ValueError(f"--denoise is {self.amount:g}; it must be at most {MOST_NOISE}: pixels are in [-1, 1].")
        if self.degraded and self.problem == "inpaint":
            raise ValueError(
                "--inpaint hides a random square of a whole image. To restore an image that is degraded already, mark "
                "its hidden pixels in black with --mask."
            )

    @property
    def degradation(self) -> Degradation:
        return Degradation(self.problem or "reconstruct", self.amount)


@dataclass(frozen=True)
class RestoredImage:
    """A restored image: the strip that was written, and how close it is to the truth.

    Args:
        strip: file of the strip.
        quality: PSNR in dB and SSIM by name of the picture: "given", "restored", and "filled" if
            pixels were hidden; empty if the truth is unknown.
        misfit: mean squared error of the measurements of the restored image.
        notes: how the image was changed to fit.
    """

    strip: Path
    quality: dict[str, tuple[float, float]]
    misfit: float
    notes: list[str]


def restore_image(
    run: Run, request: Request, machine: Machine, out: Path | None = None, weights: str = "best"
) -> RestoredImage:
    """Restore an image file, and write a strip: given, some steps, restored, and truth where it is known.

    Args:
        run: trained run of a generator, or of an autoencoder, whose decoder is used, unless it was trained to map
            measurements to images.
        request: image, and how it is degraded.
        out: file of the strip (.png); None for IMAGE-restored.png in the current folder. An existing file is never
            overwritten.

    Example:
        >>> with this_machine() as machine:
        ...     restore_image(open_run("runs/jiio-celeba-001"), Request(Path("face.png"), "inpaint", 10), machine)
    """
    degradation = request.degradation
    strip = new_png(Path(f"{request.image.stem}-restored.png") if out is None else out)
    trained, generator = open_generator(run, machine, weights, sections=(*MODEL_SECTIONS, "task"), files=True)
    image, notes = read_image(request, generator.shape)
    image = (2 * (image.to(machine.device, trained.setting.dtype) / 255) - 1)[None]
    y, physics, truth = measured(request, degradation, image, generator.shape)
    with (
        quiet_failures(),
        trained.setting.autocast(),
        torch.no_grad(),
        progress_bar("restoring", request.steps, "step") as bar,
    ):
        network = trained.task.network_in(trained.model) if isinstance(trained.task, Restoration) else None
        panels: list[Panel]
        if network is not None:
            panels, images = network_panels(network, y, physics, truth)
            notes.append("the run was trained to map measurements to images: there are no joint steps.")
        else:
            panels, restored = strip_panels(generator, y, physics, truth, request.steps, lambda progress: bar.update())
            images = restored.images
    with whole(strip) as part:
        strip_figure(panels).savefig(part, format="png", dpi=150)
    quality = {}
    if truth is not None:
        for name, shown, ratio in (panel for panel in panels if panel[0] in ("given", "restored", "filled")):
            assert ratio is not None
            big = min(generator.shape[1:]) >= SMALLEST
            quality[name] = (float(ratio), float(ssim(shown, truth)) if big else float("nan"))
    misfit = float((physics.A(images) - y).square().mean())
    return RestoredImage(strip, quality, misfit, notes)


def measured(
    request: Request, degradation: Degradation, image: Tensor, shape: Sequence[int]
) -> tuple[Tensor, LinearPhysics, Tensor | None]:
    """Return the measurements, their operator, and the truth if it is known."""
    seeds = torch.tensor([request.seed])
    if request.mask is not None:
        physics = Mask(read_mask(request.mask, request.image, shape))
        return physics.A(image), physics, None if request.degraded else image
    if request.degraded:
        return image, degradation.physics(shape, seeds), None
    y, physics = degradation.measure(image, seeds)
    return y, physics, image


def read_image(request: Request, shape: Sequence[int]) -> tuple[Tensor, list[str]]:
    """Return the image in the size that is needed, uint8, and notes on what was changed."""
    height, width = shape[1:]
    if request.degraded and request.problem == "upscale":
        request.degradation.physics(shape, torch.zeros(1))  # raises if the factor does not divide the size
        factor = int(request.degradation.amount or 1)
        height, width = height // factor, width // factor
    sizes: list[tuple[int, int]] = []
    image, note = read_image_file(
        *(request.image, shape[0], (height, width)),
        check=lambda *size: sizes.append((size[0], size[1])),
        note_above=math.inf,  # its size is noted here
    )
    before, notes = sizes[0], [note] if note else []
    if before == (height, width):
        return image, notes
    (top, left, rows, columns), name = middle(before, (height, width)), printable(request.image)
    part = f"its middle {columns} x {rows} was cropped and " if (top, left) != (0, 0) else "it was "
    verdict = f"{part}resized to {width} x {height}, the size of the generator's images"
    if request.degraded and request.problem == "upscale":
        verdict += f" divided by {height and shape[1] // height}"
    return image, [*notes, f"{name} is {before[1]} x {before[0]}: {verdict}."]


def read_mask(file: Path, image: Path, shape: Sequence[int]) -> Tensor:
    """Return a mask (height, width) that is 1 where a pixel of the generator's size is known entirely."""
    sizes: list[tuple[int, int]] = []
    read_image_file(image, 1, (1, 1), check=lambda *size: sizes.append((size[0], size[1])))
    mask, _ = read_image_file(file, 1)
    if (given := tuple(mask.shape[1:])) != sizes[0]:
        mask_size, image_size = (f"{columns} x {rows}" for rows, columns in (given, sizes[0]))
        raise ValueError(
            f"{printable(file)} is {mask_size}, {printable(image)} is {image_size}; a mask must have the size of the "
            "image."
        )
    top, left, rows, columns = middle(sizes[0], shape[1:])
    known = (mask[0, top : top + rows, left : left + columns] >= 128).double()
    known = (functional.adaptive_avg_pool2d(known[None], (shape[1], shape[2]))[0] > 0.999).float()
    for verdict, wrong in (("every pixel", not known.any()), ("no pixel", known.all())):
        if wrong:
            raise ValueError(
                f"{printable(file)} hides {verdict} of the image; pixels that are black in a mask are hidden, white "
                "ones are known."
            )
    return known


def middle(before: Sequence[int], after: Sequence[int]) -> tuple[int, int, int, int]:
    """Return top, left, height and width of the largest middle part with the proportions of ``after``."""
    scale = min(before[0] / after[0], before[1] / after[1])
    rows, columns = (round(scale * length) for length in after)
    return (before[0] - rows) // 2, (before[1] - columns) // 2, rows, columns
