"""Whether f treats each sample of a batch independently, determined by trying.

Solvers stop each sample separately and leave finished ones out, which is correct only if the image of a sample does not
depend on its batch-mates. This is checked when a sample that had stopped is no longer solved, and when f contains a
layer that takes the batch for a sequence.
"""

import torch
from torch import Tensor

from equipoise.problem.captures import other_than
from equipoise.problem.layout import residual_at
from equipoise.problem.problem import Count, FunctionProblem, ImpureFunctionWarning, Problem
from equipoise.solution import warn_user

NOT_A_FUNCTION = (
    "f is not a function of z: two evaluations at the same z differ. Look for dropout (use "
    "equipoise.VariationalDropout), noise, BatchNorm in training mode or changing state inside f."
)


def mixes_samples(problem: Problem, rows: Tensor, image: Tensor) -> bool:
    """Return whether the ``image`` of a sample depends on its batch-mates; False, with a warning, if f is impure."""
    with torch.no_grad():
        change = residual_at(image, problem(rows))
        if bool((change > 100 * problem.rounding).any()):
            if not problem.known_impure:
                warn_user(NOT_A_FUNCTION, ImpureFunctionWarning)
            return False
        everyone = torch.arange(len(rows), device=rows.device)
        halves = [everyone[::2], everyone[1::2]]
        return any(
            depends_on_others(problem, rows, image, kept, others)
            for kept, others in (halves, halves[::-1])
            if len(kept) and len(others)
        )


def depends_on_others(problem: Problem, rows: Tensor, image: Tensor, kept: Tensor, others: Tensor) -> bool:
    """Return whether the images of the samples ``kept`` change when ``others`` have other states, or are left out."""

    def differ(after: Tensor, units: float) -> bool:
        change = residual_at(image[kept], after)
        return bool((torch.isfinite(image[kept]).all(dim=1) & ~(change <= units * problem.rounding)).any())

    trial = rows.index_copy(0, others, other_than(rows[others]))
    if differ(problem(trial)[kept], 100):
        return True
    if not problem.gatherable:
        return False
    narrow = problem.take(kept)
    return narrow is None or differ(narrow(rows[kept]), 1000)  # another batch size may sum in another order


def warn_of_sequence_first_layers(problem: FunctionProblem, rows: Tensor) -> None:
    """Warn about a layer inside f that takes the first dimension for a sequence, if f therefore mixes the samples."""
    if len(rows) < 2:
        return
    with torch.no_grad():
        probe = problem.replaced(count=Count())  # these evaluations are not part of the solve
        rows = other_than(rows.detach())  # attention over zeros would hide it
        if not mixes_samples(probe, rows, probe(rows)):
            return
    warn_user(
        f"f mixes the samples of the batch: {problem.sequence_first} takes the first dimension for the sequence. "
        "Create it with batch_first=True, or solve the batch as one problem with coupled=True.",
        ImpureFunctionWarning,
    )
