"""Certified accuracy of a trained run, and attacks that try to disprove it."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.lab.data.base import Split, spread
from equipoise.lab.files import whole, write_json
from equipoise.lab.recipes.reading import parse_override
from equipoise.lab.results.figures import BLUE, GREEN, ORANGE, blank, finished
from equipoise.lab.results.trained import Trained, open_trained, samples_of
from equipoise.lab.runs.folder import Run
from equipoise.lab.runs.machine import Machine, seed_everything
from equipoise.lab.training.evaluate import prepared, quiet_failures
from equipoise.models.mondeq.certificate import Certificate, Certifier
from equipoise.models.mondeq.model import MonDEQ
from equipoise.options import is_number, options, require
from equipoise.tasks.robustness import foolbox_pgd, pgd
from equipoise.tolerance import Tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = 101  # of the certified curve that is written and drawn


@options
class Certify:
    """How certificates are made and put to the test.

    Args:
        samples: so many are attacked, from all over the split; 0 for none.
        radii: of the attacks, in the 2-norm of images in [0, 1]; none are six, half of them where radii are certified.
        steps: of an attack.
        relative: tolerance of the solves that are certified.
    """

    samples: int = 200
    radii: Sequence[float] = ()
    steps: int = 20
    relative: float = 1e-6

    def __post_init__(self) -> None:
        require(self, "samples", at_least=0, whole=True)
        require(self, "steps", at_least=1, whole=True)
        require(self, "relative", above=0.0, below=1.0)
        if not (isinstance(self.radii, Sequence) and all(is_number(radius, above=0) for radius in self.radii)):
            raise ValueError(
                f"Certify.radii is {self.radii!r}; it must be a list of numbers above 0, such as [0.1, 0.5]."
            )


@dataclass(frozen=True)
class Attacked:
    """What one attack did at one radius: the accuracy it left, and how many certificates it was inside of and broke."""

    attack: str
    radius: float
    accuracy: float
    inside: int
    violations: int


@dataclass(frozen=True)
class Certified:
    """What is certified of a split, and what attacks did."""

    certificate: Certificate
    right: Tensor  # (samples,): which are classified correctly
    radii: Tensor  # (samples,): certified, of right answers and wrong ones
    attacked: list[Attacked]
    trial: Certify

    @property
    def accuracy(self) -> float:
        return self.right.double().mean().item()

    def accuracy_at(self, radius: float) -> float:
        """The share of samples that are right, and provably stay so when changed by no more than this."""
        return (self.right & (self.radii > radius)).double().mean().item()

    @property
    def largest(self) -> float:
        """The radius up to which there is something to see: 99% of the right answers are certified for less."""
        radii = self.radii[self.right]
        found = float(radii.quantile(0.99)) if len(radii) else 0.0
        return float(f"{found:.2g}") if 0 < found < math.inf else 0.1

    @property
    def median_radius(self) -> float:
        """Of the right answers."""
        return self.radii[self.right].median().item() if self.right.any() else 0.0

    @property
    def inside(self) -> int:
        """How many attacks stayed inside a certified radius, and so had to fail."""
        return sum(entry.inside for entry in self.attacked)

    @property
    def violations(self) -> int:
        """How many of those did not fail."""
        return sum(entry.violations for entry in self.attacked)

    def attacks(self) -> dict[str, list[Attacked]]:
        """By the name of the attack."""
        names = dict.fromkeys(entry.attack for entry in self.attacked)
        return {name: [entry for entry in self.attacked if entry.attack == name] for name in names}

    def record(self) -> dict[str, Any]:
        """For JSON."""
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
    """Certify a trained run on a split of its data, attack it, and write certified.json and certified.png beside it.

    Args:
        changes: fields of :class:`Certify` as ``"key=value"``.
    """
    try:
        trial = Certify(**dict(parse_override(text) for text in changes))
    except TypeError as error:  # of the person, not of the program
        raise ValueError(str(error)) from None
    if machine.world > 1:
        raise ValueError("--certify runs in one process: leave torchrun out.")
    trained = open_trained(run, machine, weights)
    if not isinstance(trained.model, MonDEQ):
        own = " Its own certificate() is of its convergence." if hasattr(trained.model, "certificate") else ""
        raise ValueError(
            f"the model {trained.recipe.model.name!r} of {run.folder} has no certified radii: --certify is for "
            f"'mondeq', of which they are proven.{own}"
        )
    found = certified(trained, samples_of(run, trained, folders, split, limit), trial)
    write_json(run.folder / "certified.json", {"split": split, "weights": trained.file.stem, **found.record()})
    with whole(run.folder / "certified.png") as part:
        certified_figure(found).savefig(part, format="png", dpi=150)
    return found


def certified(trained: Trained, split: Split, trial: Certify) -> Certified:
    """Certify every sample of a split, and attack some of them."""
    certifier = Certifier(trained.model, Tolerance(relative=trial.relative, max_steps=1000))
    size = trained.recipe.training.evaluation_batch_size
    right, radii = [], []
    with progress("certifying", len(split)) as bar:
        for images, labels in prepared(split, trained.task, trained.setting, size)():
            verdict = certifier(images)
            right.append((verdict.classes == labels).cpu())
            radii.append(verdict.radii.cpu())
            bar.update(len(images))
    found = Certified(certifier.certificate, torch.cat(right), torch.cat(radii), [], trial)
    if trial.samples:
        found.attacked.extend(attack(trained, certifier, spread(split, trial.samples), found))
    return found


def attack(trained: Trained, certifier: Certifier, split: Split, found: Certified) -> list[Attacked]:
    """Attack samples as the run solves them; what comes of it is judged by equilibria solved tightly.

    The attacks are on the class that the model names: where that is wrong nothing is lost, and the certificate of a
    wrong answer is put to the test as well.
    """
    model, trial = trained.model.requires_grad_(False), found.trial
    attacks: dict[str, Callable[..., Tensor]] = {"PGD": pgd}
    if importlib.util.find_spec("foolbox"):
        attacks["PGD of foolbox"] = foolbox_pgd
    kinds = [(name, float(r)) for name in attacks for r in trial.radii or default_radii(found.largest)]
    counts = torch.zeros(len(kinds), 3, dtype=torch.int64)  # survived, inside a certified radius, changed there
    seed_everything(trained.recipe.seed, "certify")
    with progress("attacking", len(kinds) * len(split)) as bar, quiet_failures():
        for images, labels in prepared(split, trained.task, trained.setting, len(split))():
            before = certifier(images)
            for count, (name, radius) in zip(counts, kinds, strict=True):
                moved = attacks[name](model, images, before.classes, radius=radius, norm="l2", steps=trial.steps)
                after = certifier(moved)
                distance = torch.linalg.vector_norm((moved.double() - images.double()).flatten(1), dim=1)
                same = after.classes == before.classes
                inside = distance < before.radii
                met = torch.stack([same & (before.classes == labels), inside, inside & ~same])
                count += met.sum(1).cpu()
                bar.update(len(images))
    found_at = zip(kinds, counts.tolist(), strict=True)
    return [Attacked(*kind, survived / len(split), inside, broken) for kind, (survived, inside, broken) in found_at]


def default_radii(largest: float) -> list[float]:
    """Three where radii are certified, three beyond."""
    return [float(f"{largest * factor:.3g}") for factor in (1 / 3, 2 / 3, 1, 1.5, 2.5, 4)]


def progress(what: str, samples: int) -> Any:
    """A bar, on a terminal."""
    from tqdm import tqdm

    return tqdm(total=samples, desc=what, unit="sample", disable=not sys.stderr.isatty(), leave=False)


def certified_figure(found: Certified) -> Figure:
    """Certified accuracy against the radius and, above it, what attacks leave."""
    figure, axis = blank("change of the image (2-norm)", "accuracy")
    figure.set_size_inches(6, 4)
    attacks = found.attacks()
    right = max([found.largest, *(entry.radius for entry in found.attacked)])
    curve = [right * i / (POINTS - 1) for i in range(POINTS)]
    heights = [found.accuracy_at(radius) for radius in curve]
    axis.fill_between(curve, heights, color=BLUE, alpha=0.2, linewidth=0)
    axis.plot(curve, heights, color=BLUE, label=f"certified ({len(found.radii)} samples)")
    count = min(found.trial.samples, len(found.radii))
    looks: tuple[dict[str, Any], ...] = (
        {"color": ORANGE, "linestyle": "-", "marker": "o", "markersize": 4},
        {"color": GREEN, "linestyle": "--", "marker": "s", "fillstyle": "none"},
    )
    for (name, entries), look in zip(attacks.items(), looks, strict=False):  # one may lie upon the other
        points = sorted((entry.radius, entry.accuracy) for entry in entries)
        axis.plot(*zip(*points, strict=True), label=f"under {name} ({count} samples)", **look)
    axis.axhline(found.accuracy, color="0.3", linestyle=":", linewidth=1, label="without a change")
    axis.set(xlim=(0, 1.02 * right), ylim=(0, 1.02))
    return finished(figure, axis)
