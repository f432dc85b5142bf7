"""Small files that claim, or inflate to, gigabytes; made quickly."""

import gzip
import pickle
import struct
import zlib

from official_files import numbers

GB = 10**9
BLOCK = 1 << 24


def raw_zeros(size, block=BLOCK):
    """Zeros in raw deflate, made quickly: the same flushed block repeated."""
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
    """A black picture of ``size`` bytes, whatever its header says."""

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
    """A cell array that claims two thousand million cells and holds none."""
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
