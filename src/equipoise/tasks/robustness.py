"""Robustness: classification of images that an adversary has changed within a given distance.

Projected gradient descent: A. Madry, A. Makelov, L. Schmidt, D. Tsipras, A. Vladu, "Towards deep learning models
resistant to adversarial attacks" (2018).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import watch_solves
from equipoise.models.parts.context_managers import evaluating, exact_gradients
from equipoise.models.parts.keyword_options import accepts, options_of, positional_of
from equipoise.options import option, options, require
from equipoise.registry import Registry, UnknownName
from equipoise.tasks.base import Batch, Sums, labelled
from equipoise.tasks.classification import LabelTask
from equipoise.tasks.drawing import attack_panel
from equipoise.tasks.wrapped import unwrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTACKS = Registry(
    "attack",
    {
        "pgd": "equipoise.tasks.robustness:pgd",
        "jiio": "equipoise.tasks.joint_attack:jiio",
        "foolbox": "equipoise.tasks.robustness:foolbox_pgd",
    },
    functions=True,
)
NORMS = ("linf", "l2")
TRAINED = ("pgd", "jiio")  # attacks for training
PANEL = 5  # images in the report's panel
JOINT_STEPS = 50  # default of the attack "jiio"; about as strong as 20 steps of PGD: benchmarks/joint.py
EVALUATED = ("radius", "norm", "steps", "restarts")  # fields of Budget that are options of the task


@options
class Budget:
    """The limits of an attack.

    Args:
        radius: largest distance by which an image in [0, 1] may be moved; 8/255 is common for "linf".
        norm: "linf" (the largest change of a pixel) or "l2" (Euclidean norm of the change).
        steps: number of gradient ascent steps.
        step_size: step size; None for 2.5 radius / steps, which can reach every point of the ball.
        restarts: number of attacks per image, from different random points; the worst result counts.
        random_start: whether to start from a random point of the ball instead of the image itself.
    """

    radius: float
    norm: str = option(default="linf", among=NORMS)
    steps: int = option(default=20, at_least=1, whole=True)
    step_size: float | None = option(default=None, above=0, optional=True)
    restarts: int = option(default=1, at_least=1, whole=True)
    random_start: bool = option(default=True, kind=bool)

    def __post_init__(self) -> None:
        require(self, "radius", above=0)
        if self.norm == "linf" and self.radius > 1:
            raise ValueError(
                f"Budget.radius is {self.radius}, and pixels are between 0 and 1; it must be at most 1, such as 8/255."
            )

    @property
    def size(self) -> float:
        return 2.5 * self.radius / self.steps if self.step_size is None else self.step_size


def pgd(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, **budget: Any) -> Tensor:
    """Attack a batch: return images in [0, 1] near the given ones that maximise the loss, by projected gradient ascent.

    Args:
        model: function from images in [0, 1] to logits; its parameters get no gradient. A module is attacked in
            evaluation mode, so that the attack sees one fixed function.
        images, labels: batch to attack.
        budget: fields of :class:`Budget`.

    Example:
        >>> attacked = pgd(model, images, labels, radius=8 / 255, steps=20)
    """
    allowed = Budget(**budget)
    require_pixels(images)
    radius, norm = allowed.radius, allowed.norm
    worst, largest = images.clone(), torch.full((len(images),), -torch.inf, dtype=images.dtype, device=images.device)

    def keep_worst(candidate: Tensor, gap: Tensor) -> None:
        higher = gap > largest  # never true for NaN
        largest.copy_(torch.where(higher, gap, largest))
        worst.copy_(torch.where(higher[:, None, None, None], candidate, worst))

    with evaluating(model) if isinstance(model, nn.Module) else nullcontext():
        for _ in range(allowed.restarts):
            x = images.clone()
            if allowed.random_start:
                x = within(images, x + random_change(images, radius, norm), radius, norm)
            for _ in range(allowed.steps):
                gap, gradient = gap_and_gradient(model, x, labels)
                keep_worst(x, gap)
                gradient = gradient.nan_to_num(0.0)  # a pixel without a gradient stays
                direction = gradient.sign() if norm == "linf" else gradient / lengths(gradient).clamp(min=1e-30)
                x = within(images, x + allowed.size * direction, radius, norm)
            with torch.no_grad(), watch_solves():
                keep_worst(x, class_gap(model(x), labels))
    return worst


def require_pixels(images: Tensor) -> None:
    """Raise unless all pixels are in [0, 1], from where an attack does not leave the ball."""
    if not bool(((images >= 0) & (images <= 1)).all()):
        raise ValueError(
            f"images have pixels from {images.min():g} to {images.max():g}; an attack needs them between 0 and 1: "
            "scale them, and normalise inside the model."
        )


def class_gap(logits: Tensor, labels: Tensor) -> Tensor:
    """Return g = log sum_{j != y} exp(l_j) - l_y per sample, whose cross entropy is log(1 + exp(g)).

    The cross entropy grows with g: both have the same maxima and, up to a factor, the same gradient. But the factor,
    1 / (1 + exp(-g)), rounds to zero where the model is confident, which would then look robust to an attack.
    """
    of_label = labels[:, None]
    others = logits.scatter(1, of_label, -torch.inf)
    return others.logsumexp(1) - logits.gather(1, of_label)[:, 0]


def gap_and_gradient(model: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gap of each image, and its gradient with respect to the image."""
    with torch.enable_grad(), watch_solves():  # the attack's solves are not counted as the model's
        x = x.detach().requires_grad_()
        gap = class_gap(model(x), labels)
        (gradient,) = torch.autograd.grad(gap.sum(), x)
    return gap.detach(), gradient


