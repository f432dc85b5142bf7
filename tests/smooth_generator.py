"""A generator small and smooth enough for finite differences: a contraction with a linear head."""

import torch
from torch import nn

import equipoise as eq
from equipoise.models.generator.model import Generator


class Cell(nn.Module):
    """f(z, x) = tanh(z W + x U + b) for two leaves, W a contraction."""

    def __init__(self, latent, sizes):
        super().__init__()
        self.sizes, total = sizes, sum(sizes)
        draws = torch.Generator().manual_seed(0)
        weight = torch.randn(total, total, generator=draws, dtype=torch.float64)
        self.weight = nn.Parameter(0.4 * weight / torch.linalg.matrix_norm(weight, 2))
        self.inject = nn.Parameter(0.5 * torch.randn(latent, total, generator=draws, dtype=torch.float64))
        self.bias = nn.Parameter(0.1 * torch.randn(total, generator=draws, dtype=torch.float64))

    def forward(self, z, x):
        flat = torch.tanh(torch.cat(z, dim=1) @ self.weight + x @ self.inject + self.bias)
        return tuple(flat.split(self.sizes, dim=1))

    def start(self, x):
        return tuple(x.new_zeros(len(x), size) for size in self.sizes)


class Head(nn.Module):
    """An image from both leaves."""

    def __init__(self, size, shape):
        super().__init__()
        draws = torch.Generator().manual_seed(1)
        pixels = torch.Size(shape).numel()
        self.weight = nn.Parameter(0.4 * torch.randn(size, pixels, generator=draws, dtype=torch.float64))
        self.shape = shape

    def forward(self, z):
        return torch.tanh(torch.cat(z, dim=1) @ self.weight).view(-1, *self.shape)


class SmoothGenerator(Generator):
    """A Generator with another cell and head, in float64."""

    def __init__(self, shape=(1, 4, 4), latent=2, sizes=(5, 3)):
        nn.Module.__init__(self)
        self.shape, self.latent = shape, latent
        cell = Cell(latent, sizes)
        tolerance = eq.Tolerance(relative=1e-10, max_steps=200)
        self.equilibrium = eq.Equilibrium(cell, initial=cell.start, tolerance=tolerance)
        self.image = Head(sum(sizes), shape)


def smooth_images(count=3, shape=(1, 4, 4), seed=0, noise=0.1):
    """Images that a SmoothGenerator can nearly make."""
    draws = torch.Generator().manual_seed(seed)
    generator = SmoothGenerator(shape)
    latents = 0.5 * torch.randn(count, generator.latent, generator=draws, dtype=torch.float64)
    with torch.no_grad():
        images = generator(latents)
    return (images + noise * torch.randn(images.shape, generator=draws, dtype=torch.float64)).clamp(-1, 1)
