"""A random iterate of a joint optimisation, at which the Jacobian penalty is measured (JIIO, appendix C.2)."""

from typing import Any

import torch

from equipoise.problem.layout import leaves, rebuild
from equipoise.solvers import Progress


class RandomIterate:
    """A callback that keeps (z, x) of each sample at a step drawn uniformly from ``first`` to ``last``.

    A sample that stops earlier keeps its last iterate. The Jacobian penalty is measured there (appendix C.2).
    """

    def __init__(self, batch: int, first: int, last: int, device: torch.device):
        self.step = torch.randint(min(first, last), last + 1, (batch,)).to(device)
        self.z: Any = None
        self.x: Any = None

    def __call__(self, progress: Progress) -> None:
        z, _, x = progress.value
        if self.z is None:  # copied, since they are views of the solver's state
            self.z, self.x = (rebuild(part, [t.clone() for _, t in leaves(part, "part")]) for part in (z, x))
            return
        before = progress.step <= self.step[progress.rows]
        chosen, rows = before.nonzero().squeeze(1), progress.rows[before]
        for kept, new in ((self.z, z), (self.x, x)):
            for (_, old), (_, tensor) in zip(leaves(kept, "kept"), leaves(new, "new"), strict=True):
                old.index_copy_(0, rows, tensor[chosen])
