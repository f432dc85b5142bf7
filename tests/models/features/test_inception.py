"""The FID's Inception network: layout of its state dict, and every kind of block against plain functions."""

import pytest
import torch
from torch.nn import functional as F

from equipoise.models.features.inception import FidInception


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    made = FidInception().eval()
    for name, tensor in made.state_dict().items():  # statistics that are not those of a new network
        if "running" in name:
            tensor.uniform_(0.5, 1.5)
    return made


def test_layout_is_that_of_the_published_file(network):
    state = network.state_dict()
    assert len(state) == 94 * 6 + 2
    assert sum(parameter.numel() for parameter in network.parameters()) == 23_850_960
    shapes = {
        "Conv2d_1a_3x3.conv.weight": (32, 3, 3, 3),
        "Conv2d_4a_3x3.bn.num_batches_tracked": (),
        "Mixed_5b.branch1x1.bn.running_mean": (64,),
        "Mixed_5b.branch5x5_2.conv.weight": (64, 48, 5, 5),
        "Mixed_5d.branch_pool.conv.weight": (64, 288, 1, 1),
        "Mixed_6a.branch3x3dbl_3.conv.weight": (96, 96, 3, 3),
        "Mixed_6c.branch7x7dbl_4.conv.weight": (160, 160, 7, 1),
        "Mixed_7a.branch7x7x3_4.conv.weight": (192, 192, 3, 3),
        "Mixed_7b.branch3x3_2a.conv.weight": (384, 384, 1, 3),
        "Mixed_7c.branch3x3dbl_3b.conv.weight": (384, 384, 3, 1),
        "fc.weight": (1008, 2048),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def convolve(state, x, *names, stride=1, padding=None):
    """Apply convolutions one after the other; stride and padding are those of the last."""
    for name in names:
        weight, last = state[f"{name}.conv.weight"], name == names[-1]
        same = tuple(side // 2 for side in weight.shape[2:])
        x = F.conv2d(x, weight, None, stride if last else 1, same if padding is None or not last else padding)
        numbers = [state[f"{name}.bn.{key}"] for key in ("running_mean", "running_var", "weight", "bias")]
        x = F.relu(F.batch_norm(x, *numbers, eps=1e-3))
    return x


def average(x):
    """3x3 means over the pixels inside the image."""
    kernel = torch.ones(x.shape[1], 1, 3, 3)
    inside = F.conv2d(torch.ones_like(x), kernel, padding=1, groups=x.shape[1])
    return F.conv2d(x, kernel, padding=1, groups=x.shape[1]) / inside


def chain(branch, steps):
    return [f"{branch}_{step}" for step in range(1, steps + 1)]


def block_of(network, name, size):
    block = getattr(network, name)
    channels = next(block.children()).conv.in_channels
    x = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1)).relu()
    with torch.no_grad():
        return block.state_dict(), x, block(x)


@pytest.mark.parametrize("name", ["Mixed_5b", "Mixed_5d"])
def test_blocks_of_35_pixels(network, name):
    state, x, found = block_of(network, name, 6)
    parts = [
        convolve(state, x, "branch1x1"),
        convolve(state, x, *chain("branch5x5", 2)),
        convolve(state, x, *chain("branch3x3dbl", 3)),
        convolve(state, average(x), "branch_pool"),
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1))


@pytest.mark.parametrize("name", ["Mixed_6b", "Mixed_6e"])
def test_blocks_of_17_pixels(network, name):
    state, x, found = block_of(network, name, 5)
    parts = [
        convolve(state, x, "branch1x1"),
        convolve(state, x, *chain("branch7x7", 3)),
        convolve(state, x, *chain("branch7x7dbl", 5)),
        convolve(state, average(x), "branch_pool"),
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1))


@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("Mixed_6a", (["branch3x3"], chain("branch3x3dbl", 3))),
        ("Mixed_7a", (chain("branch3x3", 2), chain("branch7x7x3", 4))),
    ],
)
def test_blocks_that_halve_the_image(network, name, branches):
    state, x, found = block_of(network, name, 9)
    parts = [convolve(state, x, *names, stride=2, padding=0) for names in branches]
    assert found.shape[2:] == (4, 4)
    torch.testing.assert_close(found, torch.cat([*parts, F.max_pool2d(x, 3, 2)], 1))


@pytest.mark.parametrize(("name", "pool"), [("Mixed_7b", average), ("Mixed_7c", lambda x: F.max_pool2d(x, 3, 1, 1))])
def test_blocks_of_8_pixels(network, name, pool):
    state, x, found = block_of(network, name, 4)
    three, double = convolve(state, x, "branch3x3_1"), convolve(state, x, *chain("branch3x3dbl", 2))
    parts = [
        convolve(state, x, "branch1x1"),
        *(convolve(state, three, f"branch3x3_2{letter}") for letter in "ab"),
        *(convolve(state, double, f"branch3x3dbl_3{letter}") for letter in "ab"),
        convolve(state, pool(x), "branch_pool"),
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1))


def test_sizes_are_those_of_the_paper(network):
    sizes = {}
    hooks = [
        getattr(network, name).register_forward_hook(
            lambda _, __, output, name=name: sizes.update({name: tuple(output.shape[1:])})
        )
        for name in ("Conv2d_1a_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c")
    ]
    with torch.no_grad():
        features = network.features(torch.rand(1, 1, 20, 30))  # gray, of any size
    for hook in hooks:
        hook.remove()
    assert features.shape == (1, 2048)
    assert sizes == {
        "Conv2d_1a_3x3": (32, 149, 149),
        "Conv2d_4a_3x3": (192, 71, 71),
        "Mixed_5d": (288, 35, 35),
        "Mixed_6e": (768, 17, 17),
        "Mixed_7c": (2048, 8, 8),
    }


def test_images_are_scaled_to_the_range_of_the_network(network):
    seen = []
    hook = network.Conv2d_1a_3x3.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network.features(torch.stack([torch.zeros(3, 2, 2), torch.ones(3, 2, 2)]))
    hook.remove()
    assert seen[0].shape == (2, 3, 299, 299)
    torch.testing.assert_close(seen[0], torch.tensor([-1.0, 1.0])[:, None, None, None].expand_as(seen[0]))


def test_wrong_channels_get_a_sentence(network):
    with pytest.raises(ValueError, match=r"images have shape \(2, 4, 8, 8\); it must be \(batch, 1 or 3,"):
        network.features(torch.rand(2, 4, 8, 8))
