"""
Several resolutions at one equilibrium
======================================

The state of an MDEQ (S. Bai, V. Koltun, J. Z. Kolter, 2020) has several resolutions, which are solved together: the
coarse ones know what surrounds a pixel, the fine one where a stroke ends. This script trains one to label every pixel
of a picture with the size of the digit that it belongs to, and shows how the labels settle during a solve.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq

WARM_UP, STEPS, SIDE, HEIGHTS = 120, 40, 32, (8, 16)
torch.manual_seed(0)

# %%
# A picture has handwritten digits in three of its quarters. The label of a pixel is the height of the digit whose
# stroke covers it, an index of ``HEIGHTS``; the last class is the background. Every fifth digit is kept for the test.

digits = torch.from_numpy(load_digits().images).float()[:, None] / 16
held_out = torch.arange(len(digits)) % 5 == 0
train, test = digits[~held_out], digits[held_out]


def pictures(digits, count):
    images, labels = torch.zeros(count, 1, SIDE, SIDE), torch.full((count, SIDE, SIDE), len(HEIGHTS))
    for image, label in zip(images, labels, strict=True):
        for quarter, digit in zip(torch.randperm(4), digits[torch.randint(len(digits), (3,))], strict=False):
            kind = int(torch.randint(len(HEIGHTS), ()))
            size = HEIGHTS[kind]
            digit = nn.functional.interpolate(digit[None], (size, size), mode="bilinear")[0, 0]
            corner = SIDE // 2 * torch.stack([quarter // 2, quarter % 2])
            top, left = (corner + torch.randint(SIDE // 2 - size + 1, (2,))).tolist()
            image[0, top : top + size, left : left + size] = digit
            label[top : top + size, left : left + size][digit > 0.3] = kind
    return images, labels


# %%
# Three scales, 32, 16 and 8 pixels wide. As in the paper, training starts with a shallow weight-tied stack, a few plain
# steps without a solver; after it, the same weights are trained at the equilibrium. From the middle of that warm-up
# on, a penalty on the Jacobian of f keeps f contractive, so that the solves converge.

classes = len(HEIGHTS) + 1
model = eq.models.MDEQ((1, SIDE, SIDE), classes, head="segmentation", channels=(16, 24, 32), groups=4, dropout=0.0)
model.equilibrium.on_failure = "ignore"  # some of the first solves run out of steps
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, WARM_UP + STEPS)
for step in range(WARM_UP + STEPS):
    model.equilibrium.gradient = eq.UnrolledGradient(steps=4) if step < WARM_UP else eq.PhantomGradient(steps=2)
    images, labels = pictures(train, 16)
    injections = model.injections(images)
    z = model.equilibrium(*injections)
    loss = nn.functional.cross_entropy(model.read(z), labels)
    if step >= WARM_UP // 2:
        loss = loss + eq.jacobian_penalty(model.equilibrium.f, z, *injections).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

# %%
# The IoU of a class is the overlap of predicted and true regions, divided by their union.

model.eval().requires_grad_(False)
model.equilibrium.on_failure = "warn"
images, labels = pictures(test, 100)
seen = model(images).argmax(dim=1)
pairs = [(seen == k, labels == k) for k in range(classes)]
iou = torch.stack([(a & b).sum() / (a | b).sum() for a, b in pairs])
print(f"mean IoU {iou.mean():.1%}, pixel accuracy {(seen == labels).float().mean():.1%}")

# %%
# A callback keeps the labels at every step of a solve, and how far every scale still moves.

labelled, moved = [], []


def watch(progress):
    labelled.append(model.read(progress.value)[0].argmax(dim=0))
    changes = zip(progress.image, progress.value, strict=True)
    moved.append([float((after - before).norm() / after.norm()) for after, before in changes])


solution = model.equilibrium.solve(*model.injections(images[:1]), callback=watch)
print(solution)

figure, axes = plt.subplots(1, 6, figsize=(12, 2.4), layout="constrained", width_ratios=(1, 1, 1, 1, 1, 1.7))
shown = {"picture": images[0, 0], "truth": labels[0]}
shown |= {f"step {k}": labelled[k - 1] for k in (1, 3, len(labelled))}
for axis, (title, picture) in zip(axes, shown.items(), strict=False):
    axis.imshow(
        picture.numpy(),
        cmap="gray" if title == "picture" else "Set2",
        vmin=0,
        vmax=1 if title == "picture" else classes,
    )
    axis.set(title=title, xticks=[], yticks=[])
axes[-1].semilogy(moved, label=[f"{SIDE // 2**scale} px" for scale in range(3)])
axes[-1].set(title="relative residual of each scale", xlabel="step")
axes[-1].legend()
plt.show()
