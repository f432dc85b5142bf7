"""Data sets of image files in folders: Omniglot, CelebA, Imagenette, ImageNet, and any folder of yours."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from equipoise.lab.data.base import DataSet, FileSplit, Split, TensorSplit, differs
from equipoise.lab.data.files.images import MODES, Decoder
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.files.trees import Tree
from equipoise.options import require_number

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENETTE = {
    "n01440764": "tench", "n02102040": "English springer", "n02979186": "cassette player", "n03000684": "chain saw",
    "n03028079": "church", "n03394916": "French horn", "n03417042": "garbage truck", "n03425413": "gas pump",
    "n03445777": "golf ball", "n03888257": "parachute",
}  # fmt: skip

LabelledFiles = list[tuple[str, str]]  # file, name of its class


def omniglot(places: Places, size: int = 28) -> DataSet:
    """Return handwritten characters of fifty alphabets; the ink is black, as in the files.

    A class is a character, with twenty drawings. The characters to train on (the background set) and those to test on
    (the evaluation set) differ; the labels of the test classes follow those of the training classes.

    Args:
        size: side of the images, 105 originally.
    """
    require_number("data.size", size, at_least=1, whole=True)
    trees = [places.tree("images_background"), places.tree("images_evaluation")]
    drawings = [[(file, "/".join(file.split("/")[-3:-1])) for file in images(places, tree)] for tree in trees]
    class_names = tuple(name for part in drawings for name in sorted({name for _, name in part}))
    train, test = (
        in_memory(labelled_split(part, class_names, Decoder(places, tree, 1, size)))
        for tree, part in zip(trees, drawings, strict=True)
    )
    mean, std, note = (0.9221,), (0.2155,), differs(places.name, len(train), len(test))  # measured, at 28 x 28
    return DataSet(places.name, train, test, shape_of(train), class_names=class_names, mean=mean, std=std, note=note)


def celeba(places: Places, size: int = 64, memory: bool = False) -> DataSet:
    """Return faces, without labels: batches are (images,). The split is the official one if the set is complete.

    Args:
        size: side of the square cut from the middle.
        memory: decode all images once and keep them in memory.
    """
    require_number("data.size", size, at_least=1, whole=True)
    tree = places.tree("img_align_celeba")
    samples = [(file,) for file in images(places, tree)]  # numbered, so that their order is the official one
    complete = len(samples) == 202599
    cuts = (162770, 182637) if complete else (len(samples) - max(1, len(samples) // 10),) * 2
    decode = Decoder(places, tree, 3, size)
    parts = [samples[: cuts[0]], samples[cuts[0] : cuts[1]], samples[cuts[1] :]]
    train, val, test = (in_memory(FileSplit(part, decode), memory) if part else None for part in parts)
    if train is None or test is None:
        raise places.damaged(tree.path, f"it holds {len(samples)} images, too few to train and to test on")
    note = "" if complete else differs(places.name, len(train), len(test)) + "; the last tenth is used as test"
    mean, std = (0.510, 0.424, 0.378), (0.300, 0.279, 0.278)  # measured on the first 4500 images, at 64 x 64
    return DataSet(places.name, train, test, shape_of(train), val=val, mean=mean, std=std, note=note)


def imagenette(places: Places, size: int = 160, memory: bool = False) -> DataSet:
    """Return ten easy classes of ImageNet; its validation images are used as test.

    Args:
        size: side of the images: the shorter side is resized to it, then the middle is cut out.
        memory: decode all images once and keep them in memory.
    """
    tree = places.tree("imagenette2", "imagenette2-320", "imagenette2-160", parts=("train", "val"))
    data = imagenet_like(places, tree, size, memory)
    return replace(data, class_names=tuple(IMAGENETTE.get(name, name) for name in data.class_names))


def imagenet(places: Places, size: int = 160, memory: bool = False) -> DataSet:
    """Return ImageNet (ILSVRC 2012), classes named by WordNet IDs, with the options and test of :func:`imagenette`."""
    return imagenet_like(places, places.tree(parts=("train", "val")), size, memory)


def image_folder(places: Places, folder: str, size: int = 64, channels: int = 3, memory: bool = False) -> DataSet:
    """Return a folder (or zip) of images: a subfolder per class, or ``train/``, ``test/`` and maybe ``val/`` of such.

    Without ``train/``, every tenth image is held out as test. With ``val/`` but no ``test/``, ``val/`` is the test.

    Args:
        places: places to look for the folder in, before the current folder.
        folder: path or name of the folder.
        size: side of the images: the shorter side is resized to it, then the middle is cut out.
        channels: 3 for colour, 1 for grey.
        memory: decode all images once and keep them in memory.
    """
    tree = chosen_folder(places, folder, channels)
    parts = by_part(images(places, tree))
    if parts.keys() == {""} and {name for _, name in parts[""]} <= {"train", "val", "test"}:
        raise places.damaged(tree.path, "the images in train/ and test/ are not in folders by class, train/CLASS/")
    if "train" in parts:
        val = parts.get("val", [])
        parts = {"train": parts["train"], "test": parts.get("test", val), "val": val if "test" in parts else []}
    elif "" in parts:
        every = parts[""]
        parts = {"train": [sample for row, sample in enumerate(every) if row % 10], "test": every[::10]}
    else:
        raise places.damaged(tree.path, "its images are not in folders CLASS/, nor in train/CLASS/ and test/CLASS/")
    return with_statistics(class_folders(places, tree, parts, size, channels, memory))


def unlabelled_images(places: Places, folder: str, size: int = 64, channels: int = 3, memory: bool = False) -> DataSet:
    """Return all images of a folder (or zip) and its subfolders, without labels: batches are (images,).

    Every tenth image is held out as test. The options are those of :func:`image_folder`.
    """
    require_number("data.size", size, at_least=1, whole=True)
    tree = chosen_folder(places, folder, channels)
    files = [(file,) for file in images(places, tree)]
    if len(files) < 2:
        raise places.damaged(tree.path, "it holds one image, too few to train and to test on")
    decode = Decoder(places, tree, channels, size)
    parts = ([sample for row, sample in enumerate(files) if row % 10], files[::10])
    train, test = (in_memory(FileSplit(part, decode), memory) for part in parts)
    return with_statistics(DataSet(places.name, train, test, shape_of(train)))


def chosen_folder(places: Places, folder: str, channels: int) -> Tree:
    """Return the folder (or zip) that the user chose; raise for another kind of value, or for other channels."""
    if channels not in MODES:
        raise ValueError(f"data.channels is {channels!r}; it must be 1 (grey) or 3 (colour).")
    if not isinstance(folder, str):
        raise ValueError(f"data.folder is {folder!r}; it must be a string, the path of a folder.")
    path = places.find_tree(folder) or Path(folder).expanduser()  # a run looks first in the folder it was started in
    return places.open(path) if path.exists() else places.tree(folder)


def with_statistics(data: DataSet) -> DataSet:
    """Return the data set with mean and standard deviation of up to 256 evenly spaced training images."""
    rows = torch.arange(0, len(data.train), math.ceil(len(data.train) / 256))
    levels = data.train.read(rows)[0].double().div(255).transpose(0, 1).flatten(1)
    std = levels.std(1).clamp(min=1 / 255)  # a channel may be constant
    return replace(data, mean=tuple(levels.mean(1).tolist()), std=tuple(std.tolist()))


def imagenet_like(places: Places, tree: Tree, size: int, memory: bool) -> DataSet:
    parts = by_part(images(places, tree))
    parts = {"train": parts.get("train", []), "test": parts.get("val", [])}
    return replace(class_folders(places, tree, parts, size, 3, memory), mean=IMAGENET_MEAN, std=IMAGENET_STD)


def class_folders(
    places: Places, tree: Tree, parts: dict[str, LabelledFiles], size: int, channels: int, memory: bool
) -> DataSet:
    """Return a data set of the parts "train", "test" and maybe "val"; labels follow the order of the class names."""
    require_number("data.size", size, at_least=1, whole=True)
    for part in ("train", "test"):
        if not parts[part]:
            raise places.damaged(tree.path, f"it holds no images to {part} with, in folders by class")
    class_names = tuple(sorted({name for files in parts.values() for _, name in files}))
    decode = Decoder(places, tree, channels, size)
    splits = {
        part: in_memory(labelled_split(files, class_names, decode), memory) for part, files in parts.items() if files
    }
    train, test = splits["train"], splits["test"]
    note = differs(places.name, len(train), len(test))
    return DataSet(places.name, train, test, shape_of(train), val=splits.get("val"), class_names=class_names, note=note)


def labelled_split(files: LabelledFiles, class_names: tuple[str, ...], decode: Decoder) -> FileSplit:
    labels = {name: label for label, name in enumerate(class_names)}
    return FileSplit([(file, labels[name]) for file, name in files], decode)


def images(places: Places, tree: Tree) -> list[str]:
    """Return the image files of a tree, sorted; at least one."""
    files = [file for file in tree.files() if file.lower().endswith(SUFFIXES)]
    if not files:
        raise places.damaged(tree.path, f"it holds no images ({', '.join(SUFFIXES)})")
    return files


def by_part(files: list[str]) -> dict[str, LabelledFiles]:
    """Return files and their class names by the part they belong to: .../PART/CLASS/FILE, or "" for CLASS/FILE."""
    parts: dict[str, LabelledFiles] = {}
    for file in files:
        folders = file.split("/")[:-1]
        part = next((folder for folder in folders[:-1] if folder in ("train", "val", "test")), "")
        if folders:
            parts.setdefault(part, []).append((file, folders[folders.index(part) + 1] if part else folders[-1]))
    return parts


def in_memory(split: Split, memory: bool = True) -> Split:
    """Return a split that is read once and kept in memory, or the same one if ``memory`` is False."""
    if not memory:
        return split
    whole = [torch.empty(len(split), *tensor.shape[1:], dtype=tensor.dtype) for tensor in split.read(torch.arange(1))]
    for rows in torch.arange(len(split)).split(512):
        for tensor, part in zip(whole, split.read(rows), strict=True):
            tensor[rows] = part
    return TensorSplit(*whole)


def shape_of(split: Split) -> tuple[int, ...]:
    """Return the shape of one input; reads it, so that a set that cannot be read is reported at once."""
    return tuple(split.read(torch.arange(1))[0].shape[1:])
