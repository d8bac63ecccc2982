"""Surveys in plain PyTorch: the definition that the kernels are tested against."""

import torch
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding.reference import quantize

MAGNITUDES = 257
"""Length of a table of counts: place ``k`` has the values with ``ceil(log2(|x|)) = k - 127``, the
first two 0 and numbers below ``2**-126``; the last two are infinity (or above 2**127) and NaN."""

_NO_NOISE = Key(0, 0)


def survey(
    x: Tensor, y: Tensor | None, marks: Tensor, fmt: FixedPoint | None
) -> tuple[Tensor, Tensor]:
    """See ``fixedpoint_kernels.survey.round_and_survey``; all are contiguous.

    Args:
        x: Values.
        y: Where to write what they are rounded to; None as ``fmt`` is.
        marks: Where to write these, uint8.
        fmt: The format.

    Returns:
        Counts and sums.
    """
    values = x.detach().float()
    inside = torch.ones_like(values, dtype=torch.bool)
    if fmt is not None and y is not None:
        quantize(x, y, inside, fmt, "nearest", _NO_NOISE)
    marks.copy_(inside + 2 * (inside & (values != 0)))
    parts = _widened(values.amin()), _widened(values.square()).sum(), _widened((~inside).sum())
    return _magnitudes(values), torch.stack(parts)


def survey_gradient(grad: Tensor, marks: Tensor, out: Tensor | None) -> Tensor:
    """See ``fixedpoint_kernels.survey.mask_and_survey``; all are contiguous.

    Args:
        grad: Gradient.
        marks: What ``survey`` wrote.
        out: Where to write the masked gradient; None: nowhere.

    Returns:
        The squared norm, 0-d.
    """
    if out is not None:
        out.copy_(torch.where(marks % 2 == 1, grad, 0.0))
    return _widened(torch.where(marks > 1, grad.detach().float(), 0.0).square_()).sum()


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.device.type == "mps" else x.double()


def _magnitudes(x: Tensor) -> Tensor:
    bits = x.view(torch.int32) & 0x7FFFFFFF  # without the sign
    # the biased exponent, one more where the mantissa is not 0; NaN overflows to 256
    places = bits.add_(0x7FFFFF).bitwise_right_shift_(23).bitwise_and_(0x1FF)
    return torch.bincount(places.flatten(), minlength=MAGNITUDES)
