"""Data sets with a class for every pixel of a street scene: batches are (images, label maps), 255 for no class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.lab.data.base import Batch, DataSet, FileSplit, Split, differs
from equipoise.lab.data.files.images import opened, pixels
from equipoise.lab.data.files.places import Places
from equipoise.lab.data.files.trees import Tree
from equipoise.lab.data.sets.folders import images, in_memory, shape_of
from equipoise.options import require_number

if TYPE_CHECKING:
    from PIL.Image import Image

VOID = 255
CAMVID = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
CITYSCAPES = {  # the 19 classes that are evaluated, by their number in the files
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip


def camvid(places: Places, memory: bool = False) -> DataSet:
    """Return scenes from a car in Cambridge, 11 classes, in SegNet's split with its own validation part.

    Args:
        memory: decode all images once and keep them in memory.
    """
    tree = places.tree("CamVid", "camvid")
    pictures: dict[str, str] = {}  # by "train/NAME"
    label_maps: dict[str, str] = {}
    for file in images(places, tree):
        folder, _, name = "/".join(file.split("/")[-2:]).rpartition(".")[0].partition("/")
        files = label_maps if folder.endswith("annot") else pictures
        files[f"{folder.removesuffix('annot')}/{name}"] = file
    decode = scene_decoder(places, tree, tree, pictures, range(len(CAMVID)))
    train, val, test = (scenes(decode, pictures, label_maps, part, memory) for part in ("train", "val", "test"))
    note = note_about(places, train, test, (480, 360))
    mean, std = (0.413, 0.427, 0.434), (0.302, 0.306, 0.302)  # measured
    return DataSet(places.name, train, test, shape_of(train), val, CAMVID, mean, std, note)


def cityscapes(places: Places, scale: int = 1, memory: bool = False) -> DataSet:
    """Return scenes from a car in fifty cities, 19 classes.

    The official validation part is used as test, because the labels of the official test part are not published.

    Args:
        scale: integer factor by which the 2048 x 1024 images are downscaled.
        memory: decode all images once and keep them in memory.
    """
    require_number("data.scale", scale, at_least=1, whole=True)

    def named(tree: Tree, ending: str) -> dict[str, str]:  # by "train/CITY/NAME"
        files = [file for file in images(places, tree) if file.endswith(ending)]
        return {"/".join(file.split("/")[-3:]).removesuffix(ending): file for file in files}

    tree = places.tree("leftImg8bit", "leftImg8bit_trainvaltest")
    label_tree = places.tree("gtFine", "gtFine_trainvaltest")
    pictures, label_maps = named(tree, "_leftImg8bit.png"), named(label_tree, "_gtFine_labelIds.png")
    decode = scene_decoder(places, tree, label_tree, pictures, CITYSCAPES, scale)
    train, test = (scenes(decode, pictures, label_maps, part, memory) for part in ("train", "val"))
    note = note_about(places, train, test, (2048 // scale, 1024 // scale))
    mean, std = (0.2869, 0.3251, 0.2839), (0.1870, 0.1902, 0.1872)
    return DataSet(places.name, train, test, shape_of(train), None, tuple(CITYSCAPES.values()), mean, std, note)


@dataclass(frozen=True)
class SceneDecoder:
    """Decode a sample (image file, label file): an image and its label map.

    Args:
        places: places of the data set, for errors about damaged files.
        images, labels: trees that the files are in.
        table: class of each number in the label files.
        size: width and height of every image and label map.
        scale: downscaling factor; images are reduced by averaging and label maps by leaving pixels out; rows and
            columns beyond a multiple of it are cut off.
    """

    places: Places
    images: Tree
    labels: Tree
    table: Tensor
    size: tuple[int, int]
    scale: int = 1

    def __call__(self, sample: tuple[str, str]) -> Batch:
        file, label_file = sample
        width, height = (length // self.scale * self.scale for length in self.size)
        with self.places.reading(f"{self.images.path}/{file}"):
            picture = self.check_size(opened(self.images.read(file)).convert("RGB"))
            image = pixels(picture.reduce(self.scale, box=(0, 0, width, height)))
        with self.places.reading(f"{self.labels.path}/{label_file}"):
            label_map = self.check_size(opened(self.labels.read(label_file)))
            if label_map.mode not in ("L", "P"):
                raise ValueError(f"it has the mode {label_map.mode}; a label map has a number for each pixel (L or P)")
            middle = slice(self.scale // 2, None, self.scale)
            labels = pixels(label_map)[0, :height, :width][middle, middle]
        return image, self.table[labels.long()]

    def check_size(self, image: Image) -> Image:
        if image.size != self.size:
            raise ValueError(f"it is {image.width} x {image.height}, others are {self.size[0]} x {self.size[1]}")
        return image


def scene_decoder(
    places: Places, tree: Tree, label_tree: Tree, pictures: dict[str, str], numbers: Iterable[int], scale: int = 1
) -> SceneDecoder:
    """Return a decoder for pictures of the size of the first one; label files number the classes as in ``numbers``."""
    if not pictures:
        raise places.damaged(tree.path, "its images are not in the official folders")
    first = next(iter(pictures.values()))
    with places.reading(f"{tree.path}/{first}"):
        size = opened(tree.read(first)).size
    table = torch.full((256,), VOID)
    for label, number in enumerate(numbers):
        table[number] = label
    return SceneDecoder(places, tree, label_tree, table, size, scale)


def scenes(
    decode: SceneDecoder, pictures: dict[str, str], label_maps: dict[str, str], part: str, memory: bool
) -> Split:
    """Return the split of the pictures named "PART/..." with their label maps."""
    names = [name for name in pictures if name.startswith(f"{part}/")]
    if not names:
        raise decode.places.damaged(decode.images.path, f"it holds no images {part}/*")
    for name in names:
        if name not in label_maps:
            raise decode.places.damaged(decode.images.path / pictures[name], "it has no label map")
    return in_memory(FileSplit([(pictures[name], label_maps[name]) for name in names], decode), memory)


def note_about(places: Places, train: Split, test: Split, official: tuple[int, int]) -> str:
    """Describe what differs from the official data set: the number of images, or their size."""
    _, height, width = shape_of(train)
    size = f"images of {width} x {height}, not the official {official[0]} x {official[1]}"
    return ", ".join(filter(None, [differs(places.name, len(train), len(test)), size * ((width, height) != official)]))
