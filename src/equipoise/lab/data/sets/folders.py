"""Data sets that are pictures in folders: Omniglot, CelebA, Imagenette, ImageNet, and any folder of yours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from equipoise.lab.data.base import DataSet, FileSplit, Split
from equipoise.lab.data.catalogue import differs
from equipoise.lab.data.files.images import MODES, Decoder, check_number, in_memory, shape_of, statistics
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.files.trees import Tree

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}

Labelled = list[tuple[str, str]]  # file, name of its class


def omniglot(places: Places, size: int = 28) -> DataSet:
    """Handwritten characters of fifty alphabets; the ink is black, as in the files.

    A class is a character, twenty drawings each. Those to train on (the background set) and those to test on (the
    evaluation set) are different characters; test classes are numbered on from the training ones.

    Args:
        places: where its files are.
        size: of the images, 105 originally.
    """
    check_number("size", size)
    trees = [places.tree("images_background"), places.tree("images_evaluation")]
    drawings = [[(file, "/".join(file.split("/")[-3:-1])) for file in images(places, tree)] for tree in trees]
    class_names = [name for part in drawings for name in sorted({name for _, name in part})]
    number = {name: position for position, name in enumerate(class_names)}
    splits = []
    for tree, part in zip(trees, drawings, strict=True):
        samples = [(file, number[name]) for file, name in part]
        splits.append(in_memory(FileSplit(samples, Decoder(places, tree, 1, size))))
    train, test = splits
    return DataSet(
        places.name,
        train,
        test,
        shape_of(train),
        class_names=tuple(class_names),
        mean=(0.9221,),  # measured, at 28 x 28
        std=(0.2155,),
        note=differs(places.name, len(train), len(test)),
    )


def celeba(places: Places, size: int = 64, memory: bool = False) -> DataSet:
    """Faces, without labels: batches are (images,). The official split; of a part of the set, the last tenth is test.

    Args:
        places: where its files are.
        size: of the square cut from the middle.
        memory: decode all images at once and keep them, rather than each time.
    """
    check_number("size", size)
    tree = places.tree("img_align_celeba")
    samples = [(file,) for file in images(places, tree)]  # numbered, so that their order is the official one
    complete = len(samples) == 202599
    cuts = (162770, 182637) if complete else (len(samples) - max(1, len(samples) // 10),) * 2
    decode = Decoder(places, tree, 3, size)
    parts = [samples[: cuts[0]], samples[cuts[0] : cuts[1]], samples[cuts[1] :]]
    train, val, test = (kept(FileSplit(part, decode), memory) if part else None for part in parts)
    if train is None or test is None:
        raise places.damaged(tree.path, f"it holds {len(samples)} images, too few to train and to test on")
    note = "" if complete else differs(places.name, len(train), len(test)) + "; the last tenth is used as test"
    mean, std = (0.510, 0.424, 0.378), (0.300, 0.279, 0.278)  # measured on the first 4500 images, at 64 x 64
    return DataSet(places.name, train, test, shape_of(train), val=val, mean=mean, std=std, note=note)


def imagenette(places: Places, size: int = 160, memory: bool = False) -> DataSet:
    """Ten easy classes of ImageNet; its validation images are used as test.

    Args:
        places: where its files are.
        size: of the images: the shorter side is resized to it, then the middle is cut out.
        memory: decode all images at once and keep them, rather than each time.
    """
    tree = places.tree("imagenette2", "imagenette2-320", "imagenette2-160", parts=("train", "val"))
    data = imagenet_like(places, tree, size, memory)
    return replace(data, class_names=tuple(IMAGENETTE.get(name, name) for name in data.class_names))


def imagenet(places: Places, size: int = 160, memory: bool = False) -> DataSet:
    """ImageNet (ILSVRC 2012): a thousand classes named by WordNet numbers; its validation images are used as test.

    Args:
        places: where its files are.
        size: of the images: the shorter side is resized to it, then the middle is cut out.
        memory: decode all images at once and keep them, rather than each time.
    """
    return imagenet_like(places, places.tree(parts=("train", "val")), size, memory)


def image_folder(places: Places, folder: str, size: int = 64, channels: int = 3, memory: bool = False) -> DataSet:
    """Any folder (or zip) of images: one subfolder per class, or ``train/``, ``test/`` and maybe ``val/`` of such.

    Without ``train/``, every tenth image is held out as test. With ``val/`` but no ``test/``, ``val/`` is the test.

    Args:
        places: where it is; else it is looked for from the current folder.
        folder: its path or name.
        size: of the images: the shorter side is resized to it, then the middle is cut out.
        channels: 3 for colour, 1 for grey.
        memory: decode all images at once and keep them, rather than each time.
    """
    if channels not in MODES:
        raise ValueError(f"data.channels is {channels!r}; it must be 1 (grey) or 3 (colour).")
    if not isinstance(folder, str):
        raise ValueError(f"data.folder is {folder!r}; it must be a text: the path of a folder.")
    path = places.find_tree(folder) or Path(folder).expanduser()  # a run looks in the folder it was begun in first
    tree = places.open(path) if path.exists() else places.tree(folder)
    found = by_part(images(places, tree))
    if found.keys() == {""} and {name for _, name in found[""]} <= {"train", "val", "test"}:
        raise places.damaged(tree.path, "the images in train/ and test/ are not in folders by class, train/CLASS/")
    if "train" in found:
        test, val = (found["test"], found.get("val", [])) if "test" in found else (found.get("val", []), [])
        parts = {"train": found["train"], "test": test, "val": val}
    elif "" in found:
        train = [sample for row, sample in enumerate(found[""]) if row % 10]
        parts = {"train": train, "test": found[""][::10]}
    else:
        raise places.damaged(tree.path, "its images are not in folders CLASS/, nor in train/CLASS/ and test/CLASS/")
    data = class_folders(places, tree, parts, size, channels, memory)
    mean, std = statistics(data.train)
    return replace(data, mean=mean, std=std)


def imagenet_like(places: Places, tree: Tree, size: int, memory: bool) -> DataSet:
    found = by_part(images(places, tree))
    parts = {"train": found.get("train", []), "test": found.get("val", [])}
    return replace(class_folders(places, tree, parts, size, 3, memory), mean=IMAGENET_MEAN, std=IMAGENET_STD)


def class_folders(
    places: Places, tree: Tree, parts: dict[str, Labelled], size: int, channels: int, memory: bool
) -> DataSet:
    """A data set of the parts "train", "test" and maybe "val"; classes are numbered in the order of their names."""
    check_number("size", size)
    class_names = sorted({name for part in parts.values() for _, name in part})
    number = {name: position for position, name in enumerate(class_names)}
    decode = Decoder(places, tree, channels, size)

    def split(part: str) -> Split:
        if not parts[part]:
            raise places.damaged(tree.path, f"it holds no images to {part} with, in folders by class")
        return kept(FileSplit([(file, number[name]) for file, name in parts[part]], decode), memory)

    train, test = split("train"), split("test")
    return DataSet(
        places.name,
        train,
        test,
        shape_of(train),
        val=split("val") if parts.get("val") else None,
        class_names=tuple(class_names),
        note=differs(places.name, len(train), len(test)),
    )


def images(places: Places, tree: Tree) -> list[str]:
    """The image files of a tree, sorted; at least one."""
    found = [file for file in tree.files() if file.lower().endswith(SUFFIXES)]
    if not found:
        raise places.damaged(tree.path, f"it holds no images ({', '.join(SUFFIXES)})")
    return found


def by_part(files: list[str]) -> dict[str, Labelled]:
    """Files with the names of their classes, by the part they belong to: .../PART/CLASS/FILE, or "" for CLASS/FILE."""
    parts: dict[str, Labelled] = {}
    for file in files:
        folders = file.split("/")[:-1]
        part = next((folder for folder in folders[:-1] if folder in ("train", "val", "test")), "")
        if folders:
            parts.setdefault(part, []).append((file, folders[folders.index(part) + 1] if part else folders[-1]))
    return parts


def kept(split: Split, memory: bool) -> Split:
    return in_memory(split) if memory else split
