"""Certified accuracy of a trained run, tested with adversarial attacks."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from equipoise.lab.data.base import Split, spread
from equipoise.lab.files import whole, write_json
from equipoise.lab.recipes.reading import parse_override
from equipoise.lab.results.figures import BLUE, GREEN, ORANGE, finish, new_figure
from equipoise.lab.results.trained import Trained, open_trained, progress_bar, samples_of
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.models.mondeq.certificate import Certificate, Certifier
from equipoise.models.mondeq.model import MonDEQ
from equipoise.options import is_number, option, options
from equipoise.tasks.robustness import foolbox_pgd, pgd
from equipoise.tolerance import Tolerance

POINTS = 101  # number of points of the certified curve
RADII = (1 / 3, 2 / 3, 1, 1.5, 2.5, 4)  # default radii of attacks, in units of the largest certified one


@options
class Certify:
    """Options of certification and of the attacks that test it.

    Args:
        samples: number of attacked samples, evenly spaced over the split; 0 for no attacks.
        radii: radii of the attacks, in the 2-norm of images in [0, 1]; empty for six around the certified radii.
        steps: number of steps of an attack.
        relative: relative tolerance of the certified solves.
    """

    samples: int = option(default=200, at_least=0, whole=True)
    radii: Sequence[float] = ()
    steps: int = option(default=20, at_least=1, whole=True)
    relative: float = option(default=1e-6, above=0.0, below=1.0)

    def __post_init__(self) -> None:
        if not (isinstance(self.radii, Sequence) and all(is_number(radius, above=0) for radius in self.radii)):
            raise ValueError(
                f"Certify.radii is {self.radii!r}; it must be a list of numbers above 0, such as [0.1, 0.5]."
            )


@dataclass(frozen=True)
class AttackResult:
    """Result of one attack at one radius."""

    attack: str
    radius: float
    accuracy: float
    inside: int  # attacked images within their certified radius
    violations: int  # those among them whose class changed


@dataclass(frozen=True)
class Certified:
    """Certified radii of a split, and results of attacks."""

    certificate: Certificate
    right: Tensor  # (samples,): whether a sample is classified correctly
    radii: Tensor  # (samples,): certified radii, also of samples classified incorrectly
    attacked: list[AttackResult]
    trial: Certify

    @property
    def accuracy(self) -> float:
        return self.right.double().mean().item()

    def accuracy_at(self, radius: float) -> float:
        """Return the share of samples classified correctly whatever change of at most ``radius`` is made."""
        return (self.right & (self.radii > radius)).double().mean().item()

    @property
    def largest(self) -> float:
        """The radius that 1% of the correctly classified samples exceed, rounded; curves are drawn up to it."""
        radii = self.radii[self.right]
        quantile = float(radii.quantile(0.99)) if len(radii) else 0.0
        return float(f"{quantile:.2g}") if 0 < quantile < math.inf else 0.1

    @property
    def median_radius(self) -> float:
        """The median certified radius of correctly classified samples."""
        return self.radii[self.right].median().item() if self.right.any() else 0.0

    @property
    def inside(self) -> int:
        """The number of attacks within a certified radius, which must fail."""
        return sum(entry.inside for entry in self.attacked)

    @property
    def violations(self) -> int:
        """The number of attacks within a certified radius that succeeded."""
        return sum(entry.violations for entry in self.attacked)

    def attacks(self) -> dict[str, list[AttackResult]]:
        """Return the results grouped by the name of the attack."""
        names = dict.fromkeys(entry.attack for entry in self.attacked)
        return {name: [entry for entry in self.attacked if entry.attack == name] for name in names}

    def record(self) -> dict[str, Any]:
        """Return the contents of certified.json."""
        curve = [self.largest * i / (POINTS - 1) for i in range(POINTS)]
        return {
            "samples": len(self.radii),
            "accuracy": self.accuracy,
            "norm": "l2",
            "certified": {"radius": curve, "accuracy": [self.accuracy_at(radius) for radius in curve]},
            "median radius": self.median_radius,
            "attacks": [
                {**vars(entry), "certified accuracy": self.accuracy_at(entry.radius)} for entry in self.attacked
            ],
            "attacked samples": min(self.trial.samples, len(self.radii)),
            "attack steps": self.trial.steps,
            "inside": self.inside,
            "violations": self.violations,
            "tolerance": self.trial.relative,
            "certificate": self.certificate.record(),
        }


def certify_run(
    run: Run,
    machine: Machine,
    folders: Sequence[Path] = (),
    *,
    split: str = "test",
    weights: str = "best",
    changes: Sequence[str] = (),
    limit: int | None = None,
) -> Certified:
    """Certify a trained run on a split, attack it, and write certified.json and certified.png to its folder.

    Args:
        changes: fields of :class:`Certify` as ``"key=value"``. The other arguments are those of
            :func:`~equipoise.lab.results.trained.evaluate_run`.
    """
    try:
        trial = Certify(**dict(parse_override(text) for text in changes))
    except TypeError as error:  # a mistake on the command line, which reports a ValueError
        raise ValueError(str(error)) from None
    if machine.world > 1:
        raise ValueError("--certify runs in a single process: start it without torchrun.")
    trained = open_trained(run, machine, weights)
    if not isinstance(trained.model, MonDEQ):
        own = " Its own certificate() covers convergence only." if hasattr(trained.model, "certificate") else ""
        raise ValueError(
            f"the model {trained.recipe.model.name!r} of {run} has no certified radii: --certify requires a "
            f"model 'mondeq'.{own}"
        )
    result = certified(trained, samples_of(run, trained, folders, split, limit), trial)
    write_json(run.folder / "certified.json", {"split": split, "weights": trained.file.stem, **result.record()})
    with whole(run.folder / "certified.png") as part:
        certified_figure(result).savefig(part, format="png", dpi=150)
    return result


def certified(trained: Trained, split: Split, trial: Certify) -> Certified:
    """Certify every sample of a split, and attack some of them."""
    certifier = Certifier(trained.model, Tolerance(relative=trial.relative, max_steps=1000))
    right, radii = [], []
    with progress_bar("certifying", len(split)) as bar:
        size = trained.recipe.training.evaluation_batch_size
        for images, labels in prepared(split, trained.task, trained.setting, size):
            verdict = certifier(images)
            right.append((verdict.classes == labels).cpu())
            radii.append(verdict.radii.cpu())
            bar.update(len(images))
    result = Certified(certifier.certificate, torch.cat(right), torch.cat(radii), [], trial)
    if trial.samples:
        chosen = trial.radii or [float(f"{result.largest * factor:.3g}") for factor in RADII]
        result.attacked.extend(attack(trained, certifier, spread(split, trial.samples), trial, chosen))
    return result


def attack(
    trained: Trained, certifier: Certifier, split: Split, trial: Certify, radii: Sequence[float]
) -> list[AttackResult]:
    """Attack samples with the run's own solver settings; the certifier's tight solves judge the results.

    Attacks are on the predicted class, so that certificates of incorrect predictions are tested as well.
    """
    model = trained.model.requires_grad_(False)
    attacks: dict[str, Callable[..., Tensor]] = {"PGD": pgd}
    if importlib.util.find_spec("foolbox"):
        attacks["PGD of foolbox"] = foolbox_pgd
    kinds = [(name, float(radius)) for name in attacks for radius in radii]
    counts = torch.zeros(len(kinds), 3, dtype=torch.int64)  # survived, inside a certified radius, changed there
    seed_everything(trained.recipe.seed, "certify")
    with progress_bar("attacking", len(kinds) * len(split)) as bar, quiet_failures():
        for images, labels in prepared(split, trained.task, trained.setting, len(split)):
            before = certifier(images)
            for count, (name, radius) in zip(counts, kinds, strict=True):
                moved = attacks[name](model, images, before.classes, radius=radius, norm="l2", steps=trial.steps)
                same = certifier(moved).classes == before.classes
                distance = torch.linalg.vector_norm((moved.double() - images.double()).flatten(1), dim=1)
                inside = distance < before.radii
                count += torch.stack([same & (before.classes == labels), inside, inside & ~same]).sum(1).cpu()
                bar.update(len(images))
    return [
        AttackResult(*kind, survived / len(split), inside, violations)
        for kind, (survived, inside, violations) in zip(kinds, counts.tolist(), strict=True)
    ]


def certified_figure(result: Certified) -> Figure:
    """Plot certified accuracy against the radius, and accuracy under attacks above it."""
    figure, axis = new_figure("perturbation size (2-norm)", "accuracy")
    figure.set_size_inches(6, 4)
    right = max([result.largest, *(entry.radius for entry in result.attacked)])
    curve = [right * i / (POINTS - 1) for i in range(POINTS)]
    heights = [result.accuracy_at(radius) for radius in curve]
    axis.fill_between(curve, heights, color=BLUE, alpha=0.2, linewidth=0)
    axis.plot(curve, heights, color=BLUE, label=f"certified ({len(result.radii)} samples)")
    count = min(result.trial.samples, len(result.radii))
    styles: tuple[dict[str, Any], ...] = (  # the two curves may coincide
        {"color": ORANGE, "linestyle": "-", "marker": "o", "markersize": 4},
        {"color": GREEN, "linestyle": "--", "marker": "s", "fillstyle": "none"},
    )
    for (name, entries), style in zip(result.attacks().items(), styles, strict=False):
        points = sorted((entry.radius, entry.accuracy) for entry in entries)
        axis.plot(*zip(*points, strict=True), label=f"under {name} ({count} samples)", **style)
    axis.axhline(result.accuracy, color="0.3", linestyle=":", linewidth=1, label="unperturbed")
    axis.set(xlim=(0, 1.02 * right), ylim=(0, 1.02))
    return finish(figure, axis)
