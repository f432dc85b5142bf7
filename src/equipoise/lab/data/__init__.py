"""Data sets by name: ``sets/`` has one reader per format, ``files/`` finds and reads files, ``get/`` downloads."""

from equipoise.lab.data.base import DATA_SETS, FACTS, Batch, DataSet, FileSplit, Split, Subset, TensorSplit, load
from equipoise.lab.data.files.places import MissingData, Places, cache_folder, search_path
from equipoise.lab.data.inventory import available, check

__all__ = ["DATA_SETS", "FACTS", "Batch", "DataSet", "FileSplit", "MissingData", "Places", "Split", "Subset"]
__all__ += ["TensorSplit", "available", "cache_folder", "check", "load", "search_path"]
