"""Train, store and load the small networks on which `joint.py` measures input optimisation.

    python benchmarks/joint_nets.py [--folder FOLDER] [--again] [--threads N] [NAME ...]

There are four equilibrium networks: two decoders of 16x16 digits, one whose plain iteration converges fast ("easy") and
one where it converges slowly ("hard"); a classifier of MNIST; and an adapter, whose input is a task vector. Each one is
trained once from a fixed seed, in one or two minutes, and its weights are kept in FOLDER (`runs/joint` by default).

Every network has a map `f(z, x, *inputs)` with a tuple of tensors z, a zero initial state `z0(batch)` and a `head(z)`;
x is the input to optimise. `problem(name, index)` returns one of six problems on a batch of held-out data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from itertools import permutations
from math import log
from pathlib import Path
from time import process_time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.lab import data
from equipoise.lab.files import whole
from problems import conv, norm, relative_residual
from tables import Row, show

FOLDER = Path(__file__).parents[1] / "runs" / "joint"
SEED = 0
STEPS_OF_RESIDUAL = 8  # plain iterations from zero, after which the table reports the residual
SETTINGS: dict[str, dict[str, float]] = {  # weights trained with other settings are trained again
    "easy": {"residual": 0.002, "penalty": 2.0, "gain": 1.0, "steps": 500, "batch": 16, "lr": 4e-3},
    "hard": {"residual": 0.1, "penalty": 1.0, "gain": 3.0, "steps": 500, "batch": 16, "lr": 4e-3},
    "classifier": {"residual": 0.03, "penalty": 0.3, "gain": 1.0, "steps": 450, "batch": 32, "lr": 6e-3},
    "adapter": {"residual": 0.003, "penalty": 2.0, "gain": 1.0, "steps": 700, "batch": 12, "lr": 6e-3},
}

State = tuple[Tensor, ...]


class Block(nn.Module):
    """A residual block with an injection before its second norm and, optionally, FiLM after its first.

    Args:
        gain: factor of the state relative to the injection; the larger it is, the slower plain iteration converges.
    """

    def __init__(self, channels: int, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain
        self.first, self.second = conv(channels, channels), conv(channels, channels)
        self.inner, self.outer = norm(4, channels), norm(4, channels)

    def forward(self, z: Tensor, injection: Tensor | float, film: tuple[Tensor, Tensor] | None = None) -> Tensor:
        y = self.inner(self.first(z))
        if film is not None:
            y = film[0] * y + film[1]
        return torch.relu(self.outer(self.gain * self.second(torch.relu(y)) + injection) + z)


class TwoBranches(nn.Module):
    """A multiscale map: a residual block on each of two resolutions, then each is fused into the other (MDEQ)."""

    def __init__(self, fine: int, coarse: int, gain: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(channels, gain) for channels in (fine, coarse))
        self.up, self.down = conv(coarse, fine, 1), conv(fine, coarse, stride=2)
        self.norms = nn.ModuleList(norm(4, channels) for channels in (fine, coarse))

    def forward(self, z: State, injections: tuple[Tensor | float, ...]) -> State:
        fine, coarse = (block(*parts) for block, *parts in zip(self.blocks, z, injections, strict=True))
        fused = fine + F.interpolate(self.up(coarse), scale_factor=2.0), coarse + self.down(fine)
        return tuple(normalise(part) for normalise, part in zip(self.norms, fused, strict=True))


def merged(z: State) -> Tensor:
    """Return both branches at the finer resolution, as channels of one tensor."""
    return torch.cat([z[0], F.interpolate(z[1], scale_factor=2.0, mode="bilinear")], dim=1)


class Net(nn.Module):
    """A map f(z, x, *inputs), its zero initial state and a head; `shapes` are those of one sample's state."""

    shapes: tuple[tuple[int, ...], ...]

    def f(self, z: State, x: Tensor, *inputs: Tensor) -> State:
        raise NotImplementedError

    def head(self, z: State) -> Tensor:
        raise NotImplementedError

    def z0(self, batch: int) -> State:
        return tuple(torch.zeros(batch, *shape) for shape in self.shapes)


