"""Inputs of mean zero and variance one, as a layer: a saved model takes plain images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from equipoise.options import require_sequence_of_numbers


class Normalize(nn.Module):
    """(x - mean) / std per channel.

    Example:
        >>> Normalize(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        require_sequence_of_numbers("mean", mean)
        require_sequence_of_numbers("std", std)
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(f"mean is {tuple(mean)} and std is {tuple(std)}; as many of each, and every std above 0.")
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise TypeError(f"images are {x.dtype}; they must be numbers in [0, 1]: images.float() / 255.")
        if torch.promote_types(x.dtype, self.mean.dtype) != self.mean.dtype:
            raise TypeError(f"images are {x.dtype}, and the model is {self.mean.dtype}: images.to({self.mean.dtype}).")
        if x.dim() != 4 or len(self.mean) not in (1, x.shape[1]):
            channels = len(self.mean) if len(self.mean) > 1 else "channels"
            raise ValueError(
                f"images have shape {tuple(x.shape)}; it must be (batch, {channels}, height, width), also of one image."
            )
        return (x - self.mean) / self.std
