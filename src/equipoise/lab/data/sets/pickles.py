"""Pickles that may hold arrays, lists and strings, and nothing that runs code or takes more memory than the file."""

import io
import pickle
import pickletools
import re
from typing import Any

MOST_TUPLES = 1000  # an array takes five; a tuple may hold the one before it, and deep nesting ends the process


def load(data: bytes) -> Any:
    """Return what is in a pickle, with strings of Python 2 as bytes; reject one that names anything but arrays."""
    examine(data)
    return Restricted(io.BytesIO(data), encoding="bytes").load()


def examine(data: bytes) -> None:
    """Reject a pickle that could take more memory than its bytes, before anything is made of it.

    Python's unpickler allocates what an instruction claims: a table of 2^32 places for a memo with that number, or the
    length of a string before its bytes. Here pickletools compares every length with the bytes that are there, and every
    memo's number is compared with how many memos came before.
    """
    puts = tuples = 0
    for code, argument, place in pickletools.genops(data):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            puts += 1
            if argument is not None and argument > puts:  # pickles number memos one after the other, from 0 or 1
                raise pickle.UnpicklingError(
                    f"it is a pickle with memo {argument} at byte {place}, after {puts - 1} others"
                )
        elif code.name == "FRAME" and (argument or 0) > len(data):
            raise pickle.UnpicklingError(f"it is a pickle with a frame of {argument} bytes, and has {len(data)}")
        elif code.name.startswith("TUPLE") or code.name == "FROZENSET":
            tuples += 1
            if tuples > MOST_TUPLES:
                raise pickle.UnpicklingError(f"it is a pickle of more than {MOST_TUPLES} tuples; arrays have few")


class Restricted(pickle.Unpickler):
    """An unpickler that knows only the names by which numpy arrays and bytes are pickled, old and new."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "numpy.core.multiarray._reconstruct": empty_array,
            "numpy._core.multiarray._reconstruct": empty_array,
            "numpy.ndarray": not_called,
            "numpy.dtype": data_type,
            "_codecs.encode": latin1_bytes,
        }
        if (full := f"{module}.{name}") not in known:
            raise pickle.UnpicklingError(f"it is a pickle that names {full}; only arrays, lists and strings are read")
        return known[full]


def not_called(*arguments: Any) -> Any:
    """Stand for numpy.ndarray, which is only an argument: called, it would allocate any shape."""
    raise pickle.UnpicklingError("it is a pickle that calls numpy.ndarray; only arrays with all their bytes are read")


def empty_array(kind: Any, shape: Any, code: Any) -> Any:
    """Return an array for the pickle to fill; the arguments are placeholders."""
    import numpy

    return numpy.ndarray((0,), "b")


def data_type(code: str | bytes, align: Any = False, copy: Any = True) -> Any:
    """Return a dtype of numbers for the pickle to fill; a copy, so that numpy's own is not changed."""
    import numpy

    name = code.decode() if isinstance(code, bytes) else code
    if not isinstance(name, str) or not re.fullmatch("[|<>=]?[biuf][1248]", name):
        raise pickle.UnpicklingError(f"it is a pickle of an array of {name!r}; only numbers are read")
    return numpy.dtype(name, copy=True)


def latin1_bytes(string: str, encoding: str) -> bytes:
    """Return bytes, which Python 3 pickles as a string in older formats."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it is a pickle that encodes a string as {encoding!r}; only 'latin1' is read")
    return string.encode("latin1")
