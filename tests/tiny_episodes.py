"""Episodes of random drawings, a data set that recipes can name as "tiny_episodes:episodes"."""

import torch

from equipoise.lab.data import DataSet
from equipoise.lab.data.sets.episodes import Episodes


def episodes() -> DataSet:
    """Tasks of three of six classes, each with one drawing to learn from and two to classify."""
    drawings = torch.randint(256, (6, 4, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    train, val, test = (Episodes(drawings, count, ways=3, shots=1, queries=2, seed=count) for count in (12, 4, 5))
    return DataSet("tiny-episodes", train, test, (1, 8, 8), val=val, class_names=("1", "2", "3"))
