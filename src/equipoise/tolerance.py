"""When a sample is solved."""

from __future__ import annotations

from equipoise.options import options, require


@options
class Tolerance:
    """Each sample stops once ||f(z) - z||_2 <= absolute + relative * ||f(z)||_2, or after ``max_steps``.

    Args:
        relative: bound on the residual relative to the image f(z).
        absolute: bound on the residual itself.
        max_steps: maximum number of residuals evaluated, including the first one, at z0.
        patience: number of steps without a 1% decrease of its lowest residual after which a sample is STALLED and
            stops; None disables the check.

    Example:
        >>> eq.Tolerance(relative=1e-6, max_steps=200)
    """

    relative: float = 1e-4
    absolute: float = 0.0
    max_steps: int = 50
    patience: int | None = 30

    def __post_init__(self) -> None:
        require(self, "relative", at_least=0.0)
        require(self, "absolute", at_least=0.0)
        require(self, "max_steps", at_least=1, whole=True)
        require(self, "patience", at_least=1, whole=True, optional=True)
