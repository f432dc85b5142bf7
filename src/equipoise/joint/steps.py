"""How far x moves along its gradient g = dL/dx: the step rules of the input."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.options import is_number, option, options
from equipoise.problem.layout import row_norms

Moments = tuple[Tensor, ...]  # what a rule remembers of each sample


@dataclass
class Move:
    """The next step of x before projection."""

    by: Tensor  # (batch, d)
    size: Tensor | None  # (batch,): ``by`` is -size * g; None if it is not a multiple of g
    moments: Moments


class InputStep(ABC):
    """A rule for the step of x; ``joins``: whether acceleration extrapolates x too, if ``extrapolate_x`` is None."""

    joins: ClassVar[bool] = False

    @property
    def along_gradient(self) -> bool:
        """Whether all moves are multiples of g, the only ones that JointAnderson can extrapolate."""
        return self.joins

    def init(self, x: Tensor) -> Moments:
        return ()

    @abstractmethod
    def move(self, gradient: Tensor, automatic: Tensor, count: int, moments: Moments) -> Move:
        """Return the move number ``count`` (0, 1, ...) of all samples.

        Args:
            gradient: (batch, d) rows of dL/dx.
            automatic: (batch,) step sizes of :class:`AutoStep`; 0 while R is unknown.
        """


def scaled(gradient: Tensor, size: Tensor) -> Move:
    return Move(gradient * -size[:, None], size, ())


@options
class AutoStep(InputStep):
    """Distance over gradients: R / sqrt(sum of |g|^2 so far), where R is the farthest that x has been from x0.

    R starts as the distance that would change f by half its norm, measured by one evaluation of f. The step is at most
    a fifth of the inverse of the curvature, the largest ratio |change of g| / |change of x| of the last steps, and at
    most that inverse where R is the diameter of the constraint. It does not depend on the units of the loss, x or z,
    and needs no tuning.

    Reference: M. Ivgi, O. Hinder, Y. Carmon, "DoG is SGD's best friend" (2023).
    """

    joins = True

    def move(self, gradient: Tensor, automatic: Tensor, count: int, moments: Moments) -> Move:
        return scaled(gradient, automatic)


@options
class ConstantStep(InputStep):
    """x - size * g (eq. 11), optionally with a smaller size later.

    Args:
        size: step size, in units of x per unit of g: it depends on the scale of the loss.
        later: step size after ``after`` steps; None keeps ``size``.
        after: number of steps with ``size``; the paper uses 65.

    Example:
        >>> eq.JointAnderson(step_size=eq.ConstantStep(0.01, later=0.003))
    """

    joins = True
    size: float = option(default=0.01, above=0.0)
    later: float | None = option(default=None, above=0.0, optional=True)
    after: int = option(default=65, at_least=1, whole=True)

    def move(self, gradient: Tensor, automatic: Tensor, count: int, moments: Moments) -> Move:
        return scaled(gradient, torch.full_like(automatic, scheduled(self.size, self.later, self.after, count)))


@options
class NormalizedStep(InputStep):
    """x - length * g / |g|: every step has the same length, as in attacks.

    Args:
        length: length of a step, in units of x.
        later: length after ``after`` steps; None keeps ``length``.
        after: number of steps with ``length``.
        norm: norm of the length: "l2", or "linf" for the steepest step in that norm, x - length * sign(g).

    Example:
        >>> eq.JointAnderson(memory=5, step_size=eq.NormalizedStep(0.1))
    """

    length: float = option(default=0.1, above=0.0)
    later: float | None = option(default=None, above=0.0, optional=True)
    after: int = option(default=65, at_least=1, whole=True)
    norm: str = option(default="l2", among=("l2", "linf"))

    @property
    def along_gradient(self) -> bool:
        return self.norm == "l2"

    def move(self, gradient: Tensor, automatic: Tensor, count: int, moments: Moments) -> Move:
        length = scheduled(self.length, self.later, self.after, count)
        if self.norm == "linf":
            return Move(-length * gradient.sgn(), None, ())
        size = length / row_norms(gradient)
        return scaled(gradient, torch.where(torch.isfinite(size), size, 0.0))


@options
class MomentumStep(InputStep):
    """Gradient descent with momentum: m <- momentum * m + g, x - size * m.

    Args:
        size: step size.
        momentum: fraction of the previous m that is kept.
    """

    size: float = option(default=0.01, above=0.0)
    momentum: float = option(default=0.9, at_least=0.0, below=1.0)

    def init(self, x: Tensor) -> Moments:
        return (torch.zeros_like(x),)

    def move(self, gradient: Tensor, automatic: Tensor, count: int, moments: Moments) -> Move:
        mean = torch.add(gradient, moments[0], alpha=self.momentum)
        return Move(-self.size * mean, None, (mean,))


@options
class AdamStep(InputStep):
    """Adam on x (D. P. Kingma, J. Ba, 2015, algorithm 1).

    Args:
        lr: learning rate.
        beta1: decay of the mean of g.
        beta2: decay of the mean of g^2.
        eps: added to the root of the mean of g^2, relative to its largest entry, so that it has no units.
    """

    lr: float = option(default=0.1, above=0.0)
    beta1: float = option(default=0.9, at_least=0.0, below=1.0)
    beta2: float = option(default=0.999, at_least=0.0, below=1.0)
    eps: float = option(default=1e-8, at_least=0.0)

    def init(self, x: Tensor) -> Moments:
        return torch.zeros_like(x), torch.zeros_like(x)

    def move(self, gradient: Tensor, automatic: Tensor, count: int, moments: Moments) -> Move:
        mean = torch.lerp(gradient, moments[0], self.beta1)
        square = torch.lerp(gradient.square(), moments[1], self.beta2)
        root = (square / (1 - self.beta2 ** (count + 1))).sqrt()
        floor = self.eps * root.amax(dim=1, keepdim=True) if root.shape[1] else root
        floor = floor + torch.finfo(root.dtype).tiny
        by = (mean / (1 - self.beta1 ** (count + 1)) / (root + floor)).mul_(-self.lr)
        return Move(by, None, (mean, square))


def scheduled(size: float, later: float | None, after: int, count: int) -> float:
    return size if later is None or count < after else later


def as_step(step: "InputStep | float | str", owner: str) -> InputStep:
    """Return the rule for a step given as an object, a number, or "auto"."""
    if isinstance(step, InputStep):
        return step
    if step == "auto":
        return AutoStep()
    if is_number(step, above=0.0):
        return ConstantStep(float(step))  # type: ignore[arg-type]
    raise (ValueError if isinstance(step, int | float | str) and not isinstance(step, bool) else TypeError)(
        f"{owner}.step_size is {step!r}; it must be 'auto', a positive number, or a rule such as "
        "equipoise.NormalizedStep(0.1)."
    )
