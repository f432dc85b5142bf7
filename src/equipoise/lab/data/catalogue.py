"""Official sizes and licences of the data sets."""

from __future__ import annotations

from typing import NamedTuple


class About(NamedTuple):
    """A data set as its authors published it: numbers of samples (None where they are the user's), and its terms."""

    train: int | None
    test: int | None
    licence: str


ABOUT: dict[str, About] = {
    "digits": About(1437, 360, "BSD 3-Clause (scikit-learn), CC BY 4.0 (UCI)"),
    "mnist": About(60000, 10000, "none stated; often listed as CC BY-SA 3.0"),
    "fashion-mnist": About(60000, 10000, "MIT"),
    "cifar10": About(50000, 10000, "none stated; cite Krizhevsky 2009"),
    "cifar100": About(50000, 10000, "none stated; cite Krizhevsky 2009"),
    "svhn": About(73257, 26032, "non-commercial use"),
    "omniglot": About(19280, 13180, "MIT"),
    "celeba": About(162770, 19962, "non-commercial research, no redistribution"),
    "imagenette": About(9469, 3925, "ImageNet's terms: non-commercial research"),
    "imagenet": About(1281167, 50000, "non-commercial research, by registration"),
    "image-folder": About(None, None, "that of your images"),
    "camvid": About(367, 233, "CC BY-NC 4.0, research use"),
    "cityscapes": About(2975, 500, "non-commercial use, by registration"),
}


def differs(name: str, train: int, test: int) -> str:
    """Describe sizes that are not the official ones ("949 of the official 73257 training images"), or return ""."""
    about = ABOUT.get(name, ABOUT["image-folder"])
    return ", ".join(
        f"{count} {'of' if count < official else 'instead of'} the official {official} {kind} images"
        for kind, count, official in (("training", train, about.train), ("test", test, about.test))
        if official is not None and count != official
    )
