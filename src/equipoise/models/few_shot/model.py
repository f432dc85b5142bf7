"""A two-scale MDEQ classifier that a task vector adapts to new classes.

S. Gurumurthy, S. Bai, Z. Manchester, J. Z. Kolter, "Joint inference and input optimization in equilibrium networks"
(2021), appendices B.1 and C.2, with the wiring of the authors' code. The classes of a
task are encoded in its task vector x, which is found by minimising the loss of a few labelled images.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.fixed_point import Equilibrium
from equipoise.models.mdeq.cell import Film, MDEQSize, MultiscaleCell
from equipoise.models.mdeq.model import INITIAL_STD, initialise
from equipoise.models.parts.images import MEAN, STD, ImageClassifier
from equipoise.models.parts.keyword_options import accepts, numbers_of, sized
from equipoise.options import require
from equipoise.solvers import Anderson
from equipoise.tolerance import Tolerance

TOLERANCE = Tolerance(relative=1e-3, max_steps=18)
HEAD_FIELDS = ("head_channels", "final_channels")  # of MDEQSize, which this model's head does not have
SIZES = {
    "omniglot": MDEQSize((64, 128)),  # the paper's
    "omniglot-small": MDEQSize((16, 32), groups=4, downsamplings=1),
}


class TaskCell(nn.Module):
    """f(z, x, features): a :class:`MultiscaleCell` on all images of a task, modulated by the task vector x.

    z is a tuple of tensors (tasks, images, channels_i, height_i, width_i): the images of a task form one sample, since
    they share their x, (tasks, length). Each scale has an equal part of x, which a linear layer maps to a scale gamma
    and a shift beta of each of the widened channels (FiLM): gamma * norm1(...) + beta.

    Args:
        size: hyperparameters of the cell.
        task_length: length of x, a multiple of the number of scales.
        centred: whether gamma is 1 + its linear map instead of the map alone, which is the paper's.
        activation: see :class:`MultiscaleCell`.
    """

    def __init__(self, size: MDEQSize, task_length: int, centred: bool, activation: str = "relu"):
        super().__init__()
        self.scales = MultiscaleCell(size, activation)
        self.centred, self.part = centred, task_length // size.scales
        self.films = nn.ModuleList(nn.Linear(self.part, 2 * int(size.expansion * c)) for c in size.channels)

    def forward(self, z: tuple[Tensor, ...], x: Tensor, features: Tensor) -> tuple[Tensor, ...]:
        tasks, images = features.shape[:2]
        films = self.modulation(x, images)
        outputs = self.scales(tuple(part.flatten(0, 1) for part in z), (features.flatten(0, 1),), films)
        return tuple(part.unflatten(0, (tasks, images)) for part in outputs)

    def modulation(self, x: Tensor, images: int) -> list[Film]:
        """Return gamma and beta of each scale for every image of every task."""
        films: list[Film] = []
        for film, part in zip(self.films, x.split(self.part, dim=1), strict=True):
            both = film(part).repeat_interleave(images, dim=0)[:, :, None, None]
            gamma, beta = both.chunk(2, dim=1)
            films.append((1 + gamma if self.centred else gamma, beta))
        return films

    def start(self, x: Tensor, features: Tensor) -> tuple[Tensor, ...]:
        """Return the initial z: zeros."""
        flat = self.scales.start((features.flatten(0, 1),))
        return tuple(part.unflatten(0, features.shape[:2]) for part in flat)


class FewShotMDEQ(ImageClassifier):
    """Stem, multiscale equilibrium modulated by a task vector, linear head: maps images in [0, 1] to logits.

    Args:
        shape, mean, std: see :class:`~equipoise.models.parts.images.ImageClassifier`.
        classes: number of classes of a task.
        size: key of ``SIZES``.
        task_length: length of the task vector; each scale gets an equal part.
        centred: whether FiLM scales by 1 + its linear map of the task vector, so that the task vector 0 modulates
            little; False is the paper's.
        film_head: whether the task vector also scales what the head's linear layer reads, one number per feature, which
            is 0 at x = 0: x selects features of each class without going through the equilibrium, and given z the inner
            problem is logistic regression. False is the paper's.
        pool: side of the grid to which the head averages features of the first scale; it halves with every further
            scale. The paper's 28 x 28 images are averaged over squares of 7 x 7, to 4 x 4 and 2 x 2.
        activation: activation of f, see :class:`~equipoise.models.mdeq.cell.MultiscaleCell`.
        numbers: fields of :class:`~equipoise.models.mdeq.cell.MDEQSize` that replace those of the size.

    Example:
        >>> model = FewShotMDEQ(shape=(1, 28, 28), classes=5, size="omniglot-small")
        >>> x = model.blank(tasks=8)
        >>> model(torch.rand(8, 10, 1, 28, 28), x).shape
        torch.Size([8, 10, 5])
    """

    @accepts(*numbers_of(MDEQSize, without=HEAD_FIELDS))
    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int,
        mean: Sequence[float] = MEAN,
        std: Sequence[float] = STD,
        size: str = "omniglot-small",
        task_length: int = 400,
        centred: bool = True,
        film_head: bool = False,
        pool: int = 4,
        activation: str = "relu",
        **numbers: Any,
    ):
        super().__init__(shape, classes, mean, std)
        self.size = sized(SIZES, size, "FewShotMDEQ", numbers)
        self.task_length, self.centred, self.film_head, self.pool = task_length, centred, film_head, pool
        require(self, "task_length", at_least=1, whole=True)
        require(self, "centred", kind=bool)
        require(self, "film_head", kind=bool)
        require(self, "pool", at_least=1, whole=True)
        size_ = self.size
        if task_length % size_.scales:
            raise ValueError(
                f"task_length is {task_length}; it must be a multiple of {size_.scales}, the number of scales, which "
                "share it equally."
            )
        size_.require_fit(shape[1:], "Resize them, or choose fewer scales or downsamplings.")
        self.stem = stem(shape[0], size_)
        cell = TaskCell(size_, task_length, centred, activation)
        self.equilibrium = Equilibrium(cell, initial=cell.start, solver=Anderson(), tolerance=TOLERANCE)
        self.head = TaskHead(size_, pool, classes, task_length if film_head else 0)
        initialise(self)
        if self.head.film is not None:  # x starts as the scales of the features, and moves f little
            nn.init.orthogonal_(self.head.film.weight)
            nn.init.zeros_(self.head.classify.bias)
            with torch.no_grad():  # equal sizes, random signs: every class reads all features equally
                self.head.classify.weight.sign_().mul_(self.head.classify.in_features**-0.5)
            for film in cell.films:
                nn.init.normal_(film.weight, std=INITIAL_STD)  # type: ignore[arg-type]

    @property
    def cell(self) -> TaskCell:
        assert isinstance(self.equilibrium.f, TaskCell)
        return self.equilibrium.f

    def blank(self, tasks: int) -> Tensor:
        """Return the task vectors to start from, zeros."""
        parameter = next(self.parameters())
        return torch.zeros(tasks, self.task_length, dtype=parameter.dtype, device=parameter.device)

    def features(self, images: Tensor) -> Tensor:
        """Return the input of the equilibrium, (tasks, images, channels, height, width)."""
        if images.dim() != 5 or tuple(images.shape[2:]) != self.shape:
            raise ValueError(
                f"images have shape {tuple(images.shape)}; it must be (tasks, images per task, "
                f"{', '.join(map(str, self.shape))})."
            )
        return self.stem(self.normalize(images.flatten(0, 1))).unflatten(0, images.shape[:2])

    def embedding(self, images: Tensor) -> Tensor:
        """Return the features (tasks, images, numbers) of images, before the linear layer, at the task vector 0."""
        return self.head.pooled(self.equilibrium(self.blank(len(images)), self.features(images)))

    def forward(self, images: Tensor, x: Tensor) -> Tensor:
        """Return the logits (tasks, images, classes) of all images of tasks with the vectors x, (tasks, length)."""
        if x.shape != (len(images), self.task_length):
            raise ValueError(
                f"x has shape {tuple(x.shape)}; it must be (tasks, task_length) = ({len(images)}, {self.task_length})."
            )
        return self.head(self.equilibrium(x, self.features(images)), x)


class TaskHead(nn.Module):
    """Map z, (tasks, images, channels_i, height_i, width_i), to logits: norm, average pooling, one linear layer.

    With a ``task_length``, features are scaled by a linear map of the task vector x.
    """

    def __init__(self, size: MDEQSize, pool: int, classes: int, task_length: int = 0):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(size.groups, c) for c in size.channels)
        self.grids = [max(1, pool >> i) for i in range(size.scales)]
        width = sum(c * side**2 for c, side in zip(size.channels, self.grids, strict=True))
        self.film = nn.Linear(task_length, width, bias=False) if task_length else None
        self.classify = nn.Linear(width, classes)

    def pooled(self, z: tuple[Tensor, ...]) -> Tensor:
        """Return the features (tasks, images, numbers) that the linear layer maps to logits."""
        parts = []
        for norm, side, part in zip(self.norms, self.grids, z, strict=True):
            parts.append(nn.functional.adaptive_avg_pool2d(norm(part.flatten(0, 1)), side).flatten(1))
        return torch.cat(parts, dim=1).unflatten(0, z[0].shape[:2])

    def forward(self, z: tuple[Tensor, ...], x: Tensor) -> Tensor:
        features = self.pooled(z)
        return self.classify(features if self.film is None else features * self.film(x)[:, None])


def stem(inputs: int, size: MDEQSize) -> nn.Sequential:
    """Return 3x3 convolutions with GroupNorm and ReLU: one of stride 1, or as many of stride 2 as downsamplings."""
    layers: list[nn.Module] = []
    for i in range(max(1, size.downsamplings)):
        stride = 2 if size.downsamplings else 1
        conv = nn.Conv2d(size.channels[0] if i else inputs, size.channels[0], 3, stride=stride, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(size.groups, size.channels[0]), nn.ReLU()]
    return nn.Sequential(*layers)
