"""
Your own layer
==============

An equilibrium layer needs one thing: a function ``f(z, x)`` that maps a state and an input to the next state.
:class:`equipoise.Equilibrium` turns it into a layer whose output is the fixed point ``z* = f(z*, x)``. Here such a
layer of 32 units learns to tell two spirals apart.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import equipoise as eq

STEPS = 300
torch.manual_seed(0)

# %%
# The function is an ordinary module. The spectral norm keeps its weight below 0.9, so that f is a contraction in z:
# every x has exactly one equilibrium, and plain iteration finds it.


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.W = eq.SpectralNorm(nn.Linear(width, width), bound=0.9)

    def forward(self, z, x):
        return torch.tanh(self.W(z) + x)


layer = eq.Equilibrium(Cell(32), solver=eq.Anderson(memory=5), tolerance=eq.Tolerance(relative=1e-3))
model = nn.Sequential(nn.Linear(2, 32), layer, nn.Linear(32, 2))

# %%
# Training is ordinary, too. ``loss.backward()`` computes the gradient of the equilibrium itself by the implicit
# function theorem; the iterates of the solver are not stored.

angle = 4 * torch.rand(400) ** 0.5 * torch.pi
labels = torch.arange(400) % 2
turned = angle + torch.pi * labels
points = torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] / 6 + 0.04 * torch.randn(400, 2)

optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(STEPS):
    loss = nn.functional.cross_entropy(model(points), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

accuracy = (model(points).argmax(dim=1) == labels).float().mean().item()
print(f"loss {loss.item():.3f}, accuracy {accuracy:.1%}")

# %%
# ``layer.solve`` returns a :class:`equipoise.Solution` instead of the bare value: it tells which samples converged,
# and after how many steps.

side = torch.linspace(-2.4, 2.4, 90)
grid = torch.cartesian_prod(side, side)
with torch.no_grad():
    solution = layer.solve(model[0](grid))
    probability = model[2](solution.value).softmax(dim=1)[:, 1]
print(solution)

figure, axes = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
drawn = (("Probability of class 1", probability, "RdBu_r"), ("Solver steps", solution.stats.steps, "viridis"))
for axis, (title, values, colors) in zip(axes, drawn, strict=True):
    shown = axis.imshow(values.view(90, 90).T.numpy(), origin="lower", extent=[-2.4, 2.4] * 2, cmap=colors)
    figure.colorbar(shown, ax=axis)
    axis.set(title=title, xticks=[], yticks=[])
axes[0].scatter(*points.T.numpy(), c=labels.numpy(), cmap="RdBu_r", edgecolors="white", linewidths=0.5, s=16)
plt.show()
