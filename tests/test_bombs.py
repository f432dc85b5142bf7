"""Small files that claim, or inflate to, gigabytes are refused in a sentence, in a process that has no gigabytes."""

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import zlib

import pytest

from lab_helpers import environment
from official_files import idx, make_cifar10, make_cifar10_pickles, make_cifar100, make_idx, make_svhn, numbers, write

GB = 10**9
HEADROOM = GB  # of address space beyond what the process has once all is imported
BLOCK = 1 << 24


def raw_zeros(size, block=BLOCK):
    """Zeros in raw deflate, made in no time: the same flushed block again and again."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    once = deflater.compress(bytes(block)) + deflater.flush(zlib.Z_FULL_FLUSH)
    return once * (size // block) + deflater.flush()


def zlib_zeros(size, start=b""):
    """A zlib stream of some bytes and then zeros; its checksum is wrong, which shows only at the end."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = deflater.compress(start) + deflater.flush(zlib.Z_FULL_FLUSH)
    return b"\x78\x9c" + first + raw_zeros(size) + bytes(4)


def gzip_zeros(size, start):
    return gzip.compress(start) + gzip.compress(bytes(BLOCK)) * (size // BLOCK)


def png(width, height, size):
    """A black picture of so many bytes, whatever its header says."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib_zeros(size + BLOCK))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")


def zip_of_zeros(size, *names):
    """A zip of files of zeros, written by hand: zipfile would take its time."""
    data, files, directory = raw_zeros(size), b"", b""
    for name in names:
        facts = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(data), size, len(name), 0)
        directory += b"PK\x01\x02\x14\x00" + facts + struct.pack("<HHHII", 0, 0, 0, 0, len(files)) + name
        files += b"PK\x03\x04" + facts + name + data
    count = len(names)
    return files + directory + b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, count, count, len(directory), len(files), 0)


def mat(class_number, shape, data):
    """The header of a MATLAB file, the tag of its only variable X, and that: flags, shape, name, data."""

    def element(number, content):
        return struct.pack("<II", number, len(content)) + content + bytes(-len(content) % 8)

    flags, dimensions = struct.pack("<II", class_number, 0), struct.pack(f"<{len(shape)}i", *shape)
    inside = element(6, flags) + element(5, dimensions) + struct.pack("<HH4s", 1, 1, b"X") + data
    return b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM", struct.pack("<II", 14, len(inside)), inside


def mat_of_zeros():
    """An image array that is right in every way but its size: 3 GB."""
    shape = (32, 32, 3, GB // 1024)
    header, tag, inside = mat(9, shape, struct.pack("<II", 2, 3 * GB))
    stream = zlib_zeros(3 * GB + BLOCK, tag[:4] + struct.pack("<I", len(inside) + 3 * GB) + inside)
    return header + struct.pack("<II", 15, len(stream)) + stream


def mat_of_cells():
    """A cell array of two thousand million cells, none of which is there."""
    header, tag, inside = mat(1, (2**31 - 1, 1), b"")
    return header + tag + inside


def deep_key():
    """A dictionary whose key is a tuple in a tuple in a tuple ...: its hash is computed recursively."""
    return b"\x80\x02}" + b")" + b"\x85" * 3_000_000 + b"K\x01s."


def many_labels():
    """Lists of a hundred times the same list, six deep: 10^12 labels in a few bytes."""
    labels = [1] * 100
    for _ in range(5):
        labels = [labels] * 100
    return pickle.dumps({b"data": numbers(4, 3072), b"labels": labels}, protocol=2)


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
    "promise": ("mnist", "its header promises 3,000,000,000 bytes; at most 145,320,950 are read"),
    "silent": ("mnist", "it holds more than the 5488 bytes of data that its header promises"),
    "memo": ("cifar10", "it is a pickle with memo 268435455 at byte 3, its 1th one"),
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
from equipoise.lab.data import arrays, cifar, folders, idx, scenes  # all that is imported when first asked for

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
