"""OptEq, POptEq, MOptEq: classifiers whose equilibrium is a stationary point of an explicit objective.

M. Li, Y. Wang, X. Xie, Z. Lin, "Optimization inspired multi-branch equilibrium models" (2022); OptEq: X. Xie et al.,
"Optimization induced equilibrium networks" (2021). For the map that is iterated and its objective see
:mod:`equipoise.models.opteq.branches`.

The paper's own wiring cannot be recovered: its parameter counts do not fit its numbers of channels (four dense 3x3
convolutions of 256 channels alone have 2.4M parameters, but the paper states 1.9M for the whole model), and no single
wiring reproduces all of them. The sizes here have the paper's parameter counts.
"""

from abc import ABC
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.fixed_point import Equilibrium, fixed_point, watch_solves
from equipoise.models.opteq.branches import Branches
from equipoise.models.opteq.ring import Images, Ring
from equipoise.models.opteq.theorems import Contraction, Verification, gradient_at, refuse_perturbed
from equipoise.models.parts.context_managers import changed, evaluating, keeping_statistics
from equipoise.models.parts.images import MEAN, STD, ImageClassifier, stem
from equipoise.models.parts.keyword_options import accepts, numbers_of, options_of, positional_of, require_counts, sized
from equipoise.options import options, require
from equipoise.problem.scope import Scope
from equipoise.solvers import Anderson
from equipoise.stability import spectral_radius
from equipoise.stability.norms import conv2d_norm_bound
from equipoise.tolerance import Tolerance

TOLERANCE = Tolerance(relative=1e-3, max_steps=60)
FUSIONS = ("none", "sum", "conv")


@options
class BranchSize:
    """The sizes of a model.

    Args:
        channels: channels of g and of every branch.
        scales: for each branch, the factor by which its resolution is lower than that of g.
        kernel, injection_kernel: sides of the convolutions W_i and U_i, odd.
        stem: number of 3x3 convolutions that make g, each with BatchNorm and ReLU.
        downsamplings: number of them that halve the image, starting with the first.
    """

    channels: int
    scales: tuple[int, ...] = (1, 1, 1)
    kernel: int = 3
    injection_kernel: int = 3
    stem: int = 2
    downsamplings: int = 0

    def __post_init__(self) -> None:
        require_counts(self, "scales", "branch")
        require(self, "channels", at_least=1, whole=True)
        require(self, "stem", at_least=1, whole=True)
        require(self, "downsamplings", at_least=0, at_most=self.stem, whole=True)


_FOUR: dict[str, Any] = {"scales": (1, 2, 4, 8), "injection_kernel": 1}
_LARGE_IMAGES: dict[str, Any] = {**_FOUR, "stem": 2, "downsamplings": 2}
SIZES = {  # named after the paper's parameter counts; "reduced" is for two cores
    "reduced": BranchSize(16),
    "single-193k": BranchSize(32, kernel=5, injection_kernel=5, stem=5),
    "multi-0.48m": BranchSize(108, stem=1, **_FOUR),
    "multi-1.9m": BranchSize(216, stem=1, **_FOUR),
    "multi-8.1m": BranchSize(448, stem=1, **_FOUR),
    "imagenette-1.9m": BranchSize(196, **_LARGE_IMAGES),
    "imagenette-10m": BranchSize(450, **_LARGE_IMAGES),
    "imagenet-13m": BranchSize(475, **_LARGE_IMAGES),
}


