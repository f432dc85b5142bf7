"""How close images are to the truth, per image: peak signal-to-noise ratio and structural similarity.

Images are in [-1, 1], so the peak of the PSNR is 2. The JIIO authors' code computes -10 log10(mse) on that range,
which is 6.02 dB too low.
"""

import torch
from torch import Tensor

PEAK = 2.0


def psnr(images: Tensor, truth: Tensor, peak: float = PEAK) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, 10 log10(peak^2 / mse).

    Args:
        images, truth: (batch, channels, height, width).
        peak: width of the range of pixels.
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    return peak_signal_noise_ratio(images, truth, data_range=peak, reduction="none", dim=(1, 2, 3))


def psnr_of_error(errors: Tensor) -> Tensor:
    """Return the PSNR for mean squared errors of images in [-1, 1], in double precision."""
    return 10 * torch.log10(PEAK**2 / errors.double().clamp(min=1e-30))


def ssim(images: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity of each image, at most 1, with the usual Gaussian window (sigma 1.5).

    It is computed on pixels scaled to [0, 1], as is usual: unlike the PSNR, it depends on where black is.

    Args:
        images, truth: (batch, channels, height, width), in [-1, 1], at least 11 x 11 pixels.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    scaled = ((images + 1) / 2, (truth + 1) / 2)
    similarity = structural_similarity_index_measure(*scaled, data_range=1.0, reduction="none")
    assert isinstance(similarity, Tensor)
    return similarity
