"""PushDown: the smallest format that keeps a tensor's distribution. Pure functions."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.histogram import (
    Bins,
    Expected,
    bins_between,
    bins_of,
    sampled_histogram,
)
from fixedpoint_kernels.philox import Key
from marvin.shards import Shard, Spread

__all__ = [
    "Direction",
    "Divergence",
    "Lowest",
    "expected_divergence",
    "kl",
    "push_down",
    "sampled_divergence",
]

Direction = Literal["pq", "qp"]
Divergence = Callable[[Sequence[FixedPoint]], Iterable[float]]
"""The divergence of each format, in nats; in order, found as they are asked for."""
_CELLS_PER_BIN = 128  # steps down to 1/64 of a bin: the divergence there is about 1e-5
_MAX_CELLS = 2**16  # 1 MiB of counts: the cache holds it


@dataclass(frozen=True)
class Lowest:
    """What PushDown found: the format ``<wl, fl>`` and its divergence in nats."""

    wl: int
    fl: int
    kl: float


def kl(
    rounded: np.ndarray, own: np.ndarray, *, smoothing: float = 0.5, direction: Direction = "pq"
) -> np.ndarray:
    """Kullback-Leibler divergence between two histograms of the same number of values.

    With ``P = (rounded + smoothing) / (n + bins * smoothing)`` and ``Q`` likewise from ``own``,
    ``"pq"`` is ``sum P ln(P / Q)`` and ``"qp"`` is ``sum Q ln(Q / P)``, in nats.

    Args:
        rounded: Counts after rounding, shape ``(..., bins)``.
        own: Counts before, shape ``(bins,)``.
        smoothing: Added to each count, above 0: an empty bin would make the divergence infinite.
        direction: Which histogram comes first.

    Returns:
        Shape ``(...)``, float64, at least 0 up to rounding.

    Source:
        MARViN, equation 2. Differs: probability masses with smoothing; its Algorithm 3 prints the
        other direction.
    """
    p = (rounded + smoothing) / (rounded.sum(-1, keepdims=True) + rounded.shape[-1] * smoothing)
    q = (own + smoothing) / (own.sum() + own.shape[-1] * smoothing)
    if direction == "qp":
        p, q = q, p
    return (p * np.log(p / q)).sum(-1)


def expected_divergence(
    values: Tensor | Spread, resolution: int, *, smoothing: float = 0.5, direction: Direction = "pq"
) -> Divergence:
    """Return the divergence of any formats from expected counts.

    Reads ``values`` once, and once more where the search comes to formats finer than the grid that
    was counted: steps below 1/64 of a bin, and finer for large tensors. ``values`` of which several
    processes hold parts count as one tensor.

    Raises:
        ValueError: ``values`` is constant, empty or not finite; ``resolution`` is out of range.
    """
    own_values, shard, bins = _binned(values, resolution)
    cells = min(max(_CELLS_PER_BIN * resolution, shard.numel // 4), _MAX_CELLS)
    expected = Expected(own_values, bins, cells, total=_total(shard, own_values.device))

    def divergence(fmts: Sequence[FixedPoint]) -> Iterator[float]:
        for _, run in groupby(fmts, lambda fmt: fmt.fl > expected.fl):
            counts = expected.histograms(list(run))
            yield from kl(counts, expected.own, smoothing=smoothing, direction=direction)

    return divergence


def sampled_divergence(
    values: Tensor | Spread,
    resolution: int,
    *,
    smoothing: float = 0.5,
    direction: Direction = "pq",
    seed: int = 0,
    stream: int = 0,
) -> Divergence:
    """Return the divergence of formats from one stochastic rounding of each.

    Each call reads ``values`` (float32, any shape) once, whatever the number of formats.

    Raises:
        ValueError: As ``expected_divergence``; ``seed`` or ``stream`` is out of range.
    """
    own_values, shard, bins = _binned(values, resolution)
    key = Key.checked(seed, stream, shard.offset)

    def divergence(fmts: Sequence[FixedPoint]) -> np.ndarray:
        counts = shard.sum(sampled_histogram(own_values, fmts, bins, key))
        own, *rounded = counts.cpu().numpy().astype(np.float64)
        rows = np.reshape(rounded, (len(fmts), resolution))
        return kl(rows, own, smoothing=smoothing, direction=direction)

    return divergence


def push_down(
    divergence: Divergence, fmt: FixedPoint, *, kl_eps: float = 0.01, min_fl: int = 4
) -> Lowest:
    """Find the smallest format up to ``fmt`` that loses nothing.

    A format loses nothing if its divergence is at most ``kl_eps``. First the fractional length:
    the smallest from ``min_fl`` on that loses nothing at ``fmt.wl``; then, at that length, the
    smallest word length. Where all are lossy, ``fmt``'s own length stays.

    Args:
        divergence: From ``expected_divergence`` or ``sampled_divergence``.
        fmt: Upper end of the search.
        kl_eps: Tolerance in nats.
        min_fl: Lower end of the search for the fractional length.

    Returns:
        The format found, and its divergence.

    Source:
        MARViN, Algorithm 3. Differs: its stopping rules contradict each other; this is the prose,
        "until KL indicates a lower quantization would cause information loss". All candidates are
        looked at, where bisection assumes that the divergence falls with every bit.
    """
    symmetric = fmt.symmetric
    fls = range(min(min_fl, fmt.fl), fmt.fl + 1)
    lengths = [_format(fmt.wl, fl, symmetric) for fl in fls]
    at_fl, _ = _first_lossless(divergence, lengths, kl_eps)
    wls = range(min(max(2, at_fl.fl + 1), fmt.wl), fmt.wl + 1)
    widths = [_format(wl, at_fl.fl, symmetric) for wl in wls]
    found, divergence_found = _first_lossless(divergence, widths, kl_eps)
    return Lowest(found.wl, found.fl, divergence_found)


def _binned(values: Tensor | Spread, resolution: int) -> tuple[Tensor, Shard, Bins]:
    """Return what this process holds, where that is, and bins over the whole range."""
    if isinstance(values, Tensor):
        return values, Shard(values.shape), bins_of(values, resolution)
    return values.values, values.shard, bins_between(values.low, values.high, resolution)


def _total(shard: Shard, device: torch.device) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return what adds up the processes' counts, in one collective; None where all is here."""
    if shard.group is None:
        return None
    return lambda counts: shard.sum(torch.from_numpy(counts).to(device)).cpu().numpy()


@cache  # there are fewer than 4,000
def _format(wl: int, fl: int, symmetric: bool) -> FixedPoint:
    return FixedPoint(wl, fl, symmetric)


def _first_lossless(
    divergence: Divergence, fmts: Sequence[FixedPoint], kl_eps: float
) -> tuple[FixedPoint, float]:
    """Return the first format that loses nothing, or the last one, and its divergence."""
    found = fmts[-1], math.nan
    for found in zip(fmts, map(float, divergence(fmts)), strict=True):
        if found[1] <= kl_eps:
            break
    return found
