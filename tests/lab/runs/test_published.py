"""Published checkpoints: files of random numbers in the authors' layouts, converted, against the papers' equations."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional as F

import equipoise as eq
from equipoise.cli import main
from equipoise.lab.runs.published import mdeq_names
from equipoise.lab.runs.published.convert import convert
from equipoise.lab.runs.published.pickled import UnreadableCheckpoint
from equipoise.models import MDEQ

LAYOUTS = Path(__file__).parent / "layouts"


def layout(name):
    return {key: tuple(shape) for key, shape in json.loads((LAYOUTS / f"{name}.json").read_text()).items()}


def random_state(name, scale=1.0):
    """A state dict in a published layout; variances are positive, norms near 1."""
    state = OrderedDict()
    for key, shape in layout(name).items():
        if key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(7)
        elif key.endswith("running_var"):
            state[key] = torch.rand(shape) + 0.5
        else:
            fan = max(1, torch.Size(shape[1:]).numel())
            state[key] = torch.randn(shape) * scale * fan**-0.5 if len(shape) > 1 else torch.randn(shape) * 0.3 + 1
    return state


# The published models, by the names in their files (specification of the layouts; equations of the papers)


def norm(state, name, x):
    """BatchNorm in evaluation mode, with or without scale and shift."""
    scale, shift = state.get(f"{name}.weight"), state.get(f"{name}.bias")
    return F.batch_norm(x, state[f"{name}.running_mean"], state[f"{name}.running_var"], scale, shift)


def conv(state, name, x, stride=1):
    """A convolution that keeps the size, with weight normalisation if it has a scale and a direction."""
    if f"{name}.weight_v" in state:
        v = state[f"{name}.weight_v"]
        weight = state[f"{name}.weight_g"] * v / v.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    else:
        weight = state[f"{name}.weight"]
    return F.conv2d(x, weight, state.get(f"{name}.bias"), stride, weight.shape[-1] // 2)


def groups(state, name, x, count=8):
    return F.group_norm(x, count, state.get(f"{name}.weight"), state.get(f"{name}.bias"))


def cell(state, z, x):
    """f: a block per scale, all-to-all fusion, and a convolution after it."""
    y = []
    for i, part in enumerate(z):
        at = f"fullstage.branches.{i}.blocks.0"
        wide = F.relu(groups(state, f"{at}.gn1", conv(state, f"{at}.conv1", part)))
        b = conv(state, f"{at}.conv2", wide)
        b = groups(state, f"{at}.gn2", b + x if i == 0 else b)
        y.append(groups(state, f"{at}.gn3", F.relu(b + part)))
    out = []
    for i in range(len(z)):
        total = y[i]
        for j in range(len(z)):
            at, part = f"fullstage.fuse_layers.{i}.{j}.net", y[j]
            if j > i:
                part = groups(state, f"{at}.gnorm", conv(state, f"{at}.conv", part))
                total = total + F.interpolate(part, scale_factor=2 ** (j - i), mode="nearest")
            elif j < i:
                for k in range(i - j):
                    part = groups(state, f"{at}.{k}.gnorm", conv(state, f"{at}.{k}.conv", part, 2))
                    part = F.relu(part) if k < i - j - 1 else part
                total = total + part
        at = f"fullstage.post_fuse_layers.{i}"
        out.append(groups(state, f"{at}.gnorm", conv(state, f"{at}.conv", F.relu(total)), 4))
    return out


def stem(state, x, downsamplings):
    for number, at in enumerate((0, 3)):
        x = conv(state, f"downsample.{at}", x, 2 if number < downsamplings else 1)
        x = F.relu(norm(state, f"downsample.{at + 1}", x))
    if "stage0.0.weight" in state:
        x = F.relu(norm(state, "stage0.1", conv(state, "stage0.0", x)))
    return x


def bottleneck(state, at, z):
    y = F.relu(norm(state, f"{at}.bn1", conv(state, f"{at}.conv1", z)))
    y = F.relu(norm(state, f"{at}.bn2", conv(state, f"{at}.conv2", y)))
    y = norm(state, f"{at}.bn3", conv(state, f"{at}.conv3", y))
    return F.relu(y + norm(state, f"{at}.downsample.1", conv(state, f"{at}.downsample.0", z)))


def classification_head(state, z):
    y = bottleneck(state, "incre_modules.0.0", z[0])
    for i, part in enumerate(z[1:]):
        at = f"downsamp_modules.{i}"
        down = F.relu(norm(state, f"{at}.1", conv(state, f"{at}.0", y, 2)))
        y = bottleneck(state, f"incre_modules.{i + 1}.0", part) + down
    y = F.relu(norm(state, "final_layer.1", conv(state, "final_layer.0", y))).mean(dim=(2, 3))
    return F.linear(y, state["classifier.weight"], state["classifier.bias"])


def segmentation_head(state, z):
    resized = [F.interpolate(part, z[0].shape[2:], mode="bilinear", align_corners=True) for part in z[1:]]
    y = conv(state, "last_layer.0", torch.cat([z[0], *resized], dim=1))
    return conv(state, "last_layer.3", F.relu(norm(state, "last_layer.1", y)))


def published_logits(state, images, channels, downsamplings, steps, mean, std):
    """Logits after a number of plain steps from 0, in float64; the authors normalise images outside of the model."""
    state = {name: tensor.double() for name, tensor in state.items()}
    mean, std = (torch.tensor(value).double().view(-1, 1, 1) for value in (mean, std))
    x = stem(state, (images - mean) / std, downsamplings)
    height, width = x.shape[2:]
    z = [x.new_zeros(len(x), c, height >> i, width >> i) for i, c in enumerate(channels)]
    for _ in range(steps):
        z = cell(state, z, x)
    return (classification_head if "classifier.weight" in state else segmentation_head)(state, z)


def our_logits(model, images, steps):
    x = model.injections(images)
    z = model.equilibrium.f.start(*x)
    for _ in range(steps):
        z = model.equilibrium.f(z, *x)
    return model.read(z)


CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("name", "channels", "downsamplings", "side", "statistics"),
    [
        ("cifar10-small-public", (24, 24), 0, 32, CIFAR),
        ("cityscapes-small", (32, 64, 128, 256), 2, 64, IMAGENET),
    ],
)
@torch.no_grad()
def test_a_converted_mdeq_computes_what_the_published_one_does(
    tmp_path, name, channels, downsamplings, side, statistics
):
    state = random_state(f"mdeq-{name}")
    torch.save(state, tmp_path / "published.pth")
    converted = convert(tmp_path / "published.pth", "mdeq", tmp_path / "ours.safetensors")
    assert set(converted.used) == set(state)
    assert not converted.left_out
    assert converted.added == ("normalize.mean", "normalize.std")
    model = eq.load(converted.file)
    assert converted.parameters == sum(p.numel() for p in model.parameters())
    model = model.double()
    for name_of, value in zip(("mean", "std"), statistics, strict=True):  # exact, to compare beyond float32
        setattr(model.normalize, name_of, torch.tensor(value).double().view(-1, 1, 1))
    images = torch.rand(2, 3, side, side, dtype=torch.float64)
    expected = published_logits(state, images, channels, downsamplings, 3, *statistics)
    assert (our_logits(model, images, 3) - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("size", ["cifar10-large-public", "imagenet-small"])
def test_every_published_tensor_has_a_place_of_its_shape(size):
    with torch.device("meta"):
        state = {name: torch.empty(shape) for name, shape in layout(f"mdeq-{size}").items()}
        model = MDEQ(shape=(3, 64, 64), classes=state["classifier.weight"].shape[0], size=size)
    plan = mdeq_names.plan(Path("file.pth"), state)
    own = {name: tensor.shape for name, tensor in model.state_dict().items() if not name.startswith("normalize.")}
    assert {name: tensor.shape for name, tensor in plan.tensors.items()} == own
    assert plan.changes == (f"model.size={size}",)
    regularized = "cifar10-large-regularized" in " ".join(plan.notes)  # the same shapes, another dropout
    assert regularized == (size == "cifar10-large-public")


@torch.no_grad()
def test_a_converted_mondeq_solves_the_published_equation(tmp_path, capsys):
    """z = relu(W z + U x + b) with W = (1 - m) I - A^T A + B - B^T, for images normalised as the authors do."""
    state = random_state("mondeq-mnist-fc", scale=0.5)
    torch.save(state, tmp_path / "mnist_fc.pt")
    for m in (1.0, 0.3):
        out = tmp_path / f"m{m}.safetensors"
        assert main(["convert", str(tmp_path / "mnist_fc.pt"), "--as", "mondeq", "-o", str(out), "--m", str(m)]) == 0
        printed = capsys.readouterr().out
        assert "monDEQ, fully connected, 87 features, 10 classes; 84,313 parameters" in printed
        assert f"with m = {m:g}" in printed
        model = eq.load(out).double()
        model.layer.tolerance = eq.Tolerance(relative=1e-12, max_steps=2000)
        images = torch.rand(4, 1, 28, 28, dtype=torch.float64)
        A, B = (state[f"mon.linear_module.{name}.weight"].double() for name in "AB")
        W = (1 - m) * torch.eye(87, dtype=torch.float64) - A.T @ A + B - B.T
        x = (images.flatten(1) - model.normalize.mean.item()) / model.normalize.std.item()
        bias = x @ state["mon.linear_module.U.weight"].double().T + state["mon.linear_module.U.bias"].double()
        z = model.layer(*model.injections(images))
        assert (z - F.relu(z @ W.T + bias)).norm() <= 1e-10 * z.norm()
        assert (z > 0).any()
        logits = z @ state["Wout.weight"].double().T + state["Wout.bias"].double()
        assert torch.allclose(model(images), logits, rtol=1e-9)
    assert model.normalize.mean.item() == pytest.approx(0.1307)
    assert model.normalize.std.item() == pytest.approx(0.3081)


def test_wrappers_and_training_state_are_left_out(tmp_path, capsys):
    """As the authors' training script writes it: DataParallel, an optimizer, a score of numpy, two copies of f."""
    state = random_state("mdeq-cifar10-small-public")
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    wrapped |= {f"module.{n.replace('fullstage', 'fullstage_copy')}": t for n, t in state.items() if "fullstage" in n}
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    saved = {"epoch": 50, "perf": numpy.float64(0.8), "state_dict": wrapped, "optimizer": optimizer.state_dict()}
    for number, new in enumerate((True, False)):  # the format before torch 1.6, too
        file, out = tmp_path / f"checkpoint{number}.pth.tar", tmp_path / f"{number}.safetensors"
        torch.save(saved, file, _use_new_zipfile_serialization=new)
        assert main(["convert", str(file), "--as", "mdeq", "-o", str(out)]) == 0
        printed = capsys.readouterr().out
        assert "used              94 tensors: downsample.0.weight" in printed
        assert "left out          epoch, perf, optimizer: not part of the model: progress, optimizer and its" in printed
        assert f"left out          prefix module.: of {len(wrapped)} names, added by a wrapper of the model" in printed
        assert "a second copy of f, with the same weights" in printed
        own = eq.load(out).state_dict()
        assert torch.equal(
            own["equilibrium.f.blocks.1.0.conv2.scale"], state["fullstage.branches.1.blocks.0.conv2.weight_g"]
        )
    assert main(["convert", str(file), "--as", "mdeq", "-o", str(out)]) == 2
    assert "exists already, and is not overwritten" in capsys.readouterr().err


