"""
The objective a MOptEq minimises
================================

The equilibrium of a MOptEq (M. Li et al., 2022) is a stationary point of an objective G that can be written down and
evaluated. This script trains a small one on 8x8 digits, watches G fall while three solvers run, and checks that its
gradient vanishes at the equilibrium.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq

EPOCHS = 3
torch.manual_seed(0)

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
train, test = torch.randperm(len(images)).split([1400, 397])

# %%
# ``order="jacobi"`` updates all branches at once, which the descent solvers require. The one-step gradient is the
# cheapest way to train.

model = eq.models.MOptEq(shape=(1, 8, 8), classes=10, size="reduced", channels=8, order="jacobi", diversity=0.02)
model.equilibrium.gradient = eq.PhantomGradient(steps=1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(100):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval().requires_grad_(False)
accuracy = (model(images[test]).argmax(dim=1) == labels[test]).float().mean().item()
print(f"test accuracy {accuracy:.1%}")

# %%
# Proposition 1 of the paper: the equilibrium is a stationary point of G. ``verify`` measures the gradient of G there,
# relative to the two parts of it that cancel.

some = images[test[:16]]
print(model.verify(some))

# %%
# A callback sees every iterate. One application of the map is a proximal gradient step on G, so G falls from step to
# step. On this model Anderson takes about as many steps, and FISTA's momentum does not pay.

solvers = {"proximal gradient": eq.ProximalGradient(), "FISTA": eq.FISTA(), "Anderson": eq.Anderson()}
inputs = model.injections(some)
curves = {}
for name, solver in solvers.items():
    values = curves[name] = []
    model.equilibrium.solver, model.equilibrium.compact = solver, False
    model.equilibrium.tolerance = eq.Tolerance(relative=1e-6, max_steps=100)
    solution = model.equilibrium.solve(
        *inputs, callback=lambda progress, to=values: to.append(model.objective(progress.value, some).mean().item())
    )
    print(f"{name}: median {solution.stats.steps.median()} steps")

least = min(min(values) for values in curves.values())
figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
for name, values in curves.items():
    axis.semilogy([value - least + 1e-6 for value in values], marker=".", label=name)
axis.set(xlabel="step", ylabel="G above its least value", title="The objective during the solve, mean of 16 images")
axis.legend()
plt.show()