class Decoder(Net):
    """Images of 16x16 pixels in [-1, 1] from a latent vector x of 24 numbers, which is injected into both branches."""

    latent = 24
    shapes = ((8, 16, 16), (16, 8, 8))

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.map = TwoBranches(8, 16, gain)
        self.inject = nn.ModuleList(nn.Linear(self.latent, c * h * w) for c, h, w in self.shapes)
        self.to_image = nn.Sequential(conv(24, 16), norm(4, 16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh())

    def f(self, z: State, x: Tensor, *inputs: Tensor) -> State:
        pairs = zip(self.inject, self.shapes, strict=True)
        return self.map(z, tuple(linear(x).view(-1, *shape) for linear, shape in pairs))

    def head(self, z: State) -> Tensor:
        return self.to_image(merged(z))


class Classifier(Net):
    """Digits of 28x28 pixels in [0, 1]; x is a perturbation of the image, which is injected into the finer branch."""

    shapes = ((12, 14, 14), (16, 7, 7))

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.map = TwoBranches(12, 16, gain)
        layers = (conv(1, 12, stride=2), norm(4, 12), nn.ReLU(), conv(12, 12), norm(4, 12), nn.ReLU())
        self.stem = nn.Sequential(*layers)
        pooled = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * 32, 10))
        self.to_logits = nn.Sequential(conv(28, 32, 1), norm(4, 32), nn.ReLU(), *pooled)

    def f(self, z: State, x: Tensor, *inputs: Tensor) -> State:
        return self.map(z, (self.stem(inputs[0] + x), 0.0))

    def head(self, z: State) -> Tensor:
        return self.to_logits(merged(z))


class Adapter(Net):
    """Five classes of digits of 8x8 pixels in [0, 1]; x is the vector of a task, which says how the classes are named.

    A sample is a task with five images, all of which are in its state; x enters by FiLM. As in the paper, its factors
    are not centred at 1.
    """

    vector = 32
    shapes = ((5, 32, 4, 4),)

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(1, 32, stride=2), norm(4, 32), nn.ReLU())
        self.block, self.norm = Block(32, gain), norm(4, 32)
        self.film = nn.Linear(self.vector, 2 * 32)
        self.to_logits = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 5))

    def f(self, z: State, x: Tensor, *inputs: Tensor) -> State:
        film = self.film(x).repeat_interleave(5, dim=0)[:, :, None, None].chunk(2, dim=1)
        y = self.block(z[0].flatten(0, 1), self.stem(inputs[0].flatten(0, 1)), film)
        return (self.norm(y).view_as(z[0]),)

    def head(self, z: State) -> Tensor:
        return self.to_logits(z[0].flatten(0, 1)).view(-1, 5, 5)


# --- data -------------------------------------------------------------------------------------------------------------


@cache
def images(name: str, size: int, held_out: bool) -> tuple[Tensor, Tensor]:
    """Return the images of a split, pixels in [0, 1], and their labels."""
    found = data.load(name, validation=0)
    split = found.test if held_out else found.train
    pixels, labels = split.read(torch.arange(len(split)))
    pixels = pixels.float() / 255
    return (pixels if pixels.shape[-1] == size else F.interpolate(pixels, size=size, mode="bilinear")), labels


def digits(held_out: bool) -> Tensor:
    """Return scikit-learn's digits at 16x16, pixels in [-1, 1]."""
    return 2 * images("digits", 16, held_out)[0] - 1


@cache
def handwritten() -> str:
    """Return the data set of the classifier: MNIST or, where its files are missing, scikit-learn's digits."""
    try:
        data.load("mnist")
    except data.MissingData:
        return "digits"
    return "mnist"


@cache
def classes(held_out: bool) -> list[Tensor]:
    """Return the numbers of the images in each of the five classes: 0 and 5, 1 and 6, and so on."""
    labels = images("digits", 8, held_out)[1]
    return [torch.nonzero(labels % 5 == c).flatten() for c in range(5)]


@cache
def namings(held_out: bool) -> Tensor:
    """Return the permutations of the five classes: 24 are held out, 96 are trained on."""
    every = torch.tensor(list(permutations(range(5))))
    order = torch.randperm(120, generator=torch.Generator().manual_seed(SEED))
    return every[order[:24] if held_out else order[24:]]


