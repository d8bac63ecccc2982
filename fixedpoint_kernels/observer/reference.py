"""The observer in plain PyTorch: the definition that the kernels are tested against."""

import torch
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding.reference import quantize

MAGNITUDES = 257
"""Length of a table of counts: index ``k`` has the values with ``ceil(log2(|x|)) = k - 127``, the
first two 0 and numbers below ``2**-126``; the last two are infinity (or above 2**127) and NaN."""

_NO_NOISE = Key(0, 0)


def observe(
    x: Tensor, y: Tensor | None, ste_mask: Tensor, fmt: FixedPoint | None
) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.observer.round_and_observe``; all are contiguous.

    Args:
        x: Values.
        y: Where to write what they are rounded to; None: nowhere.
        ste_mask: Where to write the mask, uint8.
        fmt: The format; None: they are not rounded, and ``y`` is None.

    Returns:
        Counts and sums.
    """
    values = x.detach().float()
    inside = torch.ones_like(values, dtype=torch.bool)
    if fmt is not None:
        quantize(x, torch.empty_like(x) if y is None else y, inside, fmt, "nearest", _NO_NOISE)
    ste_mask.copy_(inside + 2 * (inside & (values != 0)))
    parts = _widened(values.amin()), _widened(values.square()).sum(), _widened((~inside).sum())
    return _magnitudes(values), torch.stack(parts)


def observe_gradient(grad: Tensor, ste_mask: Tensor, out: Tensor | None) -> Tensor:
    """See ``fixedpoint_kernels.observer.mask_and_observe``; all are contiguous.

    Args:
        grad: Gradient.
        ste_mask: What ``observe`` wrote.
        out: Where to write the masked gradient; None: nowhere.

    Returns:
        The squared norm, 0-d.
    """
    if out is not None:
        out.copy_(torch.where(ste_mask % 2 == 1, grad, 0.0))
    return _widened(torch.where(ste_mask > 1, grad.detach().float(), 0.0).square_()).sum()


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


def _magnitudes(x: Tensor) -> Tensor:
    bits = x.view(torch.int32) & 0x7FFFFFFF  # without the sign
    # the biased exponent, one more where the mantissa is not 0; NaN overflows to 256
    indices = bits.add_(0x7FFFFF).bitwise_right_shift_(23).bitwise_and_(0x1FF)
    return torch.bincount(indices.flatten(), minlength=MAGNITUDES)
