"""
Generate images
===============

A decoder-only generator (S. Gurumurthy et al., 2021) has no encoder: the latent vector of an image is found by joint
optimisation. A density fitted to the latent vectors of training images then gives new ones. Here the images are 8x8
digits, and everything is trained in seconds.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from sklearn.mixture import GaussianMixture

import equipoise as eq
from equipoise.tasks.latent_vectors import fit, squared_error
from equipoise.tasks.low_frequencies import low_frequencies

WARM_UP, STEPS, LATENTS = 120, 12, 200
torch.manual_seed(0)

images = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1  # in [-1, 1]

# %%
# The generator is trained as in the tutorial on restoring images: first on the low frequencies of the images as
# latent vectors, then on those that joint steps find.

generator = eq.models.Generator(shape=(1, 8, 8), latent=16, channels=(8, 16), downsamplings=0, groups=4, expansion=2)
generator.equilibrium.tolerance = eq.Tolerance(relative=1e-2, max_steps=10)
generator.equilibrium.on_failure = "ignore"
optimizer = torch.optim.Adam(generator.parameters(), lr=3e-3)
for step in range(WARM_UP + STEPS):
    batch = images[torch.randint(1500, (32,))]
    if step < WARM_UP:
        latent = low_frequencies(batch, 16)
    else:
        with torch.no_grad():
            latent = fit(generator, squared_error, batch, steps=10).x
    loss = (generator(latent) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
generator.eval().requires_grad_(False)

# %%
# The latent vectors of training images, found by joint steps from zero, and a Gaussian mixture of them. For larger
# generators ``equipoise sample`` fits a VAE in between, as the paper does.

latents = fit(generator, squared_error, images[:LATENTS], steps=30).x
density = GaussianMixture(20, covariance_type="diag", random_state=0).fit(latents.double().numpy())
drawn = torch.from_numpy(density.sample(12)[0]).float()
samples = generator(drawn)
print(f"reconstruction: mean squared error {(generator(latents) - images[:LATENTS]).square().mean():.3f}")
print(f"mean grey level of samples {samples.mean():.2f}, of digits {images.mean():.2f}")

# %%
# Between two latent vectors lie images of their own: a straight line from a test image to another.

ends = fit(generator, squared_error, images[[1510, 1520]], steps=40).x
line = generator(torch.lerp(ends[:1], ends[1:], torch.linspace(0, 1, 12)[:, None]))

rows = {"training": images[:12], "rebuilt": generator(latents[:12]), "samples": samples, "between": line}
figure, axes = plt.subplots(4, 12, figsize=(9, 3.3), layout="constrained")
for parts, (name, pictures) in zip(axes, rows.items(), strict=True):
    parts[0].set_ylabel(name)
    for axis, picture in zip(parts, pictures, strict=True):
        axis.imshow(picture[0].numpy(), cmap="gray", vmin=-1, vmax=1)
        axis.set(xticks=[], yticks=[])
plt.show()