# --- training ---------------------------------------------------------------------------------------------------------

Objective = Callable[[], tuple[Tensor, State, tuple[Tensor, ...]]]  # a loss, the equilibrium, and the inputs of f


def equilibrium(net: Net, *inputs: Tensor) -> State:
    """Return z* for training: at most 12 steps of Anderson acceleration, then 4 recorded ones for the gradient."""
    limit, gradient = eq.Tolerance(relative=1e-3, max_steps=12), eq.PhantomGradient(steps=4)
    z0 = net.z0(len(inputs[0]))
    return eq.fixed_point(net.f, z0, *inputs, tolerance=limit, gradient=gradient, on_failure="ignore").value


def solved(net: Net, *inputs: Tensor) -> State:
    """Return z* for scoring: 60 plain iterations at most."""
    limit = eq.Tolerance(relative=1e-5, max_steps=60)
    z0 = net.z0(len(inputs[0]))
    with torch.no_grad():
        return eq.fixed_point(net.f, z0, *inputs, solver=eq.Picard(), tolerance=limit, on_failure="ignore").value


def residual(net: Net, *inputs: Tensor) -> float:
    """Return the mean relative residual after eight plain iterations from zero."""
    with torch.no_grad():
        z = net.z0(len(inputs[0]))
        for _ in range(STEPS_OF_RESIDUAL):
            z = net.f(z, *inputs)
        return float(relative_residual(z, net.f(z, *inputs)).mean())


def fit(name: str, net: Net, objective: Objective, extra: nn.Module | None = None) -> None:
    """Minimise the objective and a Jacobian penalty with Adam.

    The weight of the penalty follows the residual, slightly negative below the desired one, so that training ends near
    it whatever the network. `extra` is a module that is trained along and thrown away.
    """
    from tqdm import tqdm

    settings = SETTINGS[name]
    parameters = [*net.parameters(), *(extra.parameters() if extra is not None else ())]
    steps = int(settings["steps"])
    optimizer = torch.optim.Adam(parameters, lr=settings["lr"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings["lr"], total_steps=steps)
    bar = tqdm(range(steps), desc=name, unit="step", disable=not sys.stderr.isatty(), leave=False)
    for _ in bar:
        loss, z, inputs = objective()
        point, fixed = tuple(part.detach() for part in z), tuple(part.detach() for part in inputs)
        gap = residual(net, *(part[:8] for part in fixed))
        bar.set_postfix(loss=f"{loss.item():.4f}", residual=f"{gap:.4f}")
        weight = settings["penalty"] * min(max(log(gap / settings["residual"]), -0.05), 1.0)
        loss = loss + weight * eq.jacobian_penalty(net.f, point, *fixed)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()


def train_decoder(name: str) -> tuple[Net, Row]:
    """Train a decoder together with a small convolutional encoder."""
    net, batch, train, test = Decoder(SETTINGS[name]["gain"]), int(SETTINGS[name]["batch"]), digits(False), digits(True)
    encoder = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, net.latent)),
    )

    def objective() -> tuple[Tensor, State, tuple[Tensor, ...]]:
        targets = train[torch.randint(len(train), (batch,))]
        x = encoder(targets)
        z = equilibrium(net, x)
        return F.mse_loss(net.head(z), targets), z, (x,)

    fit(name, net, objective, encoder)
    with torch.no_grad():
        x = encoder(test)
        loss = F.mse_loss(net.head(solved(net, x)), test)
    return net, {"data": "digits 16x16", "held-out loss": loss.item(), "residual": residual(net, x)}


def train_classifier(name: str) -> tuple[Net, Row]:
    """Train the classifier with x = 0."""
    net, batch = Classifier(SETTINGS[name]["gain"]), int(SETTINGS[name]["batch"])
    train, labels = images(handwritten(), 28, False)
    test, truth = (part[:1000] for part in images(handwritten(), 28, True))

    def objective() -> tuple[Tensor, State, tuple[Tensor, ...]]:
        rows = torch.randint(len(train), (batch,))
        inputs = torch.zeros(batch, 1, 28, 28), train[rows]
        z = equilibrium(net, *inputs)
        return F.cross_entropy(net.head(z), labels[rows]), z, inputs

    fit(name, net, objective)
    inputs = torch.zeros_like(test), test
    with torch.no_grad():
        logits = net.head(solved(net, *inputs))
    row = {"held-out loss": F.cross_entropy(logits, truth).item(), "residual": residual(net, *inputs)}
    return net, {"data": f"{handwritten()} 28x28", **row, "accuracy": (logits.argmax(1) == truth).float().mean().item()}


