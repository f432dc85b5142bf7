"""Episodes of Omniglot: what they hold, what they are drawn from, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.lab.data import MissingData, available, load
from equipoise.lab.data.base import Subset, TensorSplit
from equipoise.lab.data.sets.episodes import Episodes
from official_files import picture, write

REAL = [
    *filter(None, os.environ.get("EQUIPOISE_DATA", "").split(os.pathsep)),
    Path(__file__).parents[4] / "shared/data",
]


def level(character, drawing):
    return 8 * character + drawing


def marked(characters, drawings=5, size=4):
    """Images that say in their upper left pixel which drawing of which character they are."""
    images = torch.zeros(characters, drawings, 1, size, size, dtype=torch.uint8)
    for character in range(characters):
        for drawing in range(drawings):
            images[character, drawing, 0, 0, 0] = level(character, drawing)
    return images


@pytest.fixture
def tree(tmp_path):
    """Omniglot with 12 + 10 characters of 4 drawings, each of a level of grey of its own."""
    number = 0
    for top, count in (("images_background", 12), ("images_evaluation", 10)):
        for character in range(count):
            for drawing in range(4):
                image = np.full((28, 28), level(number, drawing), dtype=np.uint8)
                name = f"{top}/Made/character{character:02}/{number:04}_{drawing:02}.png"
                write(tmp_path / "omniglot" / name, picture(image))
            number += 1
    return tmp_path


def characters_of(split):
    return {
        int(image[0, 0, 0]) // 8
        for images in split.read(torch.arange(len(split)))[::2]
        for image in images.flatten(0, 1)
    }


def test_an_episode():
    split = Episodes(marked(9), episodes=20, ways=3, shots=2, queries=3)
    support, labels, query, answers = split.read(torch.arange(20))
    assert support.shape == (20, 6, 1, 4, 4)
    assert query.shape == (20, 9, 1, 4, 4)
    assert labels.tolist() == [[0, 0, 1, 1, 2, 2]] * 20
    assert answers.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2]] * 20
    seen = set()
    for task in range(20):
        chosen = support[task, :, 0, 0, 0].tolist() + query[task, :, 0, 0, 0].tolist()
        assert len(set(chosen)) == 15  # no drawing twice: nothing to learn from is asked
        by_label = {}
        for mark, label in zip(chosen, [*labels[task].tolist(), *answers[task].tolist()], strict=True):
            by_label.setdefault(label, set()).add(mark // 8)
        assert [len(characters) for characters in by_label.values()] == [1, 1, 1]  # a label is one character
        assert len(set.union(*by_label.values())) == 3
        seen |= set.union(*by_label.values())
    assert seen == set(range(9))


def test_episodes_depend_on_seed_and_index_alone():
    split = Episodes(marked(9), episodes=50, ways=3, shots=1, queries=2)
    together = split.read(torch.tensor([7, 3, 40]))
    alone = split.read(torch.tensor([40]))
    assert all(torch.equal(a[2], b[0]) for a, b in zip(together, alone, strict=True))
    other = Episodes(marked(9), episodes=50, ways=3, shots=1, queries=2, seed=1).read(torch.tensor([40]))
    assert not torch.equal(other[2], alone[2])


def test_every_epoch_has_new_episodes():
    split = Episodes(marked(9), episodes=20, ways=3, shots=1, queries=2)
    few = Subset(split, torch.tensor([3, 4]))
    rows = torch.arange(2)
    assert torch.equal(few.in_epoch(0).read(rows)[2], few.read(rows)[2])
    later = few.in_epoch(5).read(rows)
    assert not torch.equal(later[2], few.read(rows)[2])
    longer = Episodes(marked(9), episodes=200, ways=3, shots=1, queries=2)
    assert torch.equal(later[2], longer.read(torch.tensor([103, 104]))[2])  # a continuation, and the same every time
    assert torch.equal(later[2], few.in_epoch(5).read(rows)[2])
    plain = TensorSplit(torch.arange(4))
    assert plain.in_epoch(3) is plain


def test_rotated_characters_are_further_classes():
    split = Episodes(marked(2), episodes=60, ways=5, shots=1, queries=1, rotations=True)
    support, _, query, _ = split.read(torch.arange(60))
    corners = [(0, 0), (0, 3), (3, 0), (3, 3)]
    used = set()
    for images in zip(support.flatten(0, 1), query.flatten(0, 1), strict=True):
        places = {next((c for c in corners if image[0, c[0], c[1]]), None) for image in images} - {None}
        assert len(places) <= 1  # both images of a class are turned alike (the mark of drawing 0 of 0 is 0)
        used |= places
    assert used == set(corners)


@pytest.mark.parametrize(("split", "sizes"), [("official", (9, 3, 10)), ("random", (13, 3, 6))])
def test_no_character_is_in_two_splits(tree, split, sizes):
    numbers = {"ways": 3, "queries": 2, "episodes": 200, "val_episodes": 100, "test_episodes": 200}
    data = load("omniglot-episodes", folders=[tree], split=split, **numbers)
    parts = [characters_of(each) for each in (data.train, data.val, data.test)]
    assert [len(part) for part in parts] == list(sizes)
    assert len(set.union(*parts)) == sum(sizes)
    if split == "official":
        assert parts[2] == set(range(12, 22))
    assert (data.shape, data.class_names) == ((1, 28, 28), ("1", "2", "3"))


def test_training_tasks_may_have_more_query_images(tree):
    numbers = {"ways": 3, "queries": 1, "episodes": 2, "val_episodes": 2, "test_episodes": 2}
    data = load("omniglot-episodes", folders=[tree], train_queries=3, **numbers)
    assert data.val is not None
    counts = [split.read(torch.arange(1))[2].shape[1] for split in (data.train, data.val, data.test)]
    assert counts == [3 * 3, 3, 3]


def test_more_ways_than_characters(tree):
    words = "data.ways is 7; it must be at most 6: there are 16 characters for training and validation, and 6 to test"
    with pytest.raises(ValueError, match=words):
        load("omniglot-episodes", folders=[tree], ways=7, queries=2)


def test_wrong_options(tree):
    drawings = marked(4)
    with pytest.raises(ValueError, match="data.ways is 5; it must be at most 4: the split characters are 4"):
        Episodes(drawings, episodes=1, ways=5, shots=1, queries=1)
    with pytest.raises(ValueError, match="data.ways is 17; it must be at most 16: the test characters are 4 in"):
        Episodes(drawings, episodes=1, ways=17, shots=1, queries=1, rotations=True, part="test")
    with pytest.raises(ValueError, match=r"data.shots \+ data.queries is 2 \+ 4 = 6; it must be at most 5"):
        Episodes(drawings, episodes=1, ways=2, shots=2, queries=4)
    for name, value in (("episodes", 0), ("ways", 1), ("shots", 0), ("queries", 1.5)):
        numbers = {"episodes": 1, "ways": 2, "shots": 1, "queries": 1, name: value}
        with pytest.raises((TypeError, ValueError), match=f"data.{name} is {value}; it must be a whole number"):
            Episodes(drawings, **numbers)
    with pytest.raises(ValueError, match="data.split is 'lake'; allowed: 'official', 'random'"):
        load("omniglot-episodes", folders=[tree], split="lake")
    with pytest.raises(TypeError, match="data set 'omniglot-episodes' has no option 'way'; did you mean 'ways'"):
        load("omniglot-episodes", folders=[tree], way=3)


def test_where_it_is_found(tree, tmp_path, monkeypatch):
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    found = {row.name: row.found for row in available([tree])}
    assert found["omniglot-episodes"] == str(tree / "omniglot")
    with pytest.raises(
        MissingData, match="the data set omniglot-episodes was not found .* equipoise data get omniglot;"
    ):
        load("omniglot-episodes", folders=[tmp_path / "nowhere"])


@pytest.mark.slow
def test_real():
    try:
        data = load("omniglot-episodes", folders=REAL, queries=2)
    except MissingData as error:
        pytest.skip(str(error))
    assert data.facts() == {
        "shape": (1, 28, 28),
        "classes": 5,
        "class_names": ("1", "2", "3", "4", "5"),
        "mean": (0.9221,),
        "std": (0.2155,),
    }
    assert [len(split.drawings) for split in (data.train, data.val, data.test)] == [1091, 109, 423]
    assert (len(data.train), len(data.val), len(data.test)) == (20000, 200, 1000)
    support, _, query, answers = data.test.read(torch.arange(1000))
    # A drawing is nearest, of the five to learn from, to that of its own character clearly more often than by chance.
    near = torch.cdist(query.flatten(2).float(), support.flatten(2).float()).argmin(dim=2)
    assert 0.35 < (near == answers).double().mean() < 0.7
