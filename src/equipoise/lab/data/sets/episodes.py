"""Episodes: small classification tasks made of Omniglot's characters, for learning from few examples."""

import copy
import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from equipoise.lab.data.base import Batch, DataSet, Split, TensorSplit
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.sets.folders import omniglot
from equipoise.options import require_number

SPLITS = ("official", "random")
RANDOM_TRAIN = 1200 / 1623  # share of the characters that the random split trains on
HELD_OUT = 1 / 11  # share of the training characters used for validation: 100 of 1100 in the random split


class Episodes(Split):
    """Classification tasks drawn at random, each from the seed and its own index alone; every epoch has new ones.

    Sample i is ``(support, support labels, query, query labels)``: ``ways`` classes drawn without replacement, labelled
    0 to ways - 1 in the order in which they were drawn, with ``shots`` drawings each to learn from and ``queries``
    other drawings each to classify; images are uint8 (ways * shots or ways * queries, channels, height, width).

    Args:
        drawings: images of every class, uint8 (classes, drawings, channels, height, width).
        episodes: number of episodes.
        ways, shots, queries: see above.
        rotations: whether drawings rotated by 90, 180 and 270 degrees are further classes.
        seed: seed of all episodes.
        part: name of the split, for errors.

    Example:
        >>> split = Episodes(drawings, episodes=1000, ways=5, shots=1, queries=5)
        >>> support, labels, query, query_labels = split.read(torch.arange(8))
    """

    def __init__(
        self,
        drawings: Tensor,
        episodes: int,
        ways: int,
        shots: int,
        queries: int,
        rotations: bool = False,
        seed: int = 0,
        part: str = "",
    ):
        self.drawings, self.episodes, self.rotations, self.seed = drawings, episodes, rotations, seed
        self.ways, self.shots, self.queries, self.first = ways, shots, queries, 0
        for name in ("episodes", "ways", "shots", "queries"):
            require_number(f"data.{name}", getattr(self, name), at_least=2 if name == "ways" else 1, whole=True)
        if type(rotations) is not bool:
            raise TypeError(f"data.rotations is {rotations!r}; it must be true or false.")
        characters, each = drawings.shape[:2]
        if ways > self.classes:
            rotated = " in 4 rotations" if rotations else ""
            raise ValueError(
                f"data.ways is {ways}; it must be at most {self.classes}: the {part or 'split'} characters are "
                f"{characters}{rotated}."
            )
        if shots + queries > each:
            raise ValueError(
                f"data.shots + data.queries is {shots} + {queries} = {shots + queries}; it must be at most "
                f"{each}, the number of drawings of a character."
            )

    @property
    def classes(self) -> int:
        return len(self.drawings) * (4 if self.rotations else 1)

    def __len__(self) -> int:
        return self.episodes

    def in_epoch(self, epoch: int) -> Split:
        fresh = copy.copy(self)
        fresh.first = epoch * self.episodes
        return fresh

    def read(self, rows: Tensor) -> Batch:
        episodes = [self.episode(self.first + row) for row in rows.tolist()]
        support, query = (torch.stack(images) for images in zip(*episodes, strict=True))
        labels = torch.arange(self.ways)
        return (
            support,
            labels.repeat_interleave(self.shots).expand(len(rows), -1).clone(),
            query,
            labels.repeat_interleave(self.queries).expand(len(rows), -1).clone(),
        )

    def episode(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the support and the query images of one episode."""
        digest = hashlib.sha256(f"{self.seed} {index}".encode()).digest()  # a generator uses 32 bits of its seed
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
        chosen = torch.randperm(self.classes, generator=generator)[: self.ways].tolist()
        support, query = [], []
        for number in chosen:
            turns, character = divmod(number, len(self.drawings))
            order = torch.randperm(self.drawings.shape[1], generator=generator)[: self.shots + self.queries]
            images = torch.rot90(self.drawings[character, order], turns, dims=(2, 3))
            support.append(images[: self.shots])
            query.append(images[self.shots :])
        return torch.cat(support), torch.cat(query)


def omniglot_episodes(
    places: Places,
    ways: int = 5,
    shots: int = 1,
    queries: int = 5,
    size: int = 28,
    split: str = "random",
    rotations: bool = True,
    episodes: int = 20000,
    val_episodes: int = 200,
    test_episodes: int = 1000,
    seed: int = 0,
    train_queries: int | None = None,
) -> DataSet:
    """Return few-shot tasks of Omniglot's characters, see :class:`Episodes`; training, validation and test characters
    are disjoint. The ink is black, as in the files.

    The split "random" is that of MAML and of the papers that follow it: 1,200 of the 1,623 characters, drawn once, of
    which 109 are for validation, to train on, and the others to test on. The split "official" trains on the characters
    of the background set, less 88 for validation, and tests on those of the evaluation set, whose alphabets are others.

    Args:
        ways: number of classes of a task.
        shots: number of images of each class to learn from.
        queries: number of images of each class to classify.
        size: side of the images.
        split: "random" or "official".
        rotations: whether rotated characters are further classes in training.
        episodes: number of training tasks in an epoch; every epoch draws new ones.
        val_episodes, test_episodes: number of tasks for validation and test.
        seed: seed of the tasks.
        train_queries: number of query images of each class in training tasks; None for ``queries``.

    Reference: C. Finn, P. Abbeel, S. Levine, "Model-agnostic meta-learning" (2017), section 5.2.
    """
    if split not in SPLITS:
        raise ValueError(f"data.split is {split!r}; allowed: {', '.join(map(repr, SPLITS))}.")
    require_number("data.ways", ways, at_least=2, whole=True)
    require_number("data.seed", seed, at_least=0, below=2**31, whole=True)
    data = omniglot(places, size)
    background, evaluation = (by_character(places, part) for part in (data.train, data.test))
    order = torch.randperm(len(background) + len(evaluation), generator=torch.Generator().manual_seed(0))
    if split == "official":
        train, test = background[order[order < len(background)]], evaluation
    else:
        count = round(RANDOM_TRAIN * len(order))
        train, test = torch.cat([background, evaluation])[order].tensor_split([count])
    turns = 4 if rotations is True else 1
    if ways > (most := min(len(test), turns * len(train) // (turns + 1))):
        raise ValueError(
            f"data.ways is {ways}; it must be at most {most}: there are {len(train)} characters for training and "
            f"validation, and {len(test)} to test on."
        )
    held = max(ways, round(HELD_OUT * len(train)))
    parts = {
        "training": (train[held:], episodes, queries if train_queries is None else train_queries, rotations),
        "validation": (train[:held], val_episodes, queries, False),
        "test": (test, test_episodes, queries, False),
    }
    splits = [
        Episodes(drawings, count, ways, shots, asked, turned, 3 * seed + i, part)
        for i, (part, (drawings, count, asked, turned)) in enumerate(parts.items())
    ]
    names = tuple(str(way + 1) for way in range(ways))
    return replace(data, train=splits[0], val=splits[1], test=splits[2], class_names=names)


def by_character(places: Places, split: Split) -> Tensor:
    """Return the images of a split of Omniglot as (characters, drawings, channels, height, width)."""
    assert isinstance(split, TensorSplit)
    images, labels = split.tensors
    counts = labels.unique(return_counts=True)[1]
    if len(set(counts.tolist())) != 1:
        raise ValueError(
            f"the characters of {places.name} have from {int(counts.min())} to {int(counts.max())} drawings; all must "
            "have equally many: get the files again with: equipoise data get omniglot."
        )
    order = labels.argsort(stable=True)
    return images[order].unflatten(0, (len(counts), -1))
