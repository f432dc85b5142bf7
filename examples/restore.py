"""
Restore an image
================

A generator is a prior: of all images it can make, find the one that agrees with what was measured. Joint inference
and input optimisation (JIIO; S. Gurumurthy et al., 2021) moves the latent vector and the equilibrium together, in one
loop. Here a generator of 8x8 digits, trained in seconds, fills in hidden pixels.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import equipoise as eq
from equipoise.tasks.latent_vectors import fit, squared_error
from equipoise.tasks.low_frequencies import low_frequencies
from equipoise.tasks.physics import GaussianNoise, Mask
from equipoise.tasks.restore_images import filled, restore

WARM_UP, STEPS = 120, 12
torch.manual_seed(0)

images = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1  # in [-1, 1]
train, test = images[:1500], images[1500:]

# %%
# Training starts with a warm-up, in which the latent vector of an image consists of its low spatial frequencies. Then
# it is found by joint steps (``fit``), and the weights are trained to lower the error that remains.

generator = eq.models.Generator(shape=(1, 8, 8), latent=16, channels=(8, 16), downsamplings=0, groups=4, expansion=2)
generator.equilibrium.tolerance = eq.Tolerance(relative=1e-2, max_steps=10)
generator.equilibrium.on_failure = "ignore"
optimizer = torch.optim.Adam(generator.parameters(), lr=3e-3)
for step in range(WARM_UP + STEPS):
    batch = train[torch.randint(len(train), (32,))]
    if step < WARM_UP:
        latent = low_frequencies(batch, 16)
    else:
        with torch.no_grad():
            latent = fit(generator, squared_error, batch, steps=10).x
    loss = (generator(latent) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step in (WARM_UP - 1, WARM_UP + STEPS - 1):
        print(f"step {step + 1}: mean squared error {loss.item():.3f}")

# %%
# A measurement operator has ``A`` and ``A_adjoint``, as in deepinv. This one hides a square of 4x4 pixels and adds
# noise. ``restore`` minimises ||y - A h(z)||^2 over the latent vector, subject to z = f(z, x).

truth = test[:8]
mask = torch.ones(8, 1, 8, 8)
mask[:, :, 2:6, 2:6] = 0
physics = Mask(mask, GaussianNoise(0.05, torch.Generator().manual_seed(1)))
measured = physics(truth)
restored, optimum = restore(generator.requires_grad_(False), measured, physics, steps=40)
print(optimum)

# %%
# Compare on the hidden pixels, where the measurement says nothing.

hidden = mask == 0
for name, guess in (("mean image", train.mean(dim=0).expand(8, -1, -1, -1)), ("restored", restored)):
    print(f"mean squared error on hidden pixels, {name}: {(guess - truth)[hidden].square().mean():.3f}")

rows = {
    "measured": torch.where(hidden, -1.0, measured),
    "restored": filled(restored, measured, physics),
    "truth": truth,
}
figure, axes = plt.subplots(3, 8, figsize=(9, 3.6), layout="constrained")
for line, (name, pictures) in zip(axes, rows.items(), strict=True):
    line[0].set_ylabel(name)
    for axis, picture in zip(line, pictures, strict=True):
        axis.imshow(picture[0].numpy(), cmap="gray", vmin=-1, vmax=1)
        axis.set(xticks=[], yticks=[])
plt.show()
