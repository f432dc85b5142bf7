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