def train_adapter(name: str) -> tuple[Net, Row]:
    """Train the adapter together with one vector for each naming of the classes."""
    net, batch = Adapter(SETTINGS[name]["gain"]), int(SETTINGS[name]["batch"])
    pictures, named = images("digits", 8, False)[0], namings(False)
    vectors = nn.Embedding(len(named), net.vector)

    def objective() -> tuple[Tensor, State, tuple[Tensor, ...]]:
        rows = torch.stack([some[torch.randint(len(some), (batch,))] for some in classes(False)], dim=1)
        chosen = torch.randint(len(named), (batch,))
        x = vectors(chosen)
        inputs = (
            x + 0.3 * torch.randn_like(x),
            pictures[rows],
        )  # f must stay contractive at vectors it was not trained on
        z = equilibrium(net, *inputs)
        return task_cost(net.head(z), inputs[0], named[chosen]).mean(), z, inputs

    fit(name, net, objective, vectors)
    loss, _, inputs = objective()
    return net, {"data": "digits 8x8", "training loss": loss.item(), "residual": residual(net, *inputs)}


def task_cost(logits: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each task plus a small multiple of the mean square of its vector."""
    return F.cross_entropy(logits.mT, labels, reduction="none").mean(dim=1) + 0.01 * x.square().mean(dim=1)


KINDS: dict[str, tuple[type[Net], Callable[[str], tuple[Net, Row]]]] = {
    "easy": (Decoder, train_decoder),
    "hard": (Decoder, train_decoder),
    "classifier": (Classifier, train_classifier),
    "adapter": (Adapter, train_adapter),
}


def stored(name: str, folder: Path = FOLDER, again: bool = False) -> tuple[Net, Row]:
    """Return a trained network, frozen, and its row of the table; train and store it if it is not in the folder."""
    file = folder / f"{name}.pt"
    content = torch.load(file, weights_only=True) if file.exists() and not again else {}
    settings = {**SETTINGS[name], "data": handwritten() if name == "classifier" else "digits"}
    kind, train = KINDS[name]
    if content.get("settings") != settings:
        began = process_time()
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers must not depend on what is stored
            torch.manual_seed(SEED)
            net, row = train(name)
        row = {"network": name, **row, "seconds": process_time() - began}
        content = {"settings": settings, "row": row, "weights": net.state_dict()}
        with whole(file) as part:
            torch.save(content, part)
    net = kind(settings["gain"])
    net.load_state_dict(content["weights"])
    return net.eval().requires_grad_(False), content["row"]


@cache
def load(name: str, folder: Path = FOLDER) -> Net:
    return stored(name, folder)[0]


def decoder(name: str, folder: Path = FOLDER) -> Net:
    """Return the trained decoder "easy" or "hard"."""
    return load(name, folder)


def classifier(folder: Path = FOLDER) -> Net:
    return load("classifier", folder)


def adapter(folder: Path = FOLDER) -> Net:
    return load("adapter", folder)


# --- problems ---------------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Arguments of an input optimisation: `min_x loss(z, x, *inputs)` subject to `z = f(z, x, *inputs)`."""

    f: Callable[..., State]
    loss: Callable[..., Tensor]  # one cost per sample
    x0: Tensor
    z0: State
    inputs: tuple[Tensor, ...]
    constraint: str | None = None  # name of a constraint of equipoise


def batch_of(samples: Tensor, index: int, size: int) -> Tensor:
    if not 0 <= index < len(samples) // size:
        raise ValueError(f"index must be from 0 to {len(samples) // size - 1}, got {index}.")
    return samples[index * size : (index + 1) * size]


def mean_square(difference: Tensor) -> Tensor:
    return difference.flatten(1).square().mean(dim=1)


def blur(pictures: Tensor) -> Tensor:
    """Return the images convolved with a 5x5 Gaussian kernel of standard deviation 1."""
    weights = torch.exp(-torch.arange(-2.0, 3.0).square() / 2)
    kernel = torch.outer(weights, weights) / weights.sum() ** 2
    return F.conv2d(F.pad(pictures, (2, 2, 2, 2), mode="replicate"), kernel[None, None])


def reconstruction(name: str, index: int, folder: Path) -> Problem:
    """Find the latent vectors of eight digits: whole, without a square of 6x6 pixels, or blurred."""
    net = decoder({"inpainting": "hard", "deblurring": "easy"}.get(name, name), folder)
    targets = batch_of(digits(True), index, 8)
    start = torch.zeros(8, net.latent), net.z0(8)
    if name == "inpainting":
        mask, random = torch.ones_like(targets), torch.Generator().manual_seed(index)
        for sample, (row, column) in zip(mask, torch.randint(11, (8, 2), generator=random).tolist(), strict=True):
            sample[:, row : row + 6, column : column + 6] = 0

        def masked(z: State, x: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
            return mean_square(mask * net.head(z) - seen)

        return Problem(net.f, masked, *start, (mask * targets, mask))
    if name == "deblurring":
        return Problem(net.f, lambda z, x, seen: mean_square(blur(net.head(z)) - seen), *start, (blur(targets),))
    return Problem(net.f, lambda z, x, seen: mean_square(net.head(z) - seen), *start, (targets,))


def attack(name: str, index: int, folder: Path) -> Problem:
    """Find perturbations of length 1 at most that make the classifier prefer a wrong class, for 64 digits."""
    net = classifier(folder)
    pictures, labels = (batch_of(part, index, 64) for part in images(handwritten(), 28, True))

    def gap(z: State, x: Tensor, pictures: Tensor, labels: Tensor) -> Tensor:
        logits, true = net.head(z), F.one_hot(labels, 10).bool()
        return logits[true] - logits.masked_fill(true, -torch.inf).amax(dim=1)

    return Problem(net.f, gap, torch.zeros_like(pictures), net.z0(64), (pictures, labels), "L2Ball")


def adaptation(name: str, index: int, folder: Path) -> Problem:
    """Find the vectors of eight tasks from one image of each class; the namings of the classes repeat after 24."""
    net, every = adapter(folder), images("digits", 8, True)[0]
    smallest = min(map(len, classes(True)))
    rows = batch_of(torch.stack([some[:smallest] for some in classes(True)], dim=1), index, 8)
    labels = namings(True)[torch.arange(8 * index, 8 * index + 8) % 24]

    def cost(z: State, x: Tensor, pictures: Tensor, labels: Tensor) -> Tensor:
        return task_cost(net.head(z), x, labels)

    return Problem(net.f, cost, torch.zeros(8, net.vector), net.z0(8), (every[rows], labels))


PROBLEMS: dict[str, Callable[[str, int, Path], Problem]] = {
    **dict.fromkeys(("easy", "hard", "inpainting", "deblurring"), reconstruction),
    "attack": attack,
    "adapter": adaptation,
}


def problem(name: str, index: int, folder: Path = FOLDER) -> Problem:
    """Return a problem on one batch of held-out data; batches with different indices share no sample.

    Args:
        name: key of `PROBLEMS`.
        index: number of the batch, from 0.
        folder: folder of the trained networks.
    """
    return PROBLEMS[name](name, index, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the networks of the benchmark of input optimisation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"networks: {', '.join(SETTINGS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the weights (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="train again, even if weights are stored")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(SETTINGS):
        parser.error(f"unknown network {', '.join(sorted(unknown))}; allowed: {', '.join(SETTINGS)}.")
    torch.set_num_threads(arguments.threads)
    names = arguments.names or list(SETTINGS)
    rows = [stored(name, arguments.folder, arguments.again)[1] for name in names]
    rows = [{key: f"{v:.4f}" if isinstance(v, float) and key != "seconds" else v for key, v in r.items()} for r in rows]
    show(f"Trained networks; residual after {STEPS_OF_RESIDUAL} plain iterations, processor seconds", rows)


if __name__ == "__main__":
    main()
