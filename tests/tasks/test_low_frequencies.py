"""Low frequencies of images: those of scipy's cosine transform, scaled, and what they keep of an image."""

import pytest
import torch
from scipy.fft import dctn

from equipoise.tasks.low_frequencies import LUMA_CHROMA, low_frequencies, lowest


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (6, 10)])
def test_coefficients_are_those_of_scipy(channels, size):
    images = torch.randn(4, channels, *size, dtype=torch.float64)
    count = 24
    found = low_frequencies(images, count)
    parts = images if channels == 1 else torch.einsum("kc,bchw->bkhw", torch.tensor(LUMA_CHROMA).double(), images)
    spectrum = torch.from_numpy(dctn(parts.numpy(), axes=(2, 3), norm="ortho"))
    channel, row, column, scale = lowest(channels, *size, count)
    torch.testing.assert_close(found, spectrum[:, channel, row, column] / scale)
    assert found.shape == (4, count)
    assert len(set(zip(channel.tolist(), row.tolist(), column.tolist(), strict=True))) == count


def test_the_lowest_frequency_is_the_mean():
    """Constant images have no other; two thirds of the numbers of a colour image are of its brightness."""
    gray = torch.full((2, 3, 8, 8), 0.5)
    found = low_frequencies(gray, 12)
    assert (found.abs() > 1e-5).sum(dim=1).tolist() == [1, 1]
    assert (lowest(3, 8, 8, 12)[0] == 0).sum() == 8


def test_all_frequencies_of_a_gray_image_determine_it():
    images = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    matrix = low_frequencies(torch.eye(16, dtype=torch.float64).view(16, 1, 4, 4), 16)
    assert torch.linalg.matrix_rank(matrix) == 16
    torch.testing.assert_close(low_frequencies(images, 16), images.flatten(1) @ matrix)


def test_wrong_arguments_get_a_sentence():
    with pytest.raises(ValueError, match="images have 2 channels; low frequencies need 1 or 3"):
        low_frequencies(torch.zeros(1, 2, 4, 4), 4)
    with pytest.raises(ValueError, match="count is 17"):
        low_frequencies(torch.zeros(1, 1, 4, 4), 17)
