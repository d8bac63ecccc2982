"""Products of codes in plain PyTorch: the definition that the kernels are tested against.

Codes are multiplied and added up in float64. Every partial sum is a whole number below 2**53 as
long as fewer than 2**38 products are added, so no order of additions rounds anything.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from fixedpoint_kernels import philox
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.products.shapes import LOWEST_EXPONENT, NOT_FINITE, Window, shift_room


def convolve(
    x: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    window: Window,
    dtype: torch.dtype,
    statistics: bool,
) -> tuple[Tensor, Tensor | None]:
    """See ``fixedpoint_kernels.products.convolve``; x (n, c, h, w), weight (o, c / groups, r, s)."""
    sums = F.conv2d(x.double(), weight.double(), None, *window)
    return finish(sums, exponents, 1, dtype), (sum_up(sums) if statistics else None)


def input_gradient(
    grad: Tensor,
    weight: Tensor,
    exponents: Tensor | None,
    size: tuple[int, int],
    window: Window,
    dtype: torch.dtype,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_input_gradient``; grad (n, o, oh, ow)."""
    shape = [len(grad), weight.shape[1] * window.groups, *size]
    numbers: Any = window  # pairs, where torch's annotation has single numbers
    sums = conv2d_input(shape, weight.double(), grad.double(), *numbers)
    return finish(sums, exponents, 0, dtype)


def weight_gradient(
    x: Tensor,
    grad: Tensor,
    exponents: Tensor | None,
    kernel: tuple[int, int],
    window: Window,
) -> Tensor:
    """See ``fixedpoint_kernels.products.convolve_weight_gradient``."""
    stride, padding, dilation, groups = window
    columns = F.unfold(x.double(), kernel, dilation, padding, stride)  # (n, c * r * s, positions)
    columns = columns.unflatten(1, (groups, -1))
    rows = grad.double().unflatten(1, (groups, -1)).flatten(3)  # (n, groups, o / groups, positions)
    sums = (rows @ columns.mT).long().flatten(1, 2)  # (n, o, c / groups * r * s)
    return fold(sums, exponents, rows.shape[0] * rows.shape[3]).unflatten(1, (-1, *kernel))


def finish(sums: Tensor, exponents: Tensor | None, dim: int, dtype: torch.dtype) -> Tensor:
    """Return whole numbers times powers of two, one for each index of ``dim``, or one for all."""
    if exponents is None:
        return sums.to(dtype)
    if sums.is_floating_point():
        sums = sums + 0.0  # integers have no -0
    scale = powers_of_two(exponents).view([-1 if i == dim else 1 for i in range(sums.dim())])
    return (sums.to(torch.float32) * scale).to(dtype)


def finish_empty(out: Tensor, exponents: Tensor | None) -> Tensor:
    """Fill ``out`` with what sums of nothing finish as: 0, or NaN for samples without a power."""
    none = torch.zeros(1 if exponents is None else exponents.numel(), 1, 1, 1, device=out.device)
    return out.copy_(finish(none, exponents, 0, out.dtype).expand_as(out))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return float32 ``2**e``; exponents outside -126 to 128 are taken to be there, 2**128 inf."""
    return (exponents.clamp(LOWEST_EXPONENT, NOT_FINITE).int() + 127 << 23).view(torch.float32)


def to_bfloat16(x: Tensor) -> Tensor:
    """Round to nearest, ties to even, as processors do by one instruction: what is below 2**-126 becomes 0."""
    return torch.where(x.abs() < 2.0**LOWEST_EXPONENT, x * 0.0, x).bfloat16()


def sum_up(sums: Tensor) -> Tensor:
    """Return (3, channels) int64: sums, and the high and low 32 bits of the sums of squares."""
    values = sums.long()
    squares, dims = values * values, (0, 2, 3)
    return carried(values.sum(dims), (squares >> 32).sum(dims), (squares & 0xFFFFFFFF).sum(dims))


def carried(sums: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Return the three as one tensor, what is above 32 bits of ``low`` moved to ``high``."""
    return torch.stack([sums, high + (low >> 32), low & 0xFFFFFFFF])


def fold(sums: Tensor, exponents: Tensor | None, positions: int) -> Tensor:
    """Add up each sample's whole numbers times its power of two, exactly, and round once.

    sums (n, ...) int64; ``positions`` of all samples. Samples whose power is more than
    ``shift_room`` bits below the largest add nothing.
    """
    if exponents is None:
        return sums.sum(0)
    room = shift_room(positions)
    bounded = exponents.clamp(LOWEST_EXPONENT, NOT_FINITE).long().expand(len(sums))
    top = bounded.amax() if len(sums) else bounded.new_zeros(())
    shift = (room - top + bounded).view([-1] + [1] * (sums.dim() - 1))
    total = torch.where(shift >= 0, sums << shift.clamp(min=0), 0).sum(0)
    return folded(total, top, room)


def folded(total: Tensor, top: Tensor, room: int) -> Tensor:
    """Return ``total * 2**(top - room)`` as float32."""
    return total.to(torch.float32) * 2.0**-room * powers_of_two(top)


def round_per_sample(x: Tensor, key: Key) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.products.round_per_sample``; x (n, elements), ``key.offset`` first."""
    n, elements = x.shape
    largest = x.float().abs().view(torch.int32).amax(1) if elements else x.new_zeros(n).int()
    exponents = exponents_of(largest)
    words = -(elements // -16) * 4  # a sample begins with a block of noise
    noise = philox.words(n * words, key._replace(offset=key.offset * words), x.device)
    noise = torch.stack([noise >> 8 * i & 255 for i in range(4)], 1).view(n, -1)[:, :elements]
    scaled = x.float() * powers_of_two(-exponents)[:, None] * 256.0
    whole = torch.round(scaled).nan_to_num(0.0, 0.0, 0.0).long()
    codes = torch.where((exponents == NOT_FINITE)[:, None], 0, whole + noise >> 8)
    return codes.to(torch.int8), exponents


def exponents_of(largest: Tensor) -> Tensor:
    """Return the least ``e`` with ``largest <= 127 * 2**e``, from the bits of float32 >= 0."""
    above = (largest & 0x7FFFFF) > 0x7E0000  # 127 / 64
    exponents = (largest >> 23) - 133 + above.int()
    exponents = exponents.clamp(min=LOWEST_EXPONENT)
    return torch.where(largest >= 0x7F800000, NOT_FINITE, exponents).int()
