"""Small files that claim, or inflate to, gigabytes are refused in a sentence, in a process that has no gigabytes."""

import json
import os
import struct
import subprocess
import sys

import pytest

from bomb_files import GB, deep_key, gzip_zeros, many_labels, mat_of_cells, mat_of_zeros, png, zip_of_zeros
from lab_helpers import environment
from official_files import idx, make_cifar10, make_cifar10_pickles, make_cifar100, make_idx, make_svhn, numbers, write

HEADROOM = GB  # of address space beyond what the process has once all is imported


def bombs(folder):
    """What each is, and what reading it must say."""
    make_idx(folder / "promise/mnist")
    shape = struct.pack(">HBB3I", 0, 8, 3, 60000, 250, 200)
    write(folder / "promise/mnist/train-images-idx3-ubyte.gz", gzip_zeros(3 * GB, shape))
    make_idx(folder / "silent/mnist")
    write(folder / "silent/mnist/train-images-idx3-ubyte.gz", gzip_zeros(3 * GB, idx(numbers(7, 28, 28))))
    for name, data in {
        "memo": b"\x80\x02}r\xff\xff\xff\x0f.",
        "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc.",
        "array": b"\x80\x02cnumpy\nndarray\n\x8a\x05\x00\x00\x00\x00\x01\x85\x85R.",
        "labels": many_labels(),
        "deep": deep_key(),
        "objects": b"\x80\x02cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R.",
    }.items():
        make_cifar10_pickles(folder / name / "cifar10")
        write(folder / name / "cifar10/data_batch_1", data)
    make_cifar10(folder / "sparse/cifar10")
    os.truncate(folder / "sparse/cifar10/data_batch_1.bin", 3073 * 10**8)
    make_cifar100(folder / "frame/cifar100")
    write(folder / "frame/cifar100/train", b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"}.")
    for name, make in (("mat", mat_of_zeros), ("cells", mat_of_cells)):
        make_svhn(folder / name / "svhn")
        write(folder / name / "svhn/train_32x32.mat", make())
    write(folder / "zip/pets.zip", zip_of_zeros(3 * GB, b"cat/one.png", b"dog/two.png"))
    for name, side, data in (("picture", 13000, 3 * 13000**2), ("claim", 60000, 0)):
        for label in ("cat", "dog"):
            write(folder / name / f"pets/{label}/one.png", png(side, side, data))


SETS = {
    "promise": ("mnist", "its header declares 3,000,000,000 bytes; at most 145,320,950 are read"),
    "silent": ("mnist", "it holds more than the 5488 bytes of data that its header declares"),
    "memo": ("cifar10", "it is a pickle with memo 268435455 at byte 3, after 0 others"),
    "bytes": ("cifar10", "expected 1099511627776 bytes in a bytes8, but only 4 remain"),
    "array": ("cifar10", "it is a pickle that calls numpy.ndarray; only arrays with all their bytes are read"),
    "labels": ("cifar10", "its entry 'labels' is not a list of whole numbers"),
    "deep": ("cifar10", "it is a pickle of more than 1000 tuples; arrays have few"),
    "objects": ("cifar10", "it is a pickle of an array of 'O8'; only numbers are read"),
    "sparse": ("cifar10", "it has 307,300,000,000 bytes; at most 8,000,000,000 are read"),
    "frame": ("cifar100", "it is a pickle with a frame of 1099511627776 bytes, and has 13"),
    "mat": ("svhn", "it inflates to more than"),
    "cells": ("svhn", "its variable 'X' is a cell, not an array of numbers"),
    "zip": ("image-folder", "it inflates to 3,000,000,000 bytes; at most 256,000,000 are read"),
    "picture": (
        "image-folder",
        "it is 13000 x 13000, 169,000,000 pixels; at most 89,000,000 are read: make it smaller",
    ),
    "claim": ("image-folder", "it is 3,600,000,000 pixels; at most 89,000,000 are read: make it smaller"),
}

READER = """
import json, os, resource, sys, traceback
import numpy, PIL.Image, PIL.PngImagePlugin, scipy.io
from equipoise.lab.data import check, load
from equipoise.lab.data.sets import arrays, cifar, folders, idx, scenes  # all that is imported when first asked for

folder, sets, headroom = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
taken = 4096 * int(open("/proc/self/statm").read().split()[0])
for name, data in sets.items():
    if not os.fork():
        resource.setrlimit(resource.RLIMIT_AS, (taken + headroom,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        try:
            place = [os.path.join(folder, name)]
            if name == "silent":
                assert check(data, place)[0].verdict == "not the official checksum", check(data, place)
            options = {"folder": "pets"} if data == "image-folder" else {}
            load(data, folders=place, validation=0, **options).train.read(__import__("torch").arange(1))
            said = "it was read"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([name, said]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What reading each bomb says; nothing for one that ended its process."""
    folder = tmp_path_factory.mktemp("bombs")
    bombs(folder)
    on_disk = sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    assert on_disk < 100 * 10**6  # they are small
    sets = json.dumps({name: data for name, (data, _) in SETS.items()})
    command = [sys.executable, "-c", READER, str(folder), sets, str(HEADROOM)]
    settings = {**environment(), "XDG_CACHE_HOME": str(folder / "cache")}
    settings.pop("EQUIPOISE_DATA", None)
    done = subprocess.run(command, capture_output=True, text=True, env=settings, cwd=folder, timeout=300, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process as Linux has them")
@pytest.mark.parametrize("name", SETS)
def test_a_bomb_is_refused_in_a_sentence(said, name):
    data, sentence = SETS[name]
    assert name in said, "the process ended before it could say anything"
    assert said[name].startswith("ValueError: ")
    assert sentence in said[name]
    assert f"cannot be used for the data set {data}" in said[name]
