"""
Multiscale equilibria and segmentation
======================================

An MDEQ (S. Bai, V. Koltun, J. Z. Kolter, 2020) keeps features at several resolutions and solves for all of them
together. Here one with two scales learns to tell disks, squares and background apart, in scenes that the script draws
itself.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import equipoise as eq

STEPS, SHALLOW, SIDE = 110, 70, 24
torch.manual_seed(0)

# %%
# A scene has a grey background, a disk and a square, under noise. The label of a pixel is 0 (background), 1 (disk) or 2
# (square). Disks are rather red and squares rather blue, but the noise is so large that one pixel does not tell.

COLORS = torch.tensor([[0.0, 0.0, 0.0], [0.65, 0.35, 0.3], [0.3, 0.4, 0.65]])


def scenes(count):
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images, labels = 0.5 * torch.ones(count, 3, SIDE, SIDE), torch.zeros(count, SIDE, SIDE).long()
    for shape in (1, 2):
        y, x = (SIDE * (0.2 + 0.6 * torch.rand(2, count, 1, 1))).unbind()
        size = SIDE * (0.12 + 0.12 * torch.rand(count, 1, 1))
        dy, dx = (rows - y).abs(), (columns - x).abs()
        inside = dy**2 + dx**2 < size**2 if shape == 1 else torch.maximum(dy, dx) < 0.89 * size
        labels[inside] = shape
        color = COLORS[shape, :, None, None] + 0.05 * torch.randn(count, 3, 1, 1)
        images = torch.where(inside[:, None], color, images)
    return (images + 0.2 * torch.randn_like(images)).clamp(0, 1), labels


# %%
# ``head="segmentation"`` gives logits for every pixel. Nothing makes the f of an MDEQ contractive, so the loss includes
# a penalty on its Jacobian, and training starts with a shallow stack: four steps of f, all of them differentiated.

model = eq.models.MDEQ(
    shape=(3, SIDE, SIDE), classes=3, head="segmentation", size="cifar10-small-public", channels=(8, 16), groups=4,
    dropout=0.0,
)  # fmt: skip
model.equilibrium.solver, model.equilibrium.on_failure = eq.Anderson(), "ignore"
model.equilibrium.tolerance = eq.Tolerance(relative=3e-2, max_steps=16)
for module in model.modules():
    if isinstance(module, nn.BatchNorm2d):
        module.momentum = 0.1  # the default of 0.01 is for long training runs
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
for step in range(STEPS):
    if step in (0, SHALLOW):
        model.equilibrium.gradient = eq.ImplicitGradient() if step else eq.UnrolledGradient(steps=4)
    images, labels = scenes(8)
    injected = model.injections(images)
    z = model.equilibrium(*injected)
    loss = nn.functional.cross_entropy(model.read(z), labels)
    penalty = eq.jacobian_penalty(model.equilibrium.f, tuple(part.detach() for part in z), *injected)
    optimizer.zero_grad()
    (loss + 0.5 * penalty).backward()
    optimizer.step()
    schedule.step()

# %%
# Both scales reach equilibrium together: a solve returns a tuple, one tensor per resolution.

model.eval().requires_grad_(False)
images, labels = scenes(64)
solution = model.equilibrium.solve(*model.injections(images))
predicted = model.read(solution.value).argmax(dim=1)
overlap = [((predicted == c) & (labels == c)).sum() / ((predicted == c) | (labels == c)).sum() for c in range(3)]
print([tuple(part.shape[1:]) for part in solution.value])
print(f"mean IoU {sum(overlap) / 3:.1%}, {solution.converged.float().mean():.0%} of the images converged")

figure, axes = plt.subplots(3, 6, figsize=(9, 4.6), layout="constrained")
for column, parts in enumerate(zip(images, labels, predicted, strict=True)):
    if column < 6:
        for axis, part in zip(axes[:, column], parts, strict=True):
            axis.imshow(part.movedim(0, -1).numpy() if part.dim() == 3 else part.numpy(), vmin=0, vmax=2)
            axis.set(xticks=[], yticks=[])
for axis, name in zip(axes[:, 0], ("image", "truth", "prediction"), strict=True):
    axis.set_ylabel(name)
plt.show()
