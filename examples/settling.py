"""Draw an equilibrium settling: the path of every sample, and the step at which each one stops.

    python examples/settling.py [FILE]

Needs matplotlib (the extra ``lab``).
"""

import sys

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

import equipoise as eq

SAMPLES, SHOWN = 48, 10
ANGLE = torch.tensor(0.8)
W = 0.9 * torch.tensor([[torch.cos(ANGLE), -torch.sin(ANGLE)], [torch.sin(ANGLE), torch.cos(ANGLE)]])


def f(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(z @ W.T + x)


def settle() -> tuple[torch.Tensor, eq.Solution]:
    """Return every iterate (step, sample, 2) and the Solution; a sample that has stopped keeps its place."""
    generator = torch.Generator().manual_seed(3)
    x = 0.6 * torch.randn(SAMPLES, 2, generator=generator)
    path = [torch.zeros(SAMPLES, 2)]
    solution = eq.fixed_point(
        f, path[0], x, solver=eq.Picard(), tolerance=eq.Tolerance(relative=1e-4, max_steps=200), trace=True
    )
    for _ in range(int(solution.stats.steps.max()) - 1):
        done = len(path) >= solution.stats.steps
        path.append(torch.where(done[:, None], path[-1], f(path[-1], x)))
    return torch.stack(path), solution


def draw(path: torch.Tensor, solution: eq.Solution) -> Figure:
    steps, trace = solution.stats.steps, solution.stats.trace
    assert trace is not None
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=100)
    plane, curves = figure.subplots(1, 2, width_ratios=(1, 1.5))
    figure.colorbar(
        curves.scatter([], [], c=[], cmap="viridis", vmin=int(steps.min()), vmax=int(steps.max())),
        ax=curves,
        label="steps until the sample stops",
    )
    shade = (steps - steps.min()) / (steps.max() - steps.min())
    for sample in range(SAMPLES):
        colour, last = colormaps["viridis"](float(shade[sample])), int(steps[sample])
        if sample < SHOWN:
            plane.plot(*path[:last, sample].T, color=colour, linewidth=0.7, alpha=0.8)
            plane.plot(*path[last - 1, sample], "o", color=colour, markersize=4)
        curves.semilogy(range(1, last + 1), trace[:last, sample], color=colour, linewidth=0.8, alpha=0.7)
        curves.plot(last, trace[last - 1, sample], "o", color=colour, markersize=3)
    plane.set(title=f"Paths of {SHOWN} samples", xlabel="$z_1$", ylabel="$z_2$", aspect="equal")
    curves.axhline(1e-4, color="0.5", linewidth=0.8, linestyle="--")
    curves.set(
        title=f"Residuals of {SAMPLES} samples: each stops on its own", xlabel="step", ylabel="relative residual"
    )
    for axes in (plane, curves):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw(*settle()).savefig(sys.argv[1] if len(sys.argv) > 1 else "settling.png")
