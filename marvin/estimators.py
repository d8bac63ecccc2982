"""The format that an estimator chooses for values."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.formats import LONGEST_FL
from marvin.channels import ChannelFormat
from marvin.rounding import Format, round_one

__all__ = ["Estimator", "best_format", "check_estimator", "fitting", "weight_format"]

Estimator = Literal["noise", "max", "percentile"]
_ONE_IN = 10_000  # values that may saturate, of the percentile
_FINER = 8  # bits by which a format may be finer than the one in which nothing saturates


def check_estimator(estimator: object) -> None:
    """Refuse what is no estimator.

    Raises:
        ValueError: It is none; says which there are.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator must be one of {get_args(Estimator)}, got {estimator!r}")


def best_format(x: Tensor, wl: int, estimator: Estimator, *, signed: bool = True) -> FixedPoint:
    """Return the format of ``wl`` bits that an estimator chooses for values, float32, 1-d.

    Raises:
        ValueError: No format of ``wl`` bits holds the values.
    """
    held = x  # what may not saturate
    if estimator == "percentile":
        size = x.abs()
        held = x[size <= size.sort().values[-1 - len(x) // _ONE_IN]]
    widest = fitting(float(held.min()), float(held.max()), wl, signed)
    if estimator != "noise":
        return widest
    finer = range(widest.fl, min(widest.fl + _FINER, LONGEST_FL) + 1)
    formats = [FixedPoint(wl, fl, signed=signed) for fl in finer]
    noises = [
        float((round_one(x, f, rounding="nearest") - x).double().square().sum()) for f in formats
    ]
    return formats[noises.index(min(noises))]


def fitting(low: float, high: float, wl: int, signed: bool) -> FixedPoint:
    """Return the finest format of ``wl`` bits that holds both values without saturating.

    Raises:
        ValueError: None does, or they are not finite.
    """
    if not math.isfinite(low) or not math.isfinite(high):
        raise ValueError(f"values to be rounded must be finite, got {low} to {high}")
    for fl in range(LONGEST_FL, -LONGEST_FL - 1, -1):
        fmt = FixedPoint(wl, fl, signed=signed)
        if fmt.min_code <= round(low * fmt.scale) and round(high * fmt.scale) <= fmt.max_code:
            return fmt
    raise ValueError(
        f"a format of {wl} bits must hold {low:.6g} to {high:.6g}, none does: scale the values, or take more bits"
    )


def weight_format(
    x: Tensor, wl: int, estimator: Estimator = "noise", per_channel: bool = False
) -> Format:
    """Return the format that an estimator chooses for a weight, float32, shape ``(channels, ...)``.

    Raises:
        ValueError: The weight is not finite, or no format of ``wl`` bits holds it.
    """
    if not torch.isfinite(x).all():
        raise ValueError("weights must be finite to be calibrated")
    if not per_channel:
        return best_format(x.reshape(-1), wl, estimator)
    rows = x.reshape(len(x), -1)
    fls = [best_format(row, wl, estimator).fl if row.any() else None for row in rows]
    least = min((fl for fl in fls if fl is not None), default=0)
    return ChannelFormat(
        FixedPoint(wl, least), tuple(0 if fl is None else fl - least for fl in fls)
    )
