"""Draw the pictures of ``docs/concepts.md`` into ``docs/pictures``.

python docs/concepts_pictures.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import equipoise as eq

PICTURES = Path(__file__).parent / "pictures"


def new_figure(title: str) -> tuple[Figure, list]:
    figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=100)
    axes = list(figure.subplots(1, 2))
    figure.suptitle(title)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def fixed_points() -> Figure:
    """A solver's path to a fixed point: where it converges, and where it jumps back and forth."""
    figure, axes = new_figure("Plain iteration z, f(z), f(f(z)), ...")
    line = torch.linspace(-0.2, 2.2, 200)
    contraction = (lambda z: 0.4 + 0.9 * torch.tanh(z), 0.15, "slope of 0.3 at z*: converges")
    overshooting = (lambda z: 1.9 - 1.1 * torch.tanh(2 * (z - 1)), 1.25, "slope of -1.6 at z*: jumps back and forth")
    for axis, (f, start, title) in zip(axes, (contraction, overshooting), strict=True):
        z = torch.tensor([start])
        path = [(z.item(), 0.0)]
        for _ in range(9):
            image = f(z)
            path += [(z.item(), image.item()), (image.item(), image.item())]
            z = image
        axis.plot(line, line, color="0.6", linewidth=1, label="z")
        axis.plot(line, f(line), color="tab:blue", label="f(z)")
        axis.plot(*zip(*path, strict=True), color="tab:red", linewidth=0.9, label="iterates")
        solution = eq.fixed_point(f, torch.ones(1, 1), solver=eq.Broyden()).value.item()
        axis.plot(solution, solution, "o", color="black", markersize=5)
        axis.annotate("z*", (solution, solution), (solution + 0.08, solution - 0.18))
        axis.set(title=title, xlabel="z", ylim=(0, 2.3), xlim=(-0.2, 2.2))
        axis.legend(loc="upper left", frameon=False)
    return figure


def implicit_gradient() -> Figure:
    """How far the fixed point moves when the input does, and what each gradient costs."""
    figure, (left, right) = new_figure("The derivative of an equilibrium needs the equilibrium only")
    line = torch.linspace(0, 2, 200)

    def f(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.9 * z) + x

    left.plot(line, line, color="0.6", linewidth=1)
    ends = []
    for x, color in ((0.15, "tab:blue"), (0.3, "tab:green")):
        z = eq.fixed_point(
            f, torch.ones(1, 1), torch.full((1, 1), x), tolerance=eq.Tolerance(relative=1e-6)
        ).value.item()
        left.plot(line, f(line, torch.tensor(x)), color=color, label=f"f(z, {x:g})")
        left.plot(z, z, "o", color=color)
        left.plot([z, z], [0, z], ":", color=color)
        ends.append(z)
    left.annotate("", (ends[1], 0.12), (ends[0], 0.12), arrowprops={"arrowstyle": "->"})
    left.text(1.1, 0.1, "dz* = df/dx dx / (1 - df/dz)")
    left.set(xlabel="z", xlim=(0, 2), ylim=(0, 2), title="dx moves f up by df/dx dx, z* by more")
    left.legend(loc="upper left", frameon=False)

    torch.manual_seed(0)
    W = torch.nn.Linear(64, 64).double()
    torch.nn.init.orthogonal_(W.weight, gain=0.9)
    x = torch.randn(32, 64, dtype=torch.float64)

    def gradient(rule: eq.GradientRule) -> torch.Tensor:
        tolerance = eq.Tolerance(relative=1e-10, max_steps=300)
        f = lambda z, x: torch.tanh(W(z) + x)  # noqa: E731
        solution = eq.fixed_point(f, torch.zeros_like(x), x, gradient=rule, tolerance=tolerance, on_failure="ignore")
        return torch.autograd.grad(solution.value.square().sum(), W.weight)[0]

    exact, counts = gradient(eq.ImplicitGradient()), (1, 2, 4, 8, 16, 32)
    for name, rule in (("unrolled", eq.UnrolledGradient), ("phantom", eq.PhantomGradient)):
        errors = [((gradient(rule(steps=n)) - exact).norm() / exact.norm()).item() for n in counts]
        right.loglog(counts, errors, marker="o", label=f"{name}: stores that many evaluations")
    right.axhline(1e-6, color="black", linestyle="--", linewidth=1, label="implicit, tolerance 1e-6: stores one")
    right.set(xlabel="steps that are differentiated", ylabel="relative error", title="Error of the gradient")
    right.legend(frameon=False)
    return figure


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in {"fixed-points": fixed_points, "implicit-gradient": implicit_gradient}.items():
        draw().savefig(PICTURES / f"{name}.png")
