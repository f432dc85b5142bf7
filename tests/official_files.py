"""Small data sets in the official formats."""

import gzip
import io
import pickle
import struct
import zipfile

import numpy as np
from PIL import Image
from scipy.io import savemat


def numbers(*shape, below=256):
    """Bytes that are all different in every way that matters: random, but the same every time."""
    return np.random.default_rng(0).integers(0, below, shape, dtype=np.uint8)


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def picture(pixels, kind="PNG"):
    file = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(file, kind)
    return file.getvalue()


def zipped(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def make_idx(folder, train=7, test=5, compress=True):
    for part, count in (("train", train), ("t10k", test)):
        for name, array in (("images-idx3", numbers(count, 28, 28)), ("labels-idx1", numbers(count, below=10))):
            data, path = idx(array), folder / f"{part}-{name}-ubyte"
            write(path.with_name(path.name + ".gz") if compress else path, gzip.compress(data) if compress else data)


BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def make_cifar10(folder):
    for shift, name in enumerate(BATCHES):
        labels, images = (numbers(4, 1, below=10) + shift) % 10, numbers(4, 3072) + shift
        write(folder / f"{name}.bin", np.concatenate([labels, images], axis=1).astype(np.uint8).tobytes())


def make_cifar10_pickles(folder):
    for shift, name in enumerate(BATCHES):
        labels, images = (numbers(4, 1, below=10) + shift) % 10, numbers(4, 3072) + shift
        write(folder / name, python2_pickle({"data": images, "labels": labels[:, 0].tolist()}))


def python2_pickle(value):
    """A pickle as Python 2 and its numpy wrote it: strings are bytes, and the align option of a dtype is a number."""

    def text(data):
        return b"T" + struct.pack("<i", len(data)) + data

    def one(value):
        if isinstance(value, dict):
            return b"}(" + b"".join(text(key.encode()) + one(inner) for key, inner in value.items()) + b"u"
        if isinstance(value, list):
            return b"](" + b"".join(map(one, value)) + b"e"
        if isinstance(value, str):
            return text(value.encode())
        if isinstance(value, int):
            return b"J" + struct.pack("<i", value)
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85" + text(b"b") + b"tR"
        dtype = (
            b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR(K\x03" + text(b"|") + b"NNN" + 2 * one(-1) + b"K\x00tb"
        )
        shape = b"(" + b"".join(map(one, value.shape)) + b"t"
        return empty + b"(K\x01" + shape + dtype + b"\x89" + text(value.tobytes()) + b"tb"

    return b"\x80\x02" + one(value) + b"."


def python3_pickle(content):
    """A pickle of the same as Python 3 and its numpy write it."""

    def encoded(value):
        texts = isinstance(value, list) and isinstance(value[0], str)
        return [text.encode() for text in value] if texts else value

    return pickle.dumps({key.encode(): encoded(value) for key, value in content.items()}, protocol=2)


FINE, COARSE = [f"fine_{i}" for i in range(100)], [f"coarse_{i}" for i in range(20)]


def make_cifar100(folder, dump=python2_pickle):
    write(folder / "meta", dump({"fine_label_names": FINE, "coarse_label_names": COARSE}))
    for name, count in (("train", 6), ("test", 3)):
        content = {"data": numbers(count, 3072), "fine_labels": list(range(90, 90 + count))}
        write(folder / name, dump({**content, "coarse_labels": [19] * count}))


def make_cifar100_binary(folder):
    write(folder / "fine_label_names.txt", "\n".join(FINE).encode() + b"\n")
    write(folder / "coarse_label_names.txt", "\n".join(COARSE).encode() + b"\n")
    for name, count in (("train", 6), ("test", 3)):
        rows = [bytes([19, 90 + row]) + numbers(count, 3072)[row].tobytes() for row in range(count)]
        write(folder / f"{name}.bin", b"".join(rows))


def make_svhn(folder):
    folder.mkdir(parents=True)
    for name, count in (("train", 12), ("test", 4)):
        labels = (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]
        savemat(folder / f"{name}_32x32.mat", {"X": numbers(32, 32, 3, count), "y": labels}, do_compression=True)


def drawing(inked):
    """A character of Omniglot: 105 x 105, one bit, black ink in the upper left quarter."""
    paper = np.ones((105, 105), dtype=bool)
    paper[:50, :50] = not inked
    return picture(paper)


def omniglot_files(top, alphabets):
    return {
        f"{top}/{alphabet}/character{i:02}/{k:04}_{i:02}.png": drawing(True)
        for alphabet in alphabets
        for i in (1, 2)
        for k in (1, 2, 3)
    }


def make_omniglot(folder, as_zips=True):
    for top, alphabets in (("images_background", ("Greek", "Latin")), ("images_evaluation", ("Angelic",))):
        files = omniglot_files(top, alphabets)
        if as_zips:
            zipped(folder / f"{top}.zip", files)
        else:
            for name, data in files.items():
                write(folder / name, data)


def make_celeba(folder, count=20):
    face = picture(numbers(218, 178, 3), "JPEG")
    files = {f"img_align_celeba/{i:06}.jpg": face for i in range(1, count + 1)}
    zipped(folder / "img_align_celeba.zip", files)


def make_imagenette(folder):
    for part, count in (("train", 3), ("val", 2)):
        for wnid, grey in (("n01440764", 200), ("n03028079", 60)):
            for i in range(count):
                pixels = np.full((40, 60), grey, dtype=np.uint8)  # some of the real ones are grey, too
                write(folder / part / wnid / f"{wnid}_{i}.JPEG", picture(pixels, "JPEG"))


def make_camvid(folder):
    image, label_map = picture(numbers(360, 480, 3)), picture(numbers(360, 480, below=12))
    for part, count in (("train", 3), ("val", 2), ("test", 2)):
        for i in range(count):
            write(folder / part / f"{i}.png", image)
            write(folder / f"{part}annot" / f"{i}.png", label_map)


def make_cityscapes(folder, times=1):
    """Images of 16 x 8 pixels, or ``times`` as large."""
    for part, cities in (("train", ("aachen", "bochum")), ("val", ("lindau",)), ("test", ("berlin",))):
        for city in cities:
            stem = f"{part}/{city}/{city}_000000_000019"
            image = np.repeat(np.repeat(numbers(4 * times, 8 * times, 3), 2, axis=0), 2, axis=1)
            write(folder / f"leftImg8bit/{stem}_leftImg8bit.png", picture(image))
            write(folder / f"gtFine/{stem}_gtFine_labelIds.png", picture(numbers(8 * times, 16 * times, below=34)))
            write(folder / f"gtFine/{stem}_gtFine_color.png", picture(numbers(8 * times, 16 * times, 3)))


def make_pets(folder, *parts, count=10):
    for part in parts:
        for shade, name in ((50, "cat"), (250, "dog")):
            for i in range(count):
                kind = ("PNG", "BMP", "WEBP", "JPEG")[i % 4]
                data = picture(np.full((8, 8, 3), shade, dtype=np.uint8), kind)
                write(folder / part / name / f"{i}.{kind.lower()}", data)