class BranchModel(ImageClassifier, ABC):
    """Stem g, branches at equilibrium, head: maps images in [0, 1] to logits.

    Args:
        shape, classes, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        size: key of ``SIZES``.
        ring: coupling of the branches.
        options: numbers that replace those of the size, see :class:`BranchSize`, and keyword options of
            :class:`~equipoise.models.opteq.branches.Branches`.
    """

    one_shape = "its branches have fixed sizes"

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        size: str = "single-193k",
        *,
        ring: Ring,
        **options: Any,
    ):
        super().__init__(shape, classes, mean, std)
        self.size = sized(SIZES, size, "OptEq", options)
        channels, scales, downsamplings = self.size.channels, self.size.scales, self.size.downsamplings
        height, width = (-(-n // 2**downsamplings) for n in shape[1:])
        if min(height, width) < max(scales):
            raise ValueError(f"scales is {scales}, and g has {height} x {width} pixels: a branch needs at least one.")
        self.stem = stem(shape[0], channels, self.size.stem, downsamplings)
        sizes = [(height // scale, width // scale) for scale in scales]
        options |= {"kernel": self.size.kernel, "injection_kernel": self.size.injection_kernel}
        cell = Branches(channels, sizes, (channels, height, width), ring, **options)
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=Anderson(), tolerance=TOLERANCE)
        # z is small: W shrinks it twice, and the average over the image further. Without a norm the head hardly learns.
        self.norm = nn.BatchNorm1d(self.read_channels, affine=False)
        self.head = nn.Linear(self.read_channels, classes)

    @property
    def cell(self) -> Branches:
        return self.equilibrium.f  # type: ignore[return-value]

    @property
    def read_channels(self) -> int:
        """Number of features that the head reads."""
        return self.size.channels * len(self.size.scales)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Return g."""
        return self.stem(self.normalized(images))

    def injections(self, images: Tensor) -> tuple[Any, ...]:
        """Return the inputs of the equilibrium."""
        return self.cell.prepare(self.features(images))

    def classify(self, g: Tensor) -> Tensor:
        """Return the logits for g."""
        return self.read(self.branches(g))

    def branches(self, g: Tensor) -> Images:
        """Return z of every branch at the equilibrium."""
        with Scope(g.shape[0]).entered():  # what prepares the solve shares its weights
            return self.equilibrium(*self.cell.prepare(g))

    def read(self, z: Images) -> Tensor:
        """Return the logits for z: a linear map of the branches' averages over the image, normalised."""
        averages = torch.cat([part.mean(dim=(2, 3)) for part in z], dim=1)
        if self.training and len(averages) == 1:  # a single image has no variance: use the running statistics
            return self.head(F.batch_norm(averages, self.norm.running_mean, self.norm.running_var, eps=self.norm.eps))
        return self.head(self.norm(averages))

    def objective(self, z: Images, images: Tensor) -> Tensor:
        """Return G of each image at its equilibrium z, (batch,), from y = s(W h(z) + x), which is W^-T z there.

        Call it in the mode, training or evaluation, in which z was computed: g depends on it.

        Example:
            >>> z = model.branches(model.features(images))
            >>> model.objective(z, images)
        """
        refuse_perturbed(self.cell)
        self.cell.check(z, len(images))
        with keeping_statistics(self.stem):
            inputs = self.cell.prepare(self.features(images))
        return self.cell.objective(self.cell.lift(z, *inputs), *inputs)

    def verify(self, images: Tensor, relative: float | None = None) -> Verification:
        """Check proposition 1: solve, by default to 100 rounding units, and measure the gradient of G there.

        Example:
            >>> print(model.double().verify(images.double()))
        """
        layer, cell = self.equilibrium, self.cell
        refuse_perturbed(cell)
        rounding = torch.finfo(next(self.parameters()).dtype).eps
        tolerance = Tolerance(relative=100 * rounding if relative is None else relative, max_steps=500)
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.stem):
            inputs = cell.prepare(self.features(images))
            options = {"solver": layer.solver, "tolerance": tolerance, "on_failure": layer.on_failure}
            solution = fixed_point(cell, cell.start, *inputs, **options)
            y = cell.lift(solution.value, *inputs)
            gradient, part = (
                torch.linalg.vector_norm(torch.cat([branch.flatten(1) for branch in branches], dim=1), dim=1)
                for branches in gradient_at(cell, solution.value, y, *inputs[1:])
            )
            relative_gradient = gradient / torch.where(part == 0, 1.0, part)
            return Verification(solution.stats.residual, cell.objective(y, *inputs), relative_gradient)

    def certificate(self, images: Tensor | None = None) -> Contraction:
        """Return what is proven about the convergence of T, and what is measured at the equilibria of the images."""
        cell, ring, radius = self.cell, self.cell.ring, None
        with torch.inference_mode(False), torch.no_grad(), evaluating(self.stem):
            norm = max(
                float(conv2d_norm_bound(W.weight(size).double(), size, iterations=12))  # type: ignore[operator]
                for W, size in zip(cell.W, cell.sizes, strict=True)
            )
            if images is not None and len(images):
                inputs = cell.prepare(self.features(images))
                radius = float(spectral_radius(cell, self.equilibrium.solve(*inputs).value, *inputs).max())
        factor = norm**2 * (1 + ring.diversity * (cell.channels - 1))
        jumps = cell.perturbed or (ring.diversity > 0 and not ring.smooth)
        return Contraction(norm, factor, ring.diversity == 0 and not jumps and factor < 1, radius, jumps)


IMAGES_AND_SIZE = positional_of(BranchModel)


class OptEq(BranchModel):
    """One branch: z = W^T s(W z + U g + b) (eq. 1), the minimum of a convex G (eq. 2).

    Args:
        shape, classes, mean, std, size: see :class:`BranchModel`; one branch of the size is built.
        channels, kernel, injection_kernel, stem, downsamplings: numbers of the size, see :class:`BranchSize`.
        bound, activation: see :class:`~equipoise.models.opteq.branches.Branches`.

    Example:
        >>> model = OptEq(shape=(3, 32, 32), classes=10, size="reduced")
        >>> print(model.verify(images))
    """

    @accepts(
        *IMAGES_AND_SIZE, *numbers_of(BranchSize, without=["scales"]), *options_of(Branches, "bound", "activation")
    )
    def __init__(self, *images_and_size: Any, **options: Any):
        super().__init__(*images_and_size, ring=Ring(heritage=False), scales=(1,), **options)


class POptEq(BranchModel):
    """Parallel branches, each an independent OptEq (eq. 10), combined after the equilibrium.

    Args:
        fusion: "none", "sum" of the branches, or "conv", a 3x3 convolution over the channels of all of them and a ReLU.
        scales: see :class:`BranchSize`. Other options are those of :class:`OptEq`.

    Example:
        >>> POptEq(shape=(3, 32, 32), classes=10, fusion="conv")
    """

    @accepts(*IMAGES_AND_SIZE, *numbers_of(BranchSize), *options_of(Branches, "bound", "activation"))
    def __init__(self, *images_and_size: Any, fusion: str = "none", **options: Any):
        self.fusion = fusion
        require(self, "fusion", among=FUSIONS)
        super().__init__(*images_and_size, ring=Ring(heritage=False), **options)
        scales = self.size.scales
        if fusion != "none" and len(set(scales)) > 1:
            raise ValueError(f"fusion is {fusion!r}, and the branches differ in size (scales {scales}): use 'none'.")
        width = self.size.channels * len(scales)
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
        heritage, diversity, sign, smoothing: see :class:`~equipoise.models.opteq.ring.Ring`.
        order, perturbation, perturb: see :class:`~equipoise.models.opteq.branches.Branches`; the last two belong to the
            Perturbation Enhanced strategy. Other options are those of :class:`POptEq` except for ``fusion``.

    Example:
        >>> model = MOptEq(shape=(3, 32, 32), classes=10, size="multi-0.48m", diversity=0.001, perturb="train")
    """

    @accepts(
        *IMAGES_AND_SIZE,
        *numbers_of(BranchSize),
        *options_of(Ring),
        *options_of(Branches, "bound", "activation", "order", "perturbation", "perturb"),
    )
    def __init__(self, *images_and_size: Any, diversity: float = 0.01, **options: Any):
        coupling = {field.name: options.pop(field.name) for field in fields(Ring) if field.name in options}
        super().__init__(*images_and_size, ring=Ring(diversity=diversity, **coupling), **options)

    def classify(self, g: Tensor) -> Tensor:
        """Return the logits for g.

        Branches that are perturbed only in training have different averages in evaluation, so the head's running
        statistics are computed from unperturbed branches, which takes one more solve, without gradients.
        """
        if not (self.cell.perturb == "train" and self.cell.perturbed and self.norm.training and len(g) > 1):
            return super().classify(g)
        # Neither watched nor hooked: it is not the solve that is trained.
        with torch.no_grad(), changed([(self.cell, "perturb", "off")]), watch_solves(), Scope(len(g)).entered():
            self.read(self.equilibrium.solve(*self.cell.prepare(g)).value)
        with keeping_statistics(self.norm):
            return super().classify(g)
