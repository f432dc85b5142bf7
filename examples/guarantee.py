"""
A classifier with a guarantee
=============================

A monDEQ (E. Winston, J. Z. Kolter, 2020) has exactly one equilibrium for every input, whatever its weights. The same
property bounds how far a change of the image can move the logits: within a certified radius, no attack can change the
predicted class. This script trains one on 8x8 digits and compares the guarantee with real attacks.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq
from equipoise.models.mondeq.certificate import Certifier
from equipoise.tasks.robustness import pgd

EPOCHS = 15
torch.manual_seed(0)

# %%
# The model is a published one; ``kind="dense"`` is a fully connected layer z* = relu(W z* + U x + b).

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
order = torch.randperm(len(images))
train, test = order[:1400], order[1400:]

model = eq.models.MonDEQ(shape=(1, 8, 8), classes=10, kind="dense", channels=40)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=3e-3)
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(100):
        noisy = images[batch] + 0.2 * torch.randn_like(images[batch])  # noise makes the margins larger
        loss = nn.functional.cross_entropy(model(noisy), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %%
# The certificate follows from the weights alone. ``m`` bounds I - W from below; the rate is that of the splitting
# solver.

model.eval().requires_grad_(False)
print(model.certificate())

# %%
# The certified radius of an image grows with the margin of its logits. Wrong predictions count as radius zero here.

verdict = Certifier(model)(images[test])
radius = torch.where(verdict.classes == labels[test], verdict.radii, 0.0)
print(f"accuracy {(radius > 0).float().mean():.1%}, median certified radius {radius.median():.3f}")

# %%
# Projected gradient descent looks for changes of a given norm that do fool the model. It can only succeed outside the
# certified radius: accuracy under attack never drops below certified accuracy.

radii = torch.linspace(0, 1.2, 9)
certified = [(radius > r).float().mean().item() for r in radii]
attacked = [certified[0]]
broken = 0
for r in radii[1:].tolist():
    changed = pgd(model, images[test], labels[test], radius=r, norm="l2", steps=10)
    right = model(changed).argmax(dim=1) == labels[test]
    attacked.append(right.float().mean().item())
    broken += int((~right & (radius > r)).sum())
print(f"attacks that succeeded inside the certified radius: {broken}")

figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
axis.plot(radii.numpy(), attacked, marker="o", label="under attack (PGD)")
axis.plot(radii.numpy(), certified, marker="s", label="certified")
axis.fill_between(radii.numpy(), certified, attacked, alpha=0.15)
axis.set(
    xlabel="L2 radius of the change", ylabel="accuracy", ylim=(0, 1.02), title="What is proven, and what was found"
)
axis.legend()
plt.show()
