"""Pickles that may hold arrays, lists and texts, and nothing that runs code."""

from __future__ import annotations

import io
import pickle
from typing import Any


def load(data: bytes) -> Any:
    """What is in a pickle; texts of Python 2 as bytes. One that names anything but arrays is refused."""
    return Restricted(io.BytesIO(data), encoding="bytes").load()


class Restricted(pickle.Unpickler):
    """Knows the few names by which numpy arrays and bytes are pickled, old and new."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy

        known = {
            ("numpy.core.multiarray", "_reconstruct"): empty_array,
            ("numpy._core.multiarray", "_reconstruct"): empty_array,
            ("numpy", "ndarray"): numpy.ndarray,
            ("numpy", "dtype"): data_type,
            ("_codecs", "encode"): latin1_bytes,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(
                f"it is a pickle that names {module}.{name}; only arrays, lists and texts are read"
            )
        return known[module, name]


def empty_array(kind: Any, shape: Any, code: Any) -> Any:
    """An array for the pickle to fill: what it says here is only a placeholder."""
    import numpy

    return numpy.ndarray((0,), "b")


def data_type(code: str | bytes, align: Any = False, copy: Any = True) -> Any:
    """A dtype for the pickle to fill; a copy, lest it changes numpy's own."""
    import numpy

    return numpy.dtype(code.decode() if isinstance(code, bytes) else code, copy=True)


def latin1_bytes(text: str, encoding: str) -> bytes:
    """Bytes, which Python 3 pickles as text in older formats."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it is a pickle that encodes a text as {encoding!r}; only 'latin1' is read")
    return text.encode("latin1")
