"""What is officially in each data set, and under which terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class About:
    """A data set as its authors published it.

    Args:
        train, test: how many samples; None where that is the user's.
        licence: its terms in a few words.
    """

    train: int | None
    test: int | None
    licence: str


OWN = About(None, None, "that of your images")

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
    "image-folder": OWN,
    "camvid": About(367, 233, "CC BY-NC 4.0, research use"),
    "cityscapes": About(2975, 500, "non-commercial use, by registration"),
}


def differs(name: str, train: int, test: int) -> str:
    """What is not as many as officially: "949 of the official 73257 training images"; empty if nothing is."""
    about = ABOUT.get(name, OWN)
    return ", ".join(
        f"{found} {'of' if found < official else 'instead of'} the official {official} {kind} images"
        for kind, found, official in (("training", train, about.train), ("test", test, about.test))
        if official is not None and found != official
    )
