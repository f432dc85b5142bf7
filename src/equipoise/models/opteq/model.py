"""OptEq, POptEq, MOptEq: classifiers whose equilibrium is a stationary point of an objective that can be written down.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022); OptEq: X. Xie et al.,
"Optimization induced equilibrium networks" (2021). What is solved stands in :mod:`equipoise.models.opteq.branches`.

The paper's own wiring cannot be recovered: its counts of parameters do not fit its numbers of channels (four dense 3x3
convolutions of 256 channels alone have 2.4M parameters, and the whole model is said to have 1.9M), and no one wiring
gives all of them. The sizes here have the paper's counts.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.fixed_point import Equilibrium, watch_solves
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.contraction import Contraction, contraction_of
from equipoise.models.opteq.ring import Images, Ring
from equipoise.models.opteq.stationarity import Verification, refuse_perturbed, verification_of
from equipoise.models.parts.normalize import Normalize
from equipoise.models.parts.sizes import sized
from equipoise.models.parts.stem import stem
from equipoise.models.parts.temporary import forgetful, unperturbed
from equipoise.options import require, require_images
from equipoise.problem.scope import Scope
from equipoise.solvers import Anderson
from equipoise.tolerance import Tolerance

TOLERANCE = Tolerance(relative=1e-3, max_steps=60)
FUSIONS = ("none", "sum", "conv")


@dataclass(frozen=True)
class Size:
    """The numbers that make a model.

    Args:
        channels: of g and of every branch.
        scales: for each branch, by what its resolution is lower than that of g.
        kernel, injection_kernel: sides of the convolutions W_i and U_i, odd.
        stem: 3x3 convolutions that make g, each with BatchNorm and ReLU.
        downsamplings: how many of them, from the first on, halve the image.
    """

    channels: int
    scales: tuple[int, ...] = (1, 1, 1)
    kernel: int = 3
    injection_kernel: int = 3
    stem: int = 2
    downsamplings: int = 0

    def __post_init__(self) -> None:
        scales = self.scales
        if not (isinstance(scales, tuple | list) and scales and all(type(s) is int and s >= 1 for s in scales)):
            raise ValueError(
                f"scales is {scales!r}; it must be a list of whole numbers of at least 1, one for each branch."
            )
        object.__setattr__(self, "scales", tuple(scales))
        require(self, "channels", at_least=1, whole=True)
        require(self, "stem", at_least=1, whole=True)
        require(self, "downsamplings", at_least=0, at_most=self.stem, whole=True)


_FOUR: dict[str, Any] = {"scales": (1, 2, 4, 8), "injection_kernel": 1}
_LARGE_IMAGES: dict[str, Any] = {**_FOUR, "stem": 2, "downsamplings": 2}
SIZES = {  # by the paper's counts of parameters; "reduced" is for two cores
    "reduced": Size(16),
    "single-193k": Size(32, kernel=5, injection_kernel=5, stem=5),
    "multi-0.48m": Size(108, stem=1, **_FOUR),
    "multi-1.9m": Size(216, stem=1, **_FOUR),
    "multi-8.1m": Size(448, stem=1, **_FOUR),
    "imagenette-1.9m": Size(196, **_LARGE_IMAGES),
    "imagenette-10m": Size(450, **_LARGE_IMAGES),
    "imagenet-13m": Size(475, **_LARGE_IMAGES),
}


class BranchModel(nn.Module, ABC):
    """Stem g, branches at equilibrium, head: images in [0, 1] to logits. ``options`` are those of :class:`Branches`."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float],
        std: Sequence[float],
        size: Size,
        ring: Ring,
        **options: Any,
    ):
        super().__init__()
        require_images(shape, classes, mean)
        self.shape, self.size = tuple(shape), size
        grid = tuple(-(-n // 2**size.downsamplings) for n in shape[1:])
        if min(grid) < max(size.scales):
            raise ValueError(f"scales is {size.scales}, and g has {grid[0]} x {grid[1]} pixels: a branch needs one.")
        self.normalize = Normalize(mean, std)
        self.stem = stem(shape[0], size.channels, size.stem, size.downsamplings)
        cell = Branches(
            size.channels,
            [(grid[0] // scale, grid[1] // scale) for scale in size.scales],
            (size.channels, *grid),
            ring,
            kernel=size.kernel,
            injection_kernel=size.injection_kernel,
            **options,
        )
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=Anderson(), tolerance=TOLERANCE)
        # z is small: W shrinks it twice, and an average over the image more. Without this a head hardly learns.
        self.norm = nn.BatchNorm1d(self.read_channels, affine=False)
        self.head = nn.Linear(self.read_channels, classes)

    @property
    def cell(self) -> Branches:
        return self.equilibrium.f  # type: ignore[return-value]

    @property
    def read_channels(self) -> int:
        """How many numbers the head reads."""
        return self.size.channels * len(self.size.scales)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """g."""
        normalized = self.normalize(images)
        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(
                f"images have shape {tuple(images.shape[1:])}; this model was made for {self.shape}: its branches have "
                "fixed sizes. Resize the images, or make a model for their shape."
            )
        return self.stem(normalized)

    def classify(self, g: Tensor) -> Tensor:
        """Logits, from g on."""
        return self.read(self.branches(g))

    def branches(self, g: Tensor) -> Images:
        """z of every branch at the equilibrium."""
        with Scope(len(g)).entered():  # what prepares the solve shares its weights
            return self.equilibrium(*self.cell.prepare(g))

    def read(self, z: Images) -> Tensor:
        """Logits, from z on: the branches' averages over the image, normalised and weighed."""
        seen = torch.cat([part.mean(dim=(2, 3)) for part in z], dim=1)
        if self.training and len(seen) == 1:  # a single image has no variance: by what was seen before it
            return self.head(F.batch_norm(seen, self.norm.running_mean, self.norm.running_var, eps=self.norm.eps))
        return self.head(self.norm(seen))

    def objective(self, z: Images, images: Tensor) -> Tensor:
        """G of each image at its equilibrium z, (batch,): from y = s(W h(z) + x), which there is W^-T z.

        In the mode, training or evaluation, in which z was solved for: g depends on it.

        Example:
            >>> z = model.branches(model.features(images))
            >>> model.objective(z, images)
        """
        refuse_perturbed(self.cell)
        self.cell.check(z, len(images))
        with forgetful(self.stem):
            inputs = self.cell.prepare(self.features(images))
        return self.cell.objective(self.cell.lift(z, *inputs), *inputs)

    def verify(self, images: Tensor, relative: float | None = None) -> Verification:
        """Solve for these images and check proposition 1: the gradient of G there, by how much it is not zero.

        Args:
            images: a batch.
            relative: tolerance of the solve; None is a hundred rounding units.

        Example:
            >>> print(model.double().verify(images.double()))
        """
        return verification_of(self, images, relative)

    def certificate(self, images: Tensor | None = None) -> Contraction:
        """What is proven of the convergence of T, and where nothing is, what is measured at the equilibria of images.

        Example:
            >>> print(model.certificate(images))
        """
        return contraction_of(self, images)


class OptEq(BranchModel):
    """One branch: z = W^T s(W z + U g + b) (eq. 1), the minimum of a convex G (eq. 2).

    Args:
        shape: of one image, (channels, height, width).
        classes: how many.
        mean, std: of the images per channel.
        size: a name of ``SIZES``, of which a single branch is taken; every number of it can be given by itself as well:
        channels, kernel, injection_kernel, stem, downsamplings: see :class:`Size`; None is as the size says.
        bound, activation: see :class:`~equipoise.models.opteq.branches.Branches`.

    Example:
        >>> model = OptEq(shape=(3, 32, 32), classes=10, size="reduced")
        >>> print(model.verify(images))
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        size: str = "single-193k",
        channels: int | None = None,
        kernel: int | None = None,
        injection_kernel: int | None = None,
        stem: int | None = None,
        downsamplings: int | None = None,
        bound: float = 0.9,
        activation: Any = "relu",
    ):
        chosen = sized(
            SIZES,
            size,
            "OptEq",
            channels=channels,
            scales=(1,),
            kernel=kernel,
            injection_kernel=injection_kernel,
            stem=stem,
            downsamplings=downsamplings,
        )
        ring = Ring(heritage=False)
        super().__init__(shape, classes, mean, std, chosen, ring, bound=bound, activation=activation)


class POptEq(BranchModel):
    """Parallel branches, each an OptEq of its own (eq. 10), brought together after the equilibrium.

    Args:
        shape, classes, mean, std, size, channels, kernel, injection_kernel, stem, downsamplings, bound, activation: as
            of :class:`OptEq`.
        scales: see :class:`Size`.
        fusion: "none", "sum" of the branches, or "conv", a 3x3 convolution over the channels of all of them and a ReLU.

    Example:
        >>> POptEq(shape=(3, 32, 32), classes=10, fusion="conv")
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        size: str = "single-193k",
        channels: int | None = None,
        scales: Sequence[int] | None = None,
        kernel: int | None = None,
        injection_kernel: int | None = None,
        stem: int | None = None,
        downsamplings: int | None = None,
        fusion: str = "none",
        bound: float = 0.9,
        activation: Any = "relu",
    ):
        if fusion not in FUSIONS:
            raise ValueError(f"fusion is {fusion!r}; allowed: {', '.join(map(repr, FUSIONS))}.")
        self.fusion = fusion
        chosen = sized(
            SIZES,
            size,
            "OptEq",
            channels=channels,
            scales=scales,
            kernel=kernel,
            injection_kernel=injection_kernel,
            stem=stem,
            downsamplings=downsamplings,
        )
        ring = Ring(heritage=False)
        super().__init__(shape, classes, mean, std, chosen, ring, bound=bound, activation=activation)
        if fusion != "none" and len(set(self.size.scales)) > 1:
            raise ValueError(
                f"fusion is {fusion!r}, and the branches differ in size (scales {self.size.scales}): use 'none'."
            )
        width = self.size.channels * len(self.size.scales)
        self.fuse = nn.Conv2d(width, width, 3, padding=1, bias=False) if fusion == "conv" else None

    @property
    def read_channels(self) -> int:
        return self.size.channels if self.fusion == "sum" else super().read_channels

    def read(self, z: Images) -> Tensor:
        if self.fusion == "sum":
            z = (torch.stack(z).sum(dim=0),)
        elif self.fuse is not None:
            z = (torch.relu(self.fuse(torch.cat(z, dim=1))),)
        return super().read(z)


class MOptEq(BranchModel):
    """Branches on a ring, coupled inside the equilibrium by hierarchical heritage and diversity (eq. 5, 6).

    Args:
        shape, classes, mean, std, size, channels, scales, kernel, injection_kernel, stem, downsamplings, bound,
            activation: as of :class:`POptEq`.
        heritage, diversity, sign, smoothing: see :class:`~equipoise.models.opteq.ring.Ring`.
        order, perturbation, perturb: see :class:`~equipoise.models.opteq.branches.Branches`; the last two are of the
            Perturbation Enhanced strategy.

    Example:
        >>> model = MOptEq(shape=(3, 32, 32), classes=10, size="multi-0.48m", diversity=0.001, perturb="train")
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.5,),
        size: str = "single-193k",
        channels: int | None = None,
        scales: Sequence[int] | None = None,
        kernel: int | None = None,
        injection_kernel: int | None = None,
        stem: int | None = None,
        downsamplings: int | None = None,
        heritage: bool = True,
        diversity: float = 0.01,
        sign: str = "smooth",
        smoothing: float = 0.05,
        bound: float = 0.9,
        activation: Any = "relu",
        order: str = "gauss-seidel",
        perturbation: float = 0.1,
        perturb: str = "off",
    ):
        chosen = sized(
            SIZES,
            size,
            "OptEq",
            channels=channels,
            scales=scales,
            kernel=kernel,
            injection_kernel=injection_kernel,
            stem=stem,
            downsamplings=downsamplings,
        )
        ring = Ring(heritage=heritage, diversity=diversity, sign=sign, smoothing=smoothing)
        super().__init__(
            shape,
            classes,
            mean,
            std,
            chosen,
            ring,
            bound=bound,
            activation=activation,
            order=order,
            perturbation=perturbation,
            perturb=perturb,
        )

    def classify(self, g: Tensor) -> Tensor:
        """Logits, from g on.

        Branches that are perturbed in training only have averages in evaluation that the head has not seen: what it
        normalises by then is gathered from unperturbed ones, which takes one more solve, without gradients.
        """
        if not (self.cell.perturb == "train" and self.cell.perturbed and self.norm.training and len(g) > 1):
            return super().classify(g)
        # Neither watched nor hooked: it is not the solve that is trained.
        with torch.no_grad(), unperturbed(self.cell), watch_solves(), Scope(len(g)).entered():
            self.read(self.equilibrium.solve(*self.cell.prepare(g)).value)
        with forgetful(self.norm):
            return super().classify(g)
