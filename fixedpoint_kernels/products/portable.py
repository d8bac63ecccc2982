"""Products of codes by matrix products of PyTorch: where no kernel of our own fits.

Codes are laid out as matrices, and multiplied as int8 (``"stock"``) or as float32, in sums that
float32 holds exactly (``"float"``). A convolution of torch would not do: some of its algorithms
(Winograd's) are not exact.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fixedpoint_kernels._torch_private.tensors import int_mm
from fixedpoint_kernels.products import reference
from fixedpoint_kernels.products.shapes import Window

_EXACT = 2**24 // (255 * 128)  # products that float32 adds up exactly


def convolve(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    window: Window,
    dtype: torch.dtype,
    statistics: bool,
    path: str,
) -> tuple[Tensor, Tensor | None]:
    """See ``fixedpoint_kernels.products.convolve``."""
    kernel, shape = (weight.shape[2], weight.shape[3]), (x.shape[2], x.shape[3])
    columns, size = _columns(x, kernel, window), window.outputs(shape, kernel)
    parts = []
    for inputs, rows in zip(columns, weight.flatten(1).chunk(window.groups), strict=True):
        flat = inputs.transpose(1, 2).flatten(0, 1)  # (n * positions, c * r * s)
        parts.append(MULTIPLY[path](flat, rows.mT))
    sums = torch.cat(parts, 1).view(len(x), *size, len(weight)).permute(0, 3, 1, 2)
    return reference.finish(sums, exponents, 1, dtype), (
        reference.sum_up(sums) if statistics else None
    )


def input_gradient(  # noqa: PLR0913
    grad: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    size: tuple[int, int],
    window: Window,
    dtype: torch.dtype,
    path: str,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_input_gradient``."""
    parts, (stride, padding, dilation, groups) = [], window
    positions = grad.shape[2] * grad.shape[3]
    weights = weight.flatten(1).chunk(groups)
    for rows, part in zip(grad.permute(0, 2, 3, 1).chunk(groups, 3), weights, strict=True):
        columns = MULTIPLY[path](rows.flatten(0, 2), part)  # (n * positions, c * r * s)
        columns = columns.view(len(grad), positions, part.shape[1]).mT.double()
        kernel = weight.shape[2:]
        parts.append(
            F.fold(columns, size, kernel, dilation, padding, stride)
        )  # exact: see reference
    return reference.finish(torch.cat(parts, 1), exponents, 0, dtype)


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    exponents: Tensor | None,
    kernel: tuple[int, int],
    window: Window,
    path: str,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_weight_gradient``."""
    columns = _columns(x, kernel, window)
    gradients = grad.flatten(2).chunk(window.groups, 1)
    powers = (
        torch.zeros(1, dtype=torch.int32, device=x.device)
        if exponents is None
        else exponents.unique()
    )
    own = powers if exponents is None else exponents
    sums = []
    for power in powers if len(x) else []:  # samples of one power are one long one
        some = (own == power).expand(len(x)).nonzero().flatten()
        parts = [
            MULTIPLY[path](rows[some].transpose(0, 1).flatten(1), inputs[some].mT.flatten(0, 1))
            for rows, inputs in zip(gradients, columns, strict=True)
        ]
        sums.append(torch.cat(parts).long())
    shape = grad.shape[1], x.shape[1] // window.groups * kernel[0] * kernel[1]
    total = (
        torch.stack(sums) if sums else torch.zeros(0, *shape, dtype=torch.int64, device=x.device)
    )
    positions = grad.shape[0] * grad.shape[2] * grad.shape[3]
    powers = None if exponents is None else powers[: len(total)]
    return reference.fold(total, powers, positions).unflatten(1, (-1, *kernel))


def _columns(x: Tensor, kernel: tuple[int, int], window: Window) -> tuple[Tensor, ...]:
    """Return (n, c / groups * r * s, positions) for each group."""
    stride, padding, dilation, groups = window
    down, across = padding  # of which unfold takes no images alone
    padded = F.pad(x, (across, across, down, down)).float()
    columns = F.unfold(padded, kernel, dilation, stride=stride).to(x.dtype)
    return columns.chunk(groups, 1)


def _multiply_float(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices of codes, (m, k) by (k, n), to float64."""
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float64, device=a.device)
    with torch.autocast(a.device.type, enabled=False):
        for first in range(0, a.shape[1], _EXACT):
            some = slice(first, first + _EXACT)
            total += a[:, some].float() @ b[some].float()
    return total


def _multiply_int8(a: Tensor, b: Tensor) -> Tensor:
    """As ``_multiply_float``, to int64; an unsigned operand is moved by 128."""
    total = torch.zeros(len(a), b.shape[1], dtype=torch.int64, device=a.device)
    if a.dtype is torch.uint8:
        total += 128 * b.long().sum(0)
        a = (a ^ 128).view(torch.int8)
    if b.dtype is torch.uint8:
        total += 128 * a.long().sum(1, keepdim=True)
        b = (b ^ 128).view(torch.int8)
    for first in range(0, a.shape[1], 2**16):  # so many products fit in int32
        some = slice(first, first + 2**16)
        total += int_mm(_copied(a[:, some]), _copied(b[some]))
    return total


def _copied(x: Tensor) -> Tensor:
    """Copy: ``_int_mm`` trusts the strides of dimensions of one element, which mean nothing."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


MULTIPLY = {"stock": _multiply_int8, "float": _multiply_float}
