"""Exact integer arithmetic: int64 where it suffices, Python's integers where it does not."""

from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.nodes import Conv, Linear, Weighted

__all__ = [
    "Codes",
    "align",
    "magnitude",
    "round_codes",
    "round_fraction",
    "trailing_zeros",
    "weigh",
]

Codes = np.ndarray[Any, Any]  # int64, or Python integers in an array of objects

_EXACT_BITS = 53  # of a float64
_INT64_BITS = 62  # one bit to spare: rounding adds half
_LIMB_BITS = 16


def magnitude(codes: Codes) -> int:
    """Return the largest magnitude of some codes, 0 of none."""
    return max(int(codes.max()), -int(codes.min())) if codes.size else 0


def trailing_zeros(code: int, most: int) -> int:
    """Return how often 2 divides a code, at most ``most``."""
    return min(most, (code & -code).bit_length() - 1) if code else most


def align(codes: Codes, shift: int) -> Codes:
    """Return ``codes * 2**shift``, in whatever integers hold it."""
    if shift and magnitude(codes).bit_length() + shift > _INT64_BITS:
        codes = codes.astype(object)
    return codes << shift if shift else codes


def round_codes(codes: Codes, fl: int, fmt: FixedPoint, divisor: int = 1) -> Codes:
    """Round ``codes / divisor`` from ``fl`` to ``fmt``: nearest, ties to even, saturating.

    Returns:
        int64, shape of ``codes``.
    """
    shift = fl - fmt.fl
    numerator = align(codes, max(0, -shift))
    denominator = divisor << max(0, shift)
    if denominator.bit_length() > _INT64_BITS:
        numerator = numerator.astype(object)
    quotient = numerator // denominator
    twice = 2 * (numerator - quotient * denominator)
    is_up = (twice > denominator) | ((twice == denominator) & (quotient % 2 == 1))
    rounded = quotient + is_up.astype(np.int64)
    return np.clip(rounded, fmt.min_code, fmt.max_code).astype(np.int64)


def round_fraction(value: Fraction, fmt: FixedPoint) -> int:
    """Return the code of one exact number in ``fmt``: see ``round_codes``."""
    code = round(value * Fraction(2) ** fmt.fl)  # Python's round of a fraction is half to even
    return min(max(code, fmt.min_code), fmt.max_code)


def weigh(op: Weighted, codes: Codes) -> Codes:
    """Return the sums of products of a layer, without bias, exactly.

    A float64 holds integers of 53 bits. Where sums may be wider, the codes, and if need be the
    weights, are split into pieces whose sums fit, and the sums are put together again.
    """
    weight = op.weight.numpy()
    return _weigh(op, codes, weight, int(np.abs(weight).reshape(len(weight), -1).sum(1).max()))


def _weigh(op: Weighted, codes: Codes, weight: Codes, row: int) -> Codes:
    largest = magnitude(codes)
    if (row * largest).bit_length() <= _EXACT_BITS:
        return _in_float64(op, codes, weight)
    if largest.bit_length() > _LIMB_BITS:
        high, low = codes >> _LIMB_BITS, codes & (2**_LIMB_BITS - 1)
        pieces = [_weigh(op, x, weight, row) for x in (high, low)]
    else:
        pieces = []
        for w in (weight >> _LIMB_BITS, weight & (2**_LIMB_BITS - 1)):
            total = int(np.abs(w).reshape(len(w), -1).sum(1).max())
            pieces.append(_weigh(op, codes, w, total))
    high, low = align(pieces[0], _LIMB_BITS), pieces[1]
    is_wide = high.dtype == object or low.dtype == object
    is_wide |= max(magnitude(high), magnitude(low)).bit_length() >= _INT64_BITS
    return high.astype(object) + low if is_wide else high + low


def _in_float64(op: Weighted, codes: Codes, weight: Codes) -> Codes:
    x, w = _doubles(codes), _doubles(weight)
    if isinstance(op, Linear):
        y = F.linear(x, w)
    else:
        assert isinstance(op, Conv)
        conv = F.conv1d if w.ndim == 3 else F.conv2d
        y = conv(x, w, None, op.stride, op.padding, op.dilation, op.groups)
    return y.to(torch.int64).numpy()


def _doubles(codes: Codes) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(codes.astype(np.float64)))
