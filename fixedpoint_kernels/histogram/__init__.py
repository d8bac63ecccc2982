"""Histograms of a tensor and of its rounding to many candidate formats, in one pass."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels.executions import execution
from fixedpoint_kernels.formats import FixedPoint
from fixedpoint_kernels.histogram import reference
from fixedpoint_kernels.histogram.grid import Grid
from fixedpoint_kernels.histogram.reference import Bins, Cells
from fixedpoint_kernels.memory import in_memory
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding import Rounding

__all__ = ["Bins", "Grid", "bins_between", "bins_of", "grid_histogram", "histogram_candidates"]
__all__ += ["sampled_histogram"]

_MAX_CELLS = 2**24


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
    the end bins. ``"stochastic"`` rounds each element once to each format, always with the
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
        ValueError: ``x`` has no range or is not finite; ``rounding`` is unknown; or expected
            counts are asked for at steps finer than 2**-24 of the range.

    Source:
        MARViN, section 3.3 and equations 1 and 2. Differs: probability masses over the range of
        the float32 values, not a distribution function.
    """
    if rounding not in (*get_args(Rounding), "expected"):
        raise ValueError(
            f"rounding must be one of {(*get_args(Rounding), 'expected')}, got {rounding!r}"
        )
    bins = bins_of(x, resolution)
    if rounding != "expected":
        return sampled_histogram(x, fmts, bins, Key.checked(seed, stream), rounding)
    own, grid = grid_histogram(x, bins, max((fmt.fl for fmt in fmts), default=0))
    return torch.from_numpy(np.concatenate([own[None], grid.histograms(fmts)]))


def bins_of(x: Tensor, resolution: int) -> Bins:
    """Return ``resolution`` equal bins over the range of ``x``; waits for the device.

    Raises:
        ValueError: ``x`` is empty, constant or not finite.
    """
    x = in_memory(x)
    if not x.dtype.is_floating_point:
        raise TypeError(f"a histogram needs a floating tensor, got {x.dtype}")
    if resolution < 1:
        raise ValueError(f"a histogram needs at least 1 bin, got resolution={resolution}")
    low, high = torch.stack(x.detach().aminmax()).float().tolist() if x.numel() else (0.0, 0.0)
    return bins_between(low, high, resolution)


def bins_between(low: float, high: float, resolution: int) -> Bins:
    """Return ``resolution`` equal bins from ``low`` to ``high``, which are float32 numbers.

    Raises:
        ValueError: There is no such range.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"a histogram needs two different finite values, got a range {low} to {high}"
        )
    width = np.float32(high) - np.float32(low)
    return Bins(low, float(np.float32(resolution) / width), resolution)


def sampled_histogram(
    x: Tensor, fmts: Sequence[FixedPoint], bins: Bins, key: Key, rounding: Rounding = "stochastic"
) -> Tensor:
    """Count ``x``, and ``x`` rounded once to each of ``fmts``, over ``bins``.

    ``x`` may be a part of a larger tensor, which begins at element ``key.offset`` of it: the
    counts of all parts add up to those of the whole.

    Returns:
        As ``histogram_candidates``.
    """
    x = in_memory(x)
    if not x.numel():
        shape = 1 + len(fmts), bins.resolution
        return torch.zeros(shape, dtype=torch.int64, device=x.device)
    return execution("histogram", x).sampled(x.reshape(-1), fmts, bins, rounding, key)


def grid_histogram(x: Tensor, bins: Bins, fl: int) -> tuple[np.ndarray, Grid]:
    """Count ``x`` in bins and in the cells of fractional length ``fl``, in one pass.

    ``x`` may be a part of the tensor whose range ``bins`` cover: the counts of all parts add up.

    Returns:
        The histogram of ``x``, shape ``(resolution,)``, float64, and the grid that gives the
        expected counts of every format of fractional length ``fl`` or less.

    Raises:
        ValueError: The range holds more than 2**24 steps.
    """
    first = math.floor(bins.low * 2.0**fl)
    width = bins.resolution / bins.inverse_width * 2.0**fl
    size = math.ceil(width * (1 + 2.0**-20)) + 2  # the float32 width may be a little short
    if size > _MAX_CELLS:
        raise ValueError(
            f"expected counts need at most {_MAX_CELLS} steps in the range, got {size}"
        )
    code = execution("histogram", x) if x.numel() else reference
    own, table = code.cells(x.reshape(-1), bins, Cells(fl, first, size))
    return own.cpu().numpy().astype(np.float64), Grid(fl, first, table.cpu().numpy(), bins)
