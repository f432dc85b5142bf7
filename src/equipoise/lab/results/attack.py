"""Attack an image file with a trained run: draw the image, the perturbation and the result, with both predictions."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.data.files.images import MODES, read_image_file
from equipoise.lab.files import whole
from equipoise.lab.recipes.build import MODEL_SECTIONS
from equipoise.lab.results.png_files import new_png
from equipoise.lab.results.trained import Trained, open_trained
from equipoise.lab.runs.folder import Run, RunError
from equipoise.lab.runs.machine import Machine
from equipoise.lab.training.evaluate import quiet_failures
from equipoise.models.parts.context_managers import exact_gradients
from equipoise.options import require_number
from equipoise.tasks.classification import LabelTask
from equipoise.tasks.drawing import attack_panel
from equipoise.tasks.robustness import ATTACKS, JOINT_STEPS, Budget, change_norms

STEPS = {"jiio": JOINT_STEPS}  # by default; 20 for other attacks

Answer = dict[str, float]  # probability by class, largest first


@dataclass(frozen=True)
class Attacked:
    """The result of an attack on an image, and the file of its picture."""

    picture: Path
    label: str  # the class that the attack leads away from
    clean: Answer
    attacked: Answer
    distance: float
    note: str = ""  # how the image was changed before the attack

    @property
    def succeeded(self) -> bool:
        return next(iter(self.attacked)) != self.label

    @property
    def wrong_before(self) -> bool:
        """Whether the image was misclassified before the attack."""
        return next(iter(self.clean)) != self.label


def attack_image(
    run: Run,
    image: Path,
    machine: Machine,
    out: Path | None = None,
    weights: str = "best",
    *,
    label: str | None = None,
    norm: str = "l2",
    radius: float = 1.0,
    attack: str = "jiio",
    steps: int | None = None,
) -> Attacked:
    """Attack an image file, and draw the image, the perturbation and the attacked image.

    Args:
        run: trained run of a classifier.
        image: image file; one of another size than the training images is cropped in the middle and resized, as the
            note of the result says.
        out: file to write (.png); None for IMAGE-attacked.png in the current folder. It must not exist yet.
        label: name or number of the true class; None for the class that the model predicts.
        norm, radius: largest change, see :class:`~equipoise.tasks.robustness.Budget`.
        attack: name in ``ATTACKS``.
        steps: number of steps; None for 50 of the attack "jiio", or 20 of others.

    Example:
        >>> with this_machine() as machine:
        ...     found = attack_image(open_run("runs/jiio-mnist-clean-001"), Path("seven.png"), machine, radius=0.5)
        >>> found.clean, found.attacked
    """
    picture = new_png(Path(f"{image.stem}-attacked.png") if out is None else out)
    require_number("--radius", radius, above=0)
    if steps is not None:
        require_number("--steps", steps, at_least=1, whole=True)
    budget = Budget(radius=radius, norm=norm, steps=STEPS.get(attack, 20) if steps is None else steps)
    method = ATTACKS[attack]
    trained = open_trained(run, machine, weights, sections=(*MODEL_SECTIONS, "task"))
    task, shape = trained.task, trained.facts["shape"]
    if not isinstance(task, LabelTask):
        raise RunError(
            f"{run} was trained for the task {trained.recipe.task.name!r}; `equipoise attack` requires a "
            "classifier of images, such as a run of the task 'classification' or 'robustness'."
        )
    if len(shape) != 3 or shape[0] not in MODES:
        raise RunError(f"the run's inputs have shape {shape}; image files require 1 or 3 channels.")
    pixels, note = read_image_file(image, shape[0], (shape[1], shape[2]), note_above=1)
    (clean,) = trained.setting.prepare(task, (pixels[None].to(machine.device),))
    with quiet_failures(), trained.setting.autocast(), torch.no_grad(), exact_gradients(trained.model):
        before = probabilities(trained, clean)
        number = int(before.argmax()) if label is None else number_of(label, task.class_names)
        options = {"radius": budget.radius, "norm": budget.norm, "steps": budget.steps}
        try:
            attacked = method(trained.model, clean, torch.tensor([number], device=machine.device), **options)
        except TypeError as error:  # a model that cannot be taken apart
            raise RunError(f"{error} Choose it with --attack.") from None
        after = probabilities(trained, attacked)
    first, second = (ranked(values, task.class_names) for values in (before, after))
    row = (clean[0].float().cpu(), attacked[0].float().cpu(), caption(first), caption(second))
    with whole(picture) as part:
        attack_panel([row]).savefig(part, format="png", dpi=150)
    distance = float(change_norms(attacked - clean, norm))
    return Attacked(picture, task.class_names[number], first, second, distance, note)


def number_of(label: str, names: tuple[str, ...]) -> int:
    """Return the number of a class given by its name or its number."""
    if label in names:
        return names.index(label)
    if label.isdecimal() and int(label) < len(names):
        return int(label)
    raise ValueError(
        f"--label is {label!r}; it must be a number from 0 to {len(names) - 1}, or one of {', '.join(names[:20])}."
    )


def probabilities(trained: Trained, image: Tensor) -> Tensor:
    return trained.model(image)[0].float().softmax(0).cpu()


def ranked(values: Tensor, names: tuple[str, ...]) -> Answer:
    """Return the three most probable classes."""
    best = values.topk(min(3, len(names)))
    return {names[i]: p for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)}


def caption(answer: Answer) -> str:
    name, probability = next(iter(answer.items()))
    return f"{name} ({probability:.0%})"
