"""A density of latent vectors, fitted after training, so that a generator without an encoder can be sampled.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), appendix C.3: standardise the latent vectors of training images, train a VAE on them, and fit a Gaussian mixture
to the means of its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.models.parts.gaussians import divergence, draw
from equipoise.options import option, options

HELD_OUT = 0.1  # fraction of the codes held out to choose the mixture by their likelihood
CHOICES = (1, 2, 5, 10, 20)  # numbers of components to choose from
FEWEST = 20  # smallest number of latent vectors that a density is fitted to
PER_DIMENSION = 10  # latent vectors per component and dimension that are enough for the published mixture


@options
class DensitySize:
    """Hyperparameters of a :class:`LatentDensity`.

    Args:
        latent: dimension of the latent vectors.
        code: dimension of the VAE's codes; the paper uses three times the latent dimension.
        width: width of the hidden layers.
        depth: number of hidden layers of the encoder, and of the decoder.
        components: number of components of the mixture.
        diagonal: whether the covariances are diagonal.
    """

    latent: int = option(default=128, at_least=1, whole=True)
    code: int = option(default=384, at_least=1, whole=True)
    width: int = option(default=2048, at_least=1, whole=True)
    depth: int = option(default=3, at_least=1, whole=True)
    components: int = option(default=20, at_least=1, whole=True)
    diagonal: bool = option(default=False, kind=bool)


class LatentDensity(nn.Module):
    """p(x): a Gaussian mixture of codes, decoded and scaled back to latent vectors; made by :func:`fit_density`.

    Example:
        >>> density = fit_density(latents)
        >>> images = generator(density.sample(64))
    """

    center: Tensor
    scale: Tensor
    shares: Tensor
    means: Tensor
    factors: Tensor

    def __init__(self, size: DensitySize):
        super().__init__()
        self.size = size
        hidden = [size.width] * size.depth
        self.encoder = perceptron([size.latent, *hidden, 2 * size.code])
        self.decoder = perceptron([size.code, *hidden, size.latent])
        shape = (size.components, size.code)
        self.register_buffer("center", torch.zeros(size.latent))
        self.register_buffer("scale", torch.ones(size.latent))
        self.register_buffer("shares", torch.full((size.components,), 1 / size.components))
        self.register_buffer("means", torch.zeros(shape))
        self.register_buffer(
            "factors", torch.ones(shape) if size.diagonal else torch.eye(size.code).repeat(shape[0], 1, 1)
        )

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance of the codes of latent vectors."""
        mean, log_variance = self.encoder((x - self.center) / self.scale).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, codes: Tensor) -> Tensor:
        """Return the latent vectors of codes."""
        return self.decoder(codes) * self.scale + self.center

    @torch.no_grad()
    def sample(self, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw latent vectors.

        Args:
            samples: number of latent vectors.
            generator: random generator, on the CPU.
        """
        component = torch.multinomial(self.shares.cpu(), samples, replacement=True, generator=generator)
        noise = torch.randn(samples, self.size.code, generator=generator).to(self.means)
        factors = self.factors[component.to(self.means.device)]
        noise = factors * noise if self.size.diagonal else torch.einsum("bij,bj->bi", factors, noise)
        return self.decode(self.means[component.to(self.means.device)] + noise)


def perceptron(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def fit_density(
    latents: Tensor,
    *,
    code: int | None = None,
    width: int | None = None,
    components: int | None = None,
    epochs: int | None = None,
    beta: float = 5e-4,
    lr: float = 1e-4,
    batch_size: int = 128,
    seed: int = 0,
    each: Callable[[int], object] | None = None,
) -> LatentDensity:
    """Fit a density to latent vectors.

    With many latent vectors the sizes are those of the paper: codes of three times the latent dimension, layers of
    2048, 20 Gaussians with full covariances. With few of them, the codes have the latent dimension, the layers are
    narrower, and the mixture is the one with the largest likelihood on a held-out tenth of the codes.

    Args:
        latents: (samples, latent dimension).
        code, width, components, epochs: None for the sizes above.
        beta: weight of the VAE's Kullback-Leibler term, relative to the mean squared error.
        lr: learning rate of Adam, halved after three epochs without progress.
        seed: seed of weights, order and noise.
        each: function called after each epoch with the number of epochs so far.
    """
    n, latent = latents.shape
    if n < FEWEST:
        raise ValueError(f"latents has {n} rows; it must have at least {FEWEST}, one per latent vector.")
    many = n >= PER_DIMENSION * (components or 20) * (code or 3 * latent)
    code = code or (3 * latent if many else latent)
    width = width or (2048 if many else 512)
    epochs = epochs or (20 if many else min(300, max(20, 2000 * batch_size // n)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = LatentDensity(DensitySize(latent=latent, code=code, width=width))
        vae = vae.to(latents)
        vae.center, vae.scale = latents.mean(dim=0), latents.std(dim=0).clamp(min=1e-6)
        train_vae(vae, latents, epochs, beta, lr, batch_size, each)
    with torch.no_grad():
        codes = vae.codes(latents)[0]
    if many:
        mixture = gaussian_mixture(components or 20, "full", seed).fit(codes.double().cpu().numpy())
    else:
        mixture = chosen_mixture(codes, components, seed)
    diagonal = mixture.covariance_type == "diag"
    size = DensitySize(latent=latent, code=code, width=width, components=mixture.n_components, diagonal=diagonal)
    density = LatentDensity(size).to(latents)
    density.load_state_dict({**vae.state_dict(), **mixture_tensors(mixture, latents)})
    return density.eval()


def train_vae(
    vae: LatentDensity,
    latents: Tensor,
    epochs: int,
    beta: float,
    lr: float,
    batch_size: int,
    each: Callable[[int], object] | None,
) -> None:
    """Minimise squared error + beta KL(codes, standard normal), in units of the standardised latent vectors."""
    optimizer = torch.optim.Adam([*vae.encoder.parameters(), *vae.decoder.parameters()], lr=lr)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    for epoch in range(epochs):
        total = 0.0
        for rows in torch.randperm(len(latents)).split(batch_size):
            x = latents[rows.to(latents.device)]
            mean, log_variance = vae.codes(x)
            codes = draw(mean, log_variance)
            error = ((vae.decode(codes) - x) / vae.scale).square().mean(dim=1)
            loss = (error + beta * divergence(mean, log_variance)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        schedule.step(total / len(latents))
        if each is not None:
            each(epoch + 1)


def gaussian_mixture(components: int, covariance: str, seed: int) -> Any:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(components, covariance_type=covariance, reg_covar=1e-4, random_state=seed)


def chosen_mixture(codes: Tensor, components: int | None, seed: int) -> Any:
    """Return the mixture with the largest likelihood on held-out codes, fitted to all of them."""
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(seed))
    values = codes.double().cpu()[order].numpy()
    held = max(1, int(HELD_OUT * len(codes)))
    best, choice = -torch.inf, (1, "diag")
    for count in (components,) if components else CHOICES:
        for covariance in ("full", "diag"):
            needed = count * (codes.shape[1] if covariance == "full" else 2)
            if needed <= len(codes) - held or (count == (components or 1) and covariance == "diag"):
                score = gaussian_mixture(count, covariance, seed).fit(values[held:]).score(values[:held])
                if score > best:
                    best, choice = score, (count, covariance)
    return gaussian_mixture(*choice, seed).fit(values)


def mixture_tensors(mixture: Any, like: Tensor) -> dict[str, Tensor]:
    """Return a fitted mixture as buffers of a density."""
    covariances = torch.from_numpy(mixture.covariances_)
    factors = covariances.sqrt() if mixture.covariance_type == "diag" else torch.linalg.cholesky(covariances)
    shares, means = (torch.from_numpy(values) for values in (mixture.weights_, mixture.means_))
    return {name: t.to(like) for name, t in (("shares", shares), ("means", means), ("factors", factors))}
