"""monDEQ implemented directly from the paper, as a baseline for the models of equipoise. Needs only torch.

    python benchmarks/plain_mondeq.py       # checks itself against dense matrices, in float64

Convolutional and multi-tier models of "Monotone operator equilibrium networks" (Winston and Kolter, NeurIPS 2020),
solved by Peaceman-Rachford splitting, line by line as in the paper: four circular convolutions for W (eq. 5), the
resolvent from the full complex Fourier transform and one n x n block per frequency (eq. 17, prop. D1), recomputed in
every forward pass (alg. 2), one stopping norm for the whole batch. Two things differ from the printed paper.
Algorithm 4 divides by 1 + alpha (1 + D), which is not the resolvent of D u - v; 1 + alpha D is. The learned scale g of
A^T A goes through softplus, since a negative g is not monotone.

A grid is two rows and columns larger than its image, and they come last; with two zeros between the image and its
circular copies a 5 x 5 kernel sees no wrapping. The grid of every tier but the last is rounded up to even, so that
stride 2 divides it; the strided result sits in the top left corner of the next grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Tiers = tuple[Tensor, ...]  # one tensor per tier, each (batch, channels, height, width)


# --- circular convolutions --------------------------------------------------------------------------------------------


def convolve(x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel, stride=stride)


def convolve_transposed(x: Tensor, kernel: Tensor) -> Tensor:
    return F.conv_transpose2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel, padding=2)


def strided_transposed(x: Tensor, kernel: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1), mode="circular")
    return F.conv_transpose2d(padded, kernel, stride=2, padding=3, output_padding=1)


def spectrum(kernel: Tensor, grid: tuple[int, int]) -> Tensor:
    """The blocks (frequencies, out, in) of a circular convolution (eq. C3)."""
    outputs, inputs, height, width = kernel.shape
    padded = F.pad(kernel, (0, grid[1] - width, 0, grid[0] - height)).roll((-1, -1), (2, 3))
    blocks = torch.fft.fft2(padded).conj()  # conv2d correlates, it does not convolve
    return blocks.permute(2, 3, 0, 1).reshape(-1, outputs, inputs)


# --- W and its resolvent ----------------------------------------------------------------------------------------------


class MonotoneConvolution(nn.Module):
    """W of section 4.2 (one tier) or 4.3 (several), with the weight normalisation of appendix E.2."""

    def __init__(self, channels: tuple[int, ...], size: tuple[int, int], m: float = 1.0) -> None:
        super().__init__()
        self.channels, self.m = channels, m
        self.sizes = [size]
        for _ in channels[1:]:
            height, width = self.sizes[-1]
            self.sizes.append(((height + 1) // 2, (width + 1) // 2))
        self.grids = [(height + 2, width + 2) for height, width in self.sizes]
        self.grids[:-1] = [(height + height % 2, width + width % 2) for height, width in self.grids[:-1]]

        def kernels(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> nn.ParameterList:
            return nn.ParameterList(nn.Conv2d(i, o, 3).weight for i, o in zip(inputs, outputs, strict=True))

        def scalars(count: int, value: float) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.tensor(value)) for _ in range(count))

        one = 0.5413  # softplus of it is 1
        self.A, self.B = kernels(channels, channels), kernels(channels, channels)
        self.S = kernels(channels[:-1], channels[1:])
        self.g, self.h = scalars(len(channels), one), scalars(len(channels), 1.0)
        self.s = scalars(len(channels) - 1, one)

    def kernels(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        A = [F.softplus(g).sqrt() * A / A.norm() for g, A in zip(self.g, self.A, strict=True)]
        B = [h * B / B.norm() for h, B in zip(self.h, self.B, strict=True)]
        S = [F.softplus(s).sqrt() * S / S.norm() for s, S in zip(self.s, self.S, strict=True)]
        return A, B, S

    def down(self, x: Tensor, S: Tensor, tier: int) -> Tensor:
        """From a tier to the next."""
        y = convolve(x, S, stride=2)
        height, width = self.grids[tier + 1]
        return F.pad(y, (0, width - y.shape[3], 0, height - y.shape[2]))

    def up(self, y: Tensor, S: Tensor, tier: int) -> Tensor:
        """The transpose of `down`: from the next tier back to this."""
        height, width = self.grids[tier]
        return strided_transposed(y[:, :, : height // 2, : width // 2], S)

    def forward(self, z: Tiers) -> Tiers:
        """W z (eq. D5)."""
        A, B, S = self.kernels()
        result = []
        for i, x in enumerate(z):
            y = (1 - self.m) * x - convolve_transposed(convolve(x, A[i]), A[i])
            y = y + convolve(x, B[i]) - convolve_transposed(x, B[i])
            if i < len(z) - 1:
                y = y - self.up(self.down(x, S[i], i), S[i], i)
            if i > 0:
                y = y - 2 * convolve_transposed(self.down(z[i - 1], S[i - 1], i - 1), A[i])
            result.append(y)
        return tuple(result)

    def transposed(self, z: Tiers) -> Tiers:
        """W^T z."""
        A, B, S = self.kernels()
        result = []
        for i, x in enumerate(z):
            y = (1 - self.m) * x - convolve_transposed(convolve(x, A[i]), A[i])
            y = y + convolve_transposed(x, B[i]) - convolve(x, B[i])
            if i < len(z) - 1:
                y = y - self.up(self.down(x, S[i], i), S[i], i)
                y = y - 2 * self.up(convolve(z[i + 1], A[i + 1]), S[i], i)
            result.append(y)
        return tuple(result)

    @torch.no_grad()
    def build_inverse(self, alpha: float) -> None:
        """The blocks of V = (I + alpha (I - W))^-1, tier by tier (eq. 17; with a strided convolution prop. D1)."""
        self.alpha = alpha
        A, B, S = self.now = self.kernels()
        self.inverses, self.strided = [], []
        for i, grid in enumerate(self.grids):
            a, b = spectrum(A[i], grid), spectrum(B[i], grid)
            eye = torch.eye(self.channels[i], dtype=a.dtype)
            D = torch.linalg.inv((1 + alpha * self.m) * eye + alpha * (a.mH @ a - b + b.mH))
            self.inverses.append(D)
            if i < len(S):  # Woodbury: four frequencies alias to one of the strided grid
                c = spectrum(S[i], grid)
                left, right = D @ c.mH, c @ D
                eye = torch.eye(self.channels[i + 1], dtype=c.dtype)
                K = torch.linalg.inv(4 / alpha * eye + self.alias(c @ left, grid))
                self.strided.append((left, K, right))

    def alias(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The sum of the four frequencies that stride 2 folds onto one."""
        height, width = grid
        y = x.reshape(2, height // 2, 2, width // 2, *x.shape[1:])
        return (y[0, :, 0] + y[0, :, 1] + y[1, :, 0] + y[1, :, 1]).reshape(-1, *x.shape[1:])

    def unalias(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        height, width = grid
        x = x.reshape(1, height // 2, 1, width // 2, *x.shape[1:])
        return x.expand(2, -1, 2, -1, -1, -1).reshape(height * width, *x.shape[4:])

    def inverse_of_tier(self, z: Tensor, tier: int, transpose: bool) -> Tensor:
        batch, channels, height, width = z.shape
        x = torch.fft.fft2(z).permute(2, 3, 1, 0).reshape(height * width, channels, batch).contiguous()
        D = self.inverses[tier]
        y = (D.mH if transpose else D) @ x
        if tier < len(self.strided):
            left, K, right = self.strided[tier]
            if transpose:
                left, K, right = right.mH, K.mH, left.mH
            y = y - left @ self.unalias(K @ self.alias(right @ x, (height, width)), (height, width))
        return torch.fft.ifft2(y.reshape(height, width, channels, batch).permute(3, 2, 0, 1)).real

    def inverse(self, z: Tiers) -> Tiers:
        """V z by back substitution (eq. D7)."""
        A, _, S = self.now
        x = [self.inverse_of_tier(z[0], 0, transpose=False)]
        for i in range(1, len(z)):
            coupling = convolve_transposed(self.down(x[-1], S[i - 1], i - 1), A[i])
            x.append(self.inverse_of_tier(z[i] - 2 * self.alpha * coupling, i, transpose=False))
        return tuple(x)

    def inverse_transposed(self, z: Tiers) -> Tiers:
        """V^T z, from the last tier to the first."""
        A, _, S = self.now
        last = len(z) - 1
        x = [self.inverse_of_tier(z[last], last, transpose=True)]
        for i in reversed(range(last)):
            coupling = self.up(convolve(x[0], A[i + 1]), S[i], i)
            x.insert(0, self.inverse_of_tier(z[i] - 2 * self.alpha * coupling, i, transpose=True))
        return tuple(x)


# --- the solver -------------------------------------------------------------------------------------------------------


def norm(z: Tiers) -> Tensor:
    return sum(x.pow(2).sum() for x in z).sqrt()  # type: ignore[union-attr]


def peaceman_rachford(
    linear: Callable[[Tiers], Tiers], prox: Callable[[Tiers], Tiers], zero: Tiers, tolerance: float, max_iterations: int
) -> tuple[Tiers, int]:
    """Algorithms 2 and 4: they differ in the two resolvents."""
    z, u = zero, zero
    for iteration in range(1, max_iterations + 1):
        u_half = tuple(2 * a - b for a, b in zip(z, u, strict=True))
        z_half = linear(u_half)
        u = tuple(2 * a - b for a, b in zip(z_half, u_half, strict=True))
        z, before = prox(u), z
        error = norm(tuple(a - b for a, b in zip(z, before, strict=True))) / norm(z)
        if error <= tolerance:
            return z, iteration
    return z, max_iterations


class Backpropagation(torch.autograd.Function):
    """The identity; its backward multiplies by (I - J W)^-T (theorem 3)."""

    @staticmethod
    def forward(ctx: Any, model: PlainMonDEQ, slopes: Tiers, *z: Tensor) -> Tiers:
        ctx.model, ctx.slopes = model, slopes
        return tuple(x.view_as(x) for x in z)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *ctx.model.solve_backward(ctx.slopes, v)


# --- the models -------------------------------------------------------------------------------------------------------


class PlainMonDEQ(nn.Module):
    """A monDEQ for images (appendix E.1), of one tier or several: its kernels, its input and its dense head.

    Args:
        shape: Channels, height and width of an image.
        channels: Of each tier. One tier is average-pooled 4 x 4 before the head; of several, the head reads the last.

    Example:
        PlainMonDEQ((1, 28, 28), (56,))  # "single convolution" of table E1: 84,460 parameters
    """

    def __init__(
        self, shape: tuple[int, int, int], channels: tuple[int, ...], classes: int = 10, tolerance: float = 1e-2
    ) -> None:
        super().__init__()
        self.alpha, self.tolerance, self.max_iterations = 1.0, tolerance, 300
        self.W = MonotoneConvolution(channels, shape[1:])
        self.U = nn.Conv2d(shape[0], channels[0], 3, padding=1)
        height, width = self.W.grids[-1]
        if len(channels) == 1:
            height, width = height // 4, width // 4
        self.head = nn.Linear(channels[-1] * height * width, classes)
        self.borders = []
        for size, grid in zip(self.W.sizes, self.W.grids, strict=True):
            border = torch.ones(grid, dtype=torch.bool)
            border[: size[0], : size[1]] = False
            self.borders.append(border)
        self.forward_iterations = self.backward_iterations = 0

    def activation(self, x: Tiers) -> Tiers:
        """ReLU, and zero on the border (appendix C.2)."""
        z = tuple(t.clamp(min=0) for t in x)  # relu would save what the next lines change
        for t, border in zip(z, self.borders, strict=True):
            t[:, :, border] = 0
        return z

    def slope(self, x: Tiers) -> Tiers:
        """The diagonal of J (eq. 10)."""
        J = tuple((t > 0).to(t.dtype) for t in x)
        for t, border in zip(J, self.borders, strict=True):
            t[:, :, border] = 0
        return J

    def equilibrium(self, x: Tensor) -> Tiers:
        """z* = s(W z* + U x + b), the input in the first tier."""
        (height, width), size = self.W.grids[0], self.W.sizes[0]
        bias = self.U(F.pad(x, (0, width - size[1], 0, height - size[0])))
        with torch.no_grad():
            self.W.build_inverse(self.alpha)
            zero = tuple(
                torch.zeros(len(x), c, *grid, dtype=x.dtype)
                for c, grid in zip(self.W.channels, self.W.grids, strict=True)
            )
            z, self.forward_iterations = peaceman_rachford(
                lambda u: self.W.inverse((u[0] + self.alpha * bias, *u[1:])),
                self.activation,
                zero,
                self.tolerance,
                self.max_iterations,
            )
        if not torch.is_grad_enabled():
            return z
        first, *others = self.W(z)  # one recorded evaluation of f carries the gradients to the parameters
        recorded = (first + bias, *others)
        return Backpropagation.apply(self, self.slope(recorded), *self.activation(recorded))  # type: ignore[no-any-return]

    @torch.no_grad()
    def solve_backward(self, J: Tiers, v: Tiers) -> Tiers:
        """u* = (I - J W)^-T v = v + W^T u~ (theorem 3, algorithm 4 with its resolvent put right)."""
        infinite = [t == 0 for t in J]
        D = [(1 - t) / t for t in J]

        def resolvent(u: Tiers) -> Tiers:
            z = tuple((a + self.alpha * b) / (1 + self.alpha * d) for a, b, d in zip(u, v, D, strict=True))
            for t, where in zip(z, infinite, strict=True):
                t[where] = 0
            return z

        zero = tuple(torch.zeros_like(t) for t in v)
        z, self.backward_iterations = peaceman_rachford(
            self.W.inverse_transposed, resolvent, zero, self.tolerance, self.max_iterations
        )
        return tuple(a + b for a, b in zip(v, self.W.transposed(z), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        z = self.equilibrium(x)
        features = F.avg_pool2d(z[0], 4) if len(z) == 1 else z[-1]
        return self.head(features.flatten(1))


# --- the check --------------------------------------------------------------------------------------------------------


def dense_convolution(kernel: Tensor, grid: tuple[int, int]) -> Tensor:
    """The matrix of a circular convolution, entry by entry."""
    (height, width), (outputs, inputs) = grid, kernel.shape[:2]
    matrix = kernel.new_zeros(outputs, height, width, inputs, height, width)
    for i in range(height):
        for j in range(width):
            for k in range(3):
                for l in range(3):
                    matrix[:, i, j, :, (i + k - 1) % height, (j + l - 1) % width] += kernel[:, :, k, l]
    return matrix


def dense_W(W: MonotoneConvolution) -> Tensor:
    """(1 - m) I - A^T A + B - B^T with block bidiagonal A and B (eq. D1-D4), differentiable in the parameters."""
    A, B, S = W.kernels()
    sizes = [c * h * w for c, (h, w) in zip(W.channels, W.grids, strict=True)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    a = b = torch.zeros(sum(sizes), sum(sizes), dtype=A[0].dtype)

    def put(matrix: Tensor, block: Tensor, row: int, column: int) -> Tensor:
        top, left = starts[row], starts[column]
        bottom, right = len(matrix) - top - block.shape[0], len(matrix) - left - block.shape[1]
        return matrix + F.pad(block, (left, right, top, bottom))

    for i, (n, grid) in enumerate(zip(sizes, W.grids, strict=True)):
        own = dense_convolution(A[i], grid).reshape(n, n)
        a = put(a, own, i, i)
        b = put(b, dense_convolution(B[i], grid).reshape(n, n), i, i)
        if i > 0:
            height, width = W.grids[i - 1]
            whole = dense_convolution(S[i - 1], (height, width))[:, ::2, ::2]
            whole = F.pad(whole, (0,) * 6 + (0, grid[1] - width // 2, 0, grid[0] - height // 2))
            down = whole.reshape(n, sizes[i - 1])
            a = put(a, down, i, i - 1)
            b = put(b, -own.mT @ down, i, i - 1)
    return (1 - W.m) * torch.eye(len(a), dtype=a.dtype) - a.mT @ a + b - b.mT


def check(channels: tuple[int, ...], size: tuple[int, int]) -> dict[str, float]:
    """Relative errors against dense matrices, with kernels far from where they start."""
    torch.manual_seed(0)
    model = PlainMonDEQ((2, *size), channels, classes=3, tolerance=1e-13).double()
    with torch.no_grad():
        for scale in (*model.W.g, *model.W.h, *model.W.s):
            scale.add_(3 * torch.rand(()))
    x, labels = torch.randn(2, 2, *size, dtype=torch.float64), torch.tensor([0, 2])
    W = dense_W(model.W)
    shapes = [(c, *grid) for c, grid in zip(channels, model.W.grids, strict=True)]
    counts = [c * h * w for c, h, w in shapes]

    def flat(z: Tiers) -> Tensor:
        return torch.cat([t.flatten(1) for t in z], 1)

    def apart(z: Tensor) -> Tiers:
        return tuple(t.reshape(-1, *shape) for t, shape in zip(z.split(counts, 1), shapes, strict=True))

    def error(value: Tensor, truth: Tensor) -> float:
        return float((value - truth).detach().norm() / truth.detach().norm())

    eye = torch.eye(len(W), dtype=W.dtype)
    errors = {}
    with torch.no_grad():
        model.W.build_inverse(0.7)
        V = torch.linalg.inv(eye + 0.7 * (eye - W))
        errors["W"] = error(flat(model.W(apart(eye))).mT, W)
        errors["W^T"] = error(flat(model.W.transposed(apart(eye))), W)
        errors["V"] = error(flat(model.W.inverse(apart(eye))).mT, V)
        errors["V^T"] = error(flat(model.W.inverse_transposed(apart(eye))), V)

    # Where z* > 0 it solves a linear system, which autograd differentiates without any theorem of the paper.
    z = flat(model.equilibrium(x))
    border = torch.cat([b.repeat(c, 1, 1).flatten() for c, b in zip(channels, model.borders, strict=True)])
    height, width = model.W.grids[0]
    bias = model.U(F.pad(x, (0, width - size[1], 0, height - size[0]))).flatten(1)
    bias = F.pad(bias, (0, len(W) - bias.shape[1]))
    solutions, violation = [], 0.0
    for i in range(len(x)):
        active = z[i].detach() > 0
        exact = torch.zeros_like(z[i]).masked_scatter(
            active, torch.linalg.solve((eye - W)[active][:, active], bias[i][active])
        )
        rest = (W @ exact + bias[i]).detach()[~active & ~border]
        violation = max(
            violation, float(rest.max()), -float(exact.detach().min())
        )  # both signs make it the equilibrium
        solutions.append(exact)
    reference = torch.stack(solutions)
    errors["z*"] = max(error(z, reference), violation)

    tiers = apart(reference)
    features = F.avg_pool2d(tiers[0], 4) if len(tiers) == 1 else tiers[-1]
    truth = torch.autograd.grad(F.cross_entropy(model.head(features.flatten(1)), labels), list(model.parameters()))
    F.cross_entropy(model(x), labels).backward()
    errors["gradient"] = max(error(p.grad, t) for p, t in zip(model.parameters(), truth, strict=True))  # type: ignore[arg-type]
    errors["iterations"] = model.forward_iterations
    return errors


def main() -> None:
    print("relative errors against dense matrices, float64")
    for channels, size in [((3,), (6, 7)), ((2, 3, 2), (8, 8)), ((2, 3, 2), (6, 9))]:
        errors = check(channels, size)
        print(f"  {channels!s:10} {size!s:7}", "  ".join(f"{name} {value:.1e}" for name, value in errors.items()))
        assert all(value < 1e-10 for name, value in errors.items() if name != "iterations")
    print("parameters (table E1)")
    for shape, channels, wanted in [
        ((1, 28, 28), (56,), 84_460),
        ((1, 28, 28), (16, 32, 32), 81_394),
        ((3, 32, 32), (81,), 172_218),
        ((3, 32, 32), (16, 32, 60), 170_194),
    ]:
        count = sum(p.numel() for p in PlainMonDEQ(shape, channels).parameters())
        print(f"  {channels!s:13} {shape}  {count:,}")
        assert count == wanted


if __name__ == "__main__":
    main()