def within(center: Tensor, x: Tensor, radius: float, norm: str) -> Tensor:
    """Project x onto the ball, then onto [0, 1]: as the center is in there, this does not leave the ball."""
    change = x - center
    if norm == "linf":
        return (center + change.clamp(-radius, radius)).clamp(0, 1)
    return (center + change * (radius / lengths(change).clamp(min=radius))).clamp(0, 1)


def random_change(images: Tensor, radius: float, norm: str) -> Tensor:
    """Draw uniformly from the ball: for l2, a random direction times a length distributed as U^(1/d)."""
    if norm == "linf":
        return torch.empty_like(images).uniform_(-radius, radius)
    direction = torch.randn_like(images)
    share = torch.rand(len(images), 1, 1, 1, device=images.device, dtype=images.dtype) ** (1 / images[0].numel())
    return radius * share * direction / lengths(direction)


def lengths(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 2, 3), keepdim=True)


def change_norms(change: Tensor, norm: str) -> Tensor:
    """Return the norm, "linf" or "l2", of the change of each image."""
    return change.flatten(1).abs().amax(1) if norm == "linf" else torch.linalg.vector_norm(change.flatten(1), dim=1)


def foolbox_pgd(model: nn.Module, images: Tensor, labels: Tensor, **budget: Any) -> Tensor:
    """Run the same attack with foolbox (the extra ``attacks``), on the cross entropy, as a check of :func:`pgd`."""
    foolbox = import_foolbox()
    from foolbox.models.pytorch import PyTorchModel

    allowed = Budget(**budget)
    if not isinstance(model, nn.Module):
        raise TypeError("the attack 'foolbox' requires a model that is a torch.nn.Module.")
    kind = foolbox.attacks.LinfPGD if allowed.norm == "linf" else foolbox.attacks.L2PGD
    attack: Any = kind(abs_stepsize=allowed.size, steps=allowed.steps, random_start=allowed.random_start)
    if allowed.restarts > 1:
        attack = attack.repeat(allowed.restarts)
    frozen = copy.deepcopy(model).eval().requires_grad_(False)  # foolbox leaves gradients behind
    with torch.enable_grad(), watch_solves():
        attackable = PyTorchModel(frozen, bounds=(0, 1), device=images.device)
        _, clipped, _ = attack(attackable, images, labels, epsilons=allowed.radius)
    return clipped.detach()


def import_foolbox() -> Any:
    try:
        import foolbox
    except ImportError as error:
        message = "the attack 'foolbox' needs the package foolbox: pip install 'equipoise[attacks]'."
        raise ImportError(message) from error
    return foolbox


