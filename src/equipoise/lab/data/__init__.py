"""Data sets by name: ``sets/`` has one reader per format, ``files/`` finds and reads files, ``get/`` downloads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from equipoise.lab.data.base import FACTS, Batch, DataSet, FileSplit, Split, Subset, TensorSplit
from equipoise.lab.data.files.places import MissingData, Places, cache_folder, search_path
from equipoise.lab.data.inventory import available, check
from equipoise.registry import MissingPackage, Registry, call

__all__ = ["DATA_SETS", "FACTS", "Batch", "DataSet", "FileSplit", "MissingData", "Places", "Split", "Subset"]
__all__ += ["TensorSplit", "available", "cache_folder", "check", "load", "search_path"]

DATA_SETS = Registry(
    "data set",
    {
        "digits": "equipoise.lab.data.sets.arrays:digits",
        "mnist": "equipoise.lab.data.sets.idx:mnist",
        "fashion-mnist": "equipoise.lab.data.sets.idx:fashion_mnist",
        "cifar10": "equipoise.lab.data.sets.cifar:cifar10",
        "cifar100": "equipoise.lab.data.sets.cifar:cifar100",
        "svhn": "equipoise.lab.data.sets.arrays:svhn",
        "omniglot": "equipoise.lab.data.sets.folders:omniglot",
        "celeba": "equipoise.lab.data.sets.folders:celeba",
        "imagenette": "equipoise.lab.data.sets.folders:imagenette",
        "imagenet": "equipoise.lab.data.sets.folders:imagenet",
        "image-folder": "equipoise.lab.data.sets.folders:image_folder",
        "camvid": "equipoise.lab.data.sets.scenes:camvid",
        "cityscapes": "equipoise.lab.data.sets.scenes:cityscapes",
    },
    DataSet,
    functions=True,
)


def load(name: str, *, folders: Sequence[str | Path] = (), validation: float = 0.1, **options: Any) -> DataSet:
    """Load a data set with a validation split.

    Args:
        name: name in the table above, or ``"my_module:my_data"``: a function that returns a DataSet, and is called with
            a ``Places`` if it has a parameter ``places``.
        folders: folders to look for its files in first; see :func:`search_path`.
        validation: fraction (below 1) or number of training samples to hold out; 0 for no validation split.
        **options: options of the data set.

    Example:
        >>> load("cifar100", labels="coarse").shape
        (3, 32, 32)
    """
    reader = DATA_SETS[name]
    try:
        data = call(reader, options, {"places": Places(name, folders)}, f"data set {name!r}")
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"data set {name!r} needs the package {error.name!r}, which is missing: pip install 'equipoise[lab]'.",
            name=error.name,
        ) from error
    if not isinstance(data, DataSet):
        raise ValueError(f"data set {name!r} must return an equipoise.lab.data.DataSet, got {data!r}.")
    return data.with_validation(validation)