def test_files_without_a_place_for_batch_counts(tmp_path):
    """Files of old versions of torch do not count batches."""
    state = random_state("mdeq-cifar10-small-public")
    torch.save({n: t for n, t in state.items() if "num_batches" not in n}, tmp_path / "old.pth")
    converted = convert(tmp_path / "old.pth", "mdeq", tmp_path / "old.safetensors")
    assert [name for name in converted.added if "num_batches" not in name] == ["normalize.mean", "normalize.std"]


class Attack:
    def __reduce__(self):
        return os.mkdir, ("written-by-the-attack",)


def test_a_malicious_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = random_state("mondeq-mnist-fc")
    torch.save({"state_dict": state, "extra": Attack()}, "zip.pt")
    torch.save({"state_dict": state, "extra": Attack()}, "old.pt", _use_new_zipfile_serialization=False)
    Path("plain.pt").write_bytes(pickle.dumps(Attack()))
    for name in ("zip.pt", "old.pt"):
        with pytest.raises(UnreadableCheckpoint, match=r"names code, posix.mkdir. Nothing was run"):
            convert(Path(name), "mondeq")
    with pytest.raises(UnreadableCheckpoint, match=r"plain.pt"):
        convert(Path("plain.pt"), "mondeq")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.pt", "plain.pt", "zip.pt"]


