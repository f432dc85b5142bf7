"""Official sizes and licences of the data sets."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

CATALOGUE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class About(NamedTuple):
    """A data set as its authors published it: numbers of samples (None where they are the user's), and its terms."""

    train: int | None
    test: int | None
    licence: str


ABOUT = {name: About(entry.get("train"), entry.get("test"), entry["licence"]) for name, entry in CATALOGUE.items()}


def differs(name: str, train: int, test: int) -> str:
    """Describe sizes that are not the official ones ("949 of the official 73257 training images"), or return ""."""
    about = ABOUT.get(name, ABOUT["image-folder"])
    return ", ".join(
        f"{count} {'of' if count < official else 'instead of'} the official {official} {kind} images"
        for kind, count, official in (("training", train, about.train), ("test", test, about.test))
        if official is not None and count != official
    )
