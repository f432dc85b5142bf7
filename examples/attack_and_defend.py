"""
Attack and defend
=================

An attack looks for a small change of an image that makes a classifier err. For an equilibrium classifier, projected
gradient descent (PGD) solves for the equilibrium and its gradient at every step; joint optimisation moves image,
equilibrium and adjoint in one loop, and needs a fraction of the evaluations of f. Training on attacked images
defends.
"""

import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq
from equipoise.tasks.joint_attack import jiio
from equipoise.tasks.robustness import pgd

EPOCHS, DEFENCE, TESTED = 8, 2, 200
torch.manual_seed(0)

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
order = torch.randperm(len(images))
train, test = order[:1500], order[1500 : 1500 + TESTED]


def fit(model, epochs, attack=None):
    """Train on clean images, or on what the attack makes of them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(100):
            given = images[batch] if attack is None else attack(model, images[batch], labels[batch])
            loss = nn.functional.cross_entropy(model(given), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


# %%
# The first model is trained on clean images. The second continues on images attacked by 15 joint steps within an L2
# ball of radius 0.8.

clean = fit(eq.create_model("conv-equilibrium", shape=(1, 8, 8), classes=10, channels=12), EPOCHS)
defended = fit(copy.deepcopy(clean), DEFENCE, lambda m, x, y: jiio(m, x, y, radius=0.8, norm="l2", steps=15))

# %%
# What an attack costs: every evaluation of f is counted by a forward hook on the cell.

count = 0


def counted(*_):
    global count
    count += 1


clean.equilibrium.f.register_forward_hook(counted)
for name, attack in {"PGD, 20 steps": pgd, "joint, 50 steps": jiio}.items():
    count, steps = 0, 20 if attack is pgd else 50
    changed = attack(clean, images[test], labels[test], radius=0.8, norm="l2", steps=steps)
    right = (clean(changed).argmax(dim=1) == labels[test]).float().mean()
    print(f"{name}: {count} evaluations of f, {right:.1%} of the images still classified correctly")

# %%
# Accuracy over the size of the attack, for both models, under PGD.

radii = [0.0, 0.4, 0.8, 1.2]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(2, 1))
for name, model in {"trained on clean images": clean, "trained on attacked images": defended}.items():
    accuracy = []
    for radius in radii:
        changed = pgd(model, images[test], labels[test], radius=radius, norm="l2", steps=10) if radius else images[test]
        accuracy.append((model(changed).argmax(dim=1) == labels[test]).float().mean().item())
    left.plot(radii, accuracy, marker="o", label=name)
    print(name, [f"{share:.1%}" for share in accuracy])
left.set(xlabel="L2 radius of the attack", ylabel="accuracy", ylim=(0, 1.02))
left.legend()
attacked = jiio(clean, images[test[:1]], labels[test[:1]], radius=0.8, norm="l2")
right.imshow(torch.cat([images[test[0], 0], attacked[0, 0]], dim=1).numpy(), cmap="gray")
right.set(
    title=f"a {labels[test[0]]}, and a {clean(attacked).argmax().item()} to the clean model", xticks=[], yticks=[]
)
plt.show()