def without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


A, U = "mon.linear_module.A.weight", "mon.linear_module.U.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: without(state, A), f"lacks {A}: it is not a monDEQ, or not complete."),
        (lambda state: {**state, "fc.weight": torch.zeros(1)}, "holds fc.weight, which no fully connected monDEQ has"),
        (lambda state: {**state, A: torch.zeros(87, 86)}, f"{A} has shape (87, 86); it must be (87, 87)"),
        (lambda state: {**state, U: torch.zeros(87, 3072)}, "has shape (87, 3072); it must be (features, 784)"),
        (lambda state: {**state, A: torch.zeros(87, 87, 3, 3)}, "is a convolutional monDEQ"),
        (lambda state: {**state, A: torch.zeros(87, 87).long()}, f"{A} is torch.int64 instead of torch.float32"),
        (lambda state: {**state, A: torch.zeros(1).expand(87, 87)}, "is not a plain tensor with all its numbers"),
        (lambda state: {**state, A: 3}, f"entry '{A}' has type int; it must be a tensor"),
        (lambda state: {**state, A: state[A].to("meta")}, "is not a plain tensor with all its numbers"),
        (lambda state: {**state, 1: state[A]}, "a tensor with a string as its name"),
        (lambda state: {**state, "Wout.weight": torch.zeros(())}, "Wout.weight has shape (); it must be (classes, fe"),
        (lambda state: {**state, f"module.{A}": state[A]}, f"holds '{A}' twice, with and without a prefix"),
        (lambda state: list(state.values()), "holds a list; expected a state dict"),
    ],
)
def test_files_that_do_not_fit_get_a_sentence(tmp_path, change, said):
    torch.save(change(random_state("mondeq-mnist-fc")), tmp_path / "file.pt")
    with pytest.raises(UnreadableCheckpoint) as caught:
        convert(tmp_path / "file.pt", "mondeq", tmp_path / "out.safetensors")
    assert said in str(caught.value)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: without(state, "classifier.bias"), "no tensor for head.classify.bias"),
        (lambda state: without(state, "classifier.weight"), "has no last layer"),
        (lambda state: {**state, "classifier.weight": torch.tensor(1.0)}, "has no last layer"),
        (
            lambda state: {**state, "downsample.1.weight": torch.zeros(23)},
            "downsample.1.weight has shape (23,) instead of (24,)",
        ),
        (lambda state: {**state, "incre_modules.0.0.bn1.weight": torch.zeros(8)}, "is not part of this model"),
        (lambda state: {**state, "layer4.weight": torch.zeros(8)}, "holds layer4.weight, which no checkpoint of the"),
        (
            lambda state: {**state, "incre_modules.0.0.conv1.weight": torch.zeros(9, 24, 1, 1)},
            "is an MDEQ of no published size: channels (24, 24), widened (120, 120)",
        ),
    ],
)
def test_an_mdeq_that_does_not_fit_gets_a_sentence(tmp_path, change, said):
    torch.save(change(random_state("mdeq-cifar10-small-public")), tmp_path / "file.pt")
    with pytest.raises(UnreadableCheckpoint) as caught:
        convert(tmp_path / "file.pt", "mdeq", tmp_path / "out.safetensors")
    assert said in str(caught.value)


def test_a_bomb_is_not_inflated(tmp_path):
    file = tmp_path / "bomb.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**7))
    with pytest.raises(UnreadableCheckpoint, match=r"inflates to 10,000,000 bytes; checkpoints of PyTorch are not"):
        convert(file, "mdeq")


def test_what_the_command_line_says(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "none.pt"), "--as", "mdeq"]) == 2
    assert f"there is no file {tmp_path / 'none.pt'}." in capsys.readouterr().err
    (tmp_path / "text.pt").write_text("hello")
    assert main(["convert", str(tmp_path / "text.pt"), "--as", "mdeq"]) == 2
    assert "is not a PyTorch checkpoint, or is damaged" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "text.pt"), "--as", "mdeq", "-o", "x.pt"]) == 2
    assert "its name must end in .safetensors" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", "file.pt", "--as", "mondq"])
    assert "did you mean 'mondeq'?" in capsys.readouterr().err
