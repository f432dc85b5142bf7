"""
Learn from one example
======================

A classifier sees one image of each of five new classes, and then has to tell more images of them apart. Its weights
stay as they are: what it learns is a *task vector* x, an input of its equilibrium and its head, found by minimising
the loss of the five images over x (S. Gurumurthy et al., 2021, appendix B.1). The classes are random scribbles.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq
from equipoise.tasks.few_shot import FewShot

STEPS, TASKS, WAYS = 120, 64, 5
torch.manual_seed(0)

# %%
# A class is a path through five random points. Its images are drawn from shaken points, with a pen of random width.

grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij"), dim=-1)


def episodes(tasks, queries=3):
    """Return support images, their labels, query images, their labels: (tasks, images, ...)."""
    corners = (0.15 + 0.7 * torch.rand(tasks, 1, WAYS, 5, 2)).expand(-1, 1 + queries, -1, -1, -1)
    start, end = (corners + 0.035 * torch.randn(corners.shape)).unfold(3, 2, 1).unbind(-1)
    start, along = start[..., None, None, :], (end - start)[..., None, None, :]
    share = ((grid - start) * along).sum(-1) / along.square().sum(-1)
    distance = (grid - start - share.clamp(0, 1)[..., None] * along).norm(dim=-1).amin(dim=3)
    images = torch.exp(-((distance / (0.04 + 0.02 * torch.rand(tasks, 1 + queries, WAYS, 1, 1))) ** 2))
    images = images.flatten(1, 2)[:, :, None]
    labels = torch.arange(WAYS).repeat(tasks, 1 + queries)
    return images[:, :WAYS], labels[:, :WAYS], images[:, WAYS:], labels[:, WAYS:]


# %%
# Training makes the features of a class alike: query images are classified by the nearest class mean at x = 0
# (``steps=0``).

model = eq.create_model(
    "few-shot-mdeq", shape=(1, 16, 16), classes=WAYS, channels=(8, 16), groups=4, downsamplings=1, expansion=2,
    task_length=64, film_head=True,
)  # fmt: skip
model.equilibrium.gradient, model.equilibrium.on_failure = eq.PhantomGradient(steps=2), "ignore"
model.equilibrium.tolerance = eq.Tolerance(relative=1e-2, max_steps=12)
names = tuple("abcde")
warm_up = FewShot(names, steps=0, prototypes=1.0)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)
for _ in range(STEPS):
    loss, _ = warm_up.loss(model, episodes(8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

# %%
# Learning a new task is an optimisation of x: the mean cross entropy of its five images, with z, its adjoint and x
# moving together. Accuracy is that of images that were not seen.

model.eval().requires_grad_(False)
learner = FewShot(names, steps=20, step_size=4.0, penalty=2.0)
support, labels, query, answers = episodes(TASKS)
counts, accuracy = (0, 1, 2, 5, 10, 20), []
for steps in counts:
    x = learner.adapt(model, support, labels, steps)
    guesses = model(query, x).argmax(dim=-1)
    accuracy.append((guesses == answers).float().mean().item())
print({count: f"{share:.1%}" for count, share in zip(counts, accuracy, strict=True)})

figure = plt.figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subfigures(1, 2)
axis = left.subplots()
axis.plot(counts, accuracy, marker="o")
axis.axhline(1 / WAYS, color="0.5", linestyle="--")
axis.set(xlabel="joint steps", ylabel=f"accuracy, {TASKS} new tasks", ylim=(0, 1.02))
pictures = torch.cat([support[0], query[0, : 2 * WAYS]]).view(3, WAYS, 16, 16)
captions = [f"learn {name}" for name in names] + [f"says {names[guess]}" for guess in guesses[0, : 2 * WAYS]]
for axis, picture, caption in zip(right.subplots(3, WAYS).flat, pictures.flatten(0, 1), captions, strict=True):
    axis.imshow(picture.numpy(), cmap="gray_r")
    axis.set_title(caption, fontsize=8)
    axis.set(xticks=[], yticks=[])
plt.show()
