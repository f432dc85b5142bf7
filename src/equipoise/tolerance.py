"""When a sample is solved."""

from equipoise.options import option, options


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

    relative: float = option(default=1e-4, at_least=0.0)
    absolute: float = option(default=0.0, at_least=0.0)
    max_steps: int = option(default=50, at_least=1, whole=True)
    patience: int | None = option(default=30, at_least=1, whole=True, optional=True)
