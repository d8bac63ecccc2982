"""Histograms of a tensor and of its rounding to many candidate formats, in one pass."""

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.histogram import grid
from fixedpoint_kernels.histogram.grid import Expected, Grid, grid_histogram
from fixedpoint_kernels.histogram.reference import Bins
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import Rounding

__all__ = ["Bins", "Expected", "Grid", "bins_between", "bins_of", "grid_histogram"]
__all__ += ["histogram_candidates", "sampled_histogram"]

_MOST_BINS = 2**20 - 1  # a block of Triton holds them, and one more
_MOST_EXPONENT = 126  # 2**126 and its inverse are normal numbers of float32
_CELLS = 2**16  # of the grid of expected counts


def histogram_candidates(
    x: Tensor,
    fmts: Sequence[FixedPoint],
    resolution: int,
    *,
    rounding: Rounding | Literal["expected"] = "stochastic",
    seed: int = 0,
    stream: int = 0,
) -> Tensor:
    """Count ``x``, and ``x`` rounded to each of ``fmts``, over the same bins.

    The bins are ``resolution`` equal parts of ``[min x, max x]``, in float32 arithmetic:
    ``floor((v - min x) * (resolution / (max x - min x)))``, and rounded values outside count in
    the end bins. Values are scaled by a power of two first, so that this neither overflows nor
    vanishes in any range of float32. ``"stochastic"`` rounds each element once to each format, always with the
    element's noise of ``(seed, stream)``. ``"expected"`` gives the expectation over that noise:
    no sampling error, and nothing random.

    Args:
        x: Finite values, any shape, at least two different ones; float32, bfloat16 or float16.
        fmts: Candidate formats.
        resolution: Number of bins.
        rounding: ``"stochastic"``, ``"nearest"`` or ``"expected"``.
        seed: Of the noise.
        stream: Of the noise.

    Returns:
        Shape ``(1 + len(fmts), resolution)``, the first row for ``x`` itself: int64 on the device
        of ``x``; float64 on the CPU for ``"expected"``. Each row sums to ``x.numel()``.

    Raises:
        TypeError: ``x`` is not a floating tensor, or ``fmts`` no sequence of ``FixedPoint``.
        ValueError: ``x`` has no range or is not finite; ``rounding`` or ``resolution`` is not one
            of those allowed.

    Source:
        MARViN, section 3.3 and equations 1 and 2. Differs: probability masses over the range of
        the float32 values, not a distribution function.
    """
    if rounding not in (*get_args(Rounding), "expected"):
        raise ValueError(
            f"rounding must be one of {(*get_args(Rounding), 'expected')}, got {rounding!r}"
        )
    if isinstance(fmts, FixedPoint) or not all(isinstance(fmt, FixedPoint) for fmt in fmts):
        raise TypeError(
            f"fmts must be a sequence of FixedPoint, got {fmts!r:.60}: write [FixedPoint(8, 4)], say"
        )
    x = in_memory(x)
    bins = bins_of(x, resolution)
    if rounding != "expected":
        return sampled_histogram(x, fmts, bins, Key.checked(seed, stream), rounding)
    expected = Expected(x, bins, _CELLS, fl=max((fmt.fl for fmt in fmts), default=0))
    return torch.from_numpy(np.concatenate([expected.own[None], expected.histograms(fmts)]))


def bins_of(x: Tensor, resolution: int) -> Bins:
    """Return ``resolution`` equal bins over the range of ``x``; waits for the device.

    ``x`` is a floating tensor of any shape.

    Raises:
        TypeError: ``x`` is not a floating tensor.
        ValueError: ``x`` is empty, constant or not finite; ``resolution`` is out of range.
    """
    x = in_memory(x)
    if not x.dtype.is_floating_point:
        raise TypeError(f"a histogram needs a floating tensor, got {x.dtype}")
    low, high = torch.stack(x.detach().aminmax()).float().tolist() if x.numel() else (0.0, 0.0)
    return bins_between(low, high, resolution)


def bins_between(low: float, high: float, resolution: int) -> Bins:
    """Return ``resolution`` equal bins from ``low`` to ``high``, which are float32 numbers.

    Raises:
        ValueError: There is no such range; ``resolution`` is not 1 to 2**20 - 1.
    """
    if not isinstance(resolution, Integral) or not 1 <= resolution <= _MOST_BINS:
        raise ValueError(
            f"a histogram needs a whole number of bins, 1 to {_MOST_BINS}, got resolution={resolution!r}"
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"a histogram needs two different finite values, got a range {low} to {high}"
        )
    _, exponent = math.frexp(high - low)
    power = 2.0 ** min(max(-exponent, -_MOST_EXPONENT), _MOST_EXPONENT)
    width = np.float32(high * power) - np.float32(low * power)
    return Bins(low * power, float(np.float32(resolution) / width), resolution, power)


def sampled_histogram(
    x: Tensor, fmts: Sequence[FixedPoint], bins: Bins, key: Key, rounding: Rounding = "stochastic"
) -> Tensor:
    """Count ``x``, and ``x`` rounded once to each of ``fmts``, over ``bins``.

    ``x`` may be a part of a larger tensor, which begins at element ``key.offset`` of it: the
    counts of all parts add up to those of the whole. NaN counts in the first bin.

    Returns:
        As ``histogram_candidates``.
    """
    x = in_memory(x)
    if not x.numel():
        shape = 1 + len(fmts), bins.resolution
        return torch.zeros(shape, dtype=torch.int64, device=x.device)
    return grid.kernels_of(x).sampled(x.reshape(-1), fmts, bins, rounding, key)
