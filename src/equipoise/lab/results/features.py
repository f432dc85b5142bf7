"""Open the trained networks whose features compare sets of images: the package's classifier, or the FID's Inception."""

import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from equipoise.lab.data.files.places import MissingData, search_path
from equipoise.lab.files import DamagedFile, read_file
from equipoise.lab.runs.load import load
from equipoise.models.features.classifier import SIDE, SmallClassifier
from equipoise.models.features.inception import FEATURES, FidInception
from equipoise.options import unknown

CLASSIFIER = "features/cifar10-classifier"  # name of the shipped model
INCEPTION = "inception"  # folder of the file below, in any folder of the search path
INCEPTION_FILES = (  # one file, as pytorch-fid and torch-fidelity name it
    "pt_inception-2015-12-05-6726825d.pth",
    "weights-inception-2015-12-05-6726825d.pth",
)
INCEPTION_SIZE = 95_628_359  # bytes
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"


@dataclass(frozen=True)
class Features:
    """A network that maps images to feature vectors.

    Args:
        distance: name of the Fréchet distance between its features.
        about: what the features are.
        count: number of features.
        network: the network, in evaluation mode.
    """

    distance: str
    about: str
    count: int
    network: SmallClassifier | FidInception

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of images in [0, 1], (batch, count)."""
        return self.network.features(images.float())


def open_features(name: str, folders: Sequence[str | Path] = ()) -> Features:
    """Open a network by name.

    Args:
        name: "classifier", which is part of the package, or "inception", whose weights are a file that you supply.
        folders: folders to search for that file first.

    Example:
        >>> open_features("classifier")(torch.rand(8, 3, 64, 64)).shape
        torch.Size([8, 64])
    """
    if name not in NETWORKS:
        raise ValueError(unknown("features", name, NETWORKS))
    return NETWORKS[name](folders)


def open_classifier(_: Sequence[str | Path] = ()) -> Features:
    """Open the classifier that is part of the package."""
    network = load(CLASSIFIER)
    assert isinstance(network, SmallClassifier)
    count = network.linear.in_features
    about = f"{count} features of a small CIFAR-10 classifier, at {SIDE}x{SIDE}"
    return Features("Fréchet distance (not FID)", about, count, network)


def open_inception(folders: Sequence[str | Path] = ()) -> Features:
    """Open the Inception network of the FID; nothing in a file other than the published one is read."""
    path = inception_file(folders)
    again = f"replace it with the published file ({INCEPTION_SIZE:,} bytes, SHA-256 {INCEPTION_SHA256[:16]}...)"
    try:
        content = read_file(path, INCEPTION_SIZE)
    except ValueError as error:
        raise DamagedFile(f"{path} is not the FID's Inception network: {error}; {again}.") from None
    if hashlib.sha256(content).hexdigest() != INCEPTION_SHA256:
        why = f"it has {len(content):,} bytes and another checksum"
        raise DamagedFile(f"{path} is not the FID's Inception network, or is damaged: {why}; {again}.")
    network = FidInception()
    try:
        network.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except (RuntimeError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise DamagedFile(f"{path} does not hold the weights of the FID's Inception network: {reason}.") from error
    about = f"{FEATURES} features of the FID's Inception network, at 299x299"
    return Features("Fréchet inception distance (FID)", about, FEATURES, network.eval())


def inception_file(folders: Sequence[str | Path]) -> Path:
    """Return the file of the Inception network in the search path; raise MissingData if it is missing."""
    roots = search_path(folders)
    for path in (place / name for root in roots for place in (root / INCEPTION, root) for name in INCEPTION_FILES):
        if path.is_file():
            return path
    raise MissingData(
        f"the FID needs the Inception network of the project pytorch-fid, which was not found: no {INCEPTION_FILES[0]} "
        f"in {', '.join(map(str, roots))}, nor in the folder {INCEPTION} of any of them. Get this file "
        f"({INCEPTION_SIZE / 1e6:.0f} MB) from the release fid_weights of mseitzer/pytorch-fid on GitHub and put it "
        f"into {roots[0] / INCEPTION}, or use --features classifier, which needs no file."
    )


NETWORKS: dict[str, Callable[[Sequence[str | Path]], Features]] = {
    "classifier": open_classifier,
    "inception": open_inception,
}