class Robustness(LabelTask):
    """Classification under attack: reports accuracy with and without attacks, and can train on attacked images.

    With several attacks, the accuracy under each is reported, and the robust accuracy counts the images that all of
    them leave correctly classified.

    Args:
        class_names, shift, flip, label_smoothing, top: see :class:`~equipoise.tasks.classification.LabelTask`.
        radius, norm, steps, restarts: the attack that is evaluated, see :class:`Budget`.
        attack: "pgd", "jiio", "foolbox", your own as "my_module:my_attack", with the parameters of :func:`pgd`, or a
            list of such names.
        joint_steps: number of steps of the attack "jiio" (``steps`` is that of all others).
        train_attack: attack on training images, "pgd" or "jiio".
        train_steps: number of steps of the attack on training images; 0 trains without an attack.

    Example:
        >>> task = Robustness(class_names, radius=1.0, norm="l2", attack=["pgd", "jiio"], train_steps=7)
    """

    @accepts(*positional_of(LabelTask), *options_of(Budget, *EVALUATED))
    def __init__(
        self,
        *labels: Any,
        radius: float = 8 / 255,
        attack: str | Sequence[str] = "pgd",
        joint_steps: int = JOINT_STEPS,
        train_attack: str = "pgd",
        train_steps: int = 0,
        **options: Any,
    ):
        budget = {name: options.pop(name) for name in EVALUATED if name in options}
        super().__init__(*labels, **options)
        self.budget = Budget(radius=radius, **budget)
        self.joint_steps, self.train_attack, self.train_steps = joint_steps, train_attack, train_steps
        require(self, "joint_steps", at_least=1, whole=True)
        require(self, "train_attack", among=TRAINED)
        require(self, "train_steps", at_least=0, whole=True)
        # Trained on clean images, a model has no robust accuracy to speak of: the best weights would be chance.
        self.best_metric = "robust accuracy" if train_steps else "accuracy"
        names = [attack] if isinstance(attack, str) else attack
        if not isinstance(names, list | tuple) or not names or len(set(map(str, names))) < len(names):
            raise ValueError(f"attack is {attack!r}; it must be the name of an attack, or a list of different names.")
        try:
            self.attacks: dict[str, Callable[..., Tensor]] = {name: ATTACKS[name] for name in names}
        except UnknownName as error:  # an option of the task is wrong, not its name
            raise ValueError(str(error)) from None
        if "foolbox" in names:
            import_foolbox()  # a missing package is reported now, not after training

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the mean cross entropy of the attacked images, which are held constant.

        At a maximum over the perturbation, its dependence on the weights does not contribute (envelope theorem).
        """
        images, labels = labelled(batch)
        if self.train_steps:
            # Without the wrapper that averages gradients: it would wait for gradients of the weights.
            budget = {"radius": self.budget.radius, "norm": self.budget.norm, "steps": self.train_steps}
            images = ATTACKS[self.train_attack](unwrapped(model), images, labels, **budget)
        return super().loss(model, (images, labels))

    def attacked(self, name: str, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Return the images after the attack ``name``, one of ``self.attacks``."""
        budget = {field: getattr(self.budget, field) for field in EVALUATED}
        if name == "jiio":
            budget["steps"] = self.joint_steps
        with exact_gradients(model):  # however the model was trained: with a cruder rule it would look more robust
            return self.attacks[name](model, images, labels, **budget)

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = labelled(batch)
        logits = model(images)
        sums = self.evaluation_sums(logits, labels)
        right = logits.argmax(1) == labels  # a misclassified image counts as broken without an attack
        robust = right
        for name in self.attacks:
            withstood = right & (model(self.attacked(name, model, images, labels)).argmax(1) == labels)
            robust = robust & withstood
            if len(self.attacks) > 1:
                sums[f"right under {name}"] = withstood.sum()
        return {**sums, "robust": robust.sum()}

    def metrics(self, sums: Sums) -> dict[str, float]:
        metrics = super().metrics(sums)
        counts = {f"accuracy under {name}": f"right under {name}" for name in self.attacks}
        for metric, count in {**counts, "robust accuracy": "robust"}.items():
            if count in sums:
                metrics[metric] = sums[count].item() / sums["samples"].item()
        return metrics

    def pictures(
        self, model: nn.Module, batches: Callable[[], Iterator[Batch]], sums: Sums
    ) -> Iterator[tuple[str, "Figure"]]:
        yield from super().pictures(model, batches, sums)
        images, labels = next(batches())
        if images.dim() != 4:
            return
        name = next(iter(self.attacks))
        images, labels = images[:PANEL], labels[:PANEL]
        with torch.no_grad():
            attacked = self.attacked(name, model, images, labels)
            captions = [self.captions(model(each), labels) for each in (images, attacked)]
        rows = zip(images.float().cpu(), attacked.float().cpu(), *captions, strict=True)
        yield f"Attack by {name}", attack_panel([*rows])

    def captions(self, logits: Tensor, labels: Tensor) -> list[str]:
        """Return for each image the predicted class, its probability, and the true class if it is another."""
        found = zip(*(each.tolist() for each in (*logits.float().softmax(1).max(1), labels)), strict=True)
        return [
            f"{self.class_names[guess]} ({p:.0%})" + ("" if guess == label else f", not {self.class_names[label]}")
            for p, guess, label in found
        ]
