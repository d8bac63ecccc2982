"""Counts over bins, sampled and expected, and the format that PushDown chooses by them."""

from random import Random

import numpy as np

import fixedpoint_kernels as fk
from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array, Failure, Format
from marvin.policies.push_down import expected_divergence, push_down


def sampled(chance: Random) -> None:
    """Rounded once, or to nearest; ranges too small or too large for float32's inverse, too."""
    x = _values(chance)
    fmts = [draw.format_of(chance) for _ in range(chance.randint(0, 4))]
    resolution, (seed, stream) = chance.randint(1, 150), draw.key(chance)
    rounding = chance.choice(("stochastic", "nearest"))
    drawn = oracle.noise(len(x), seed, stream) if rounding == "stochastic" else None
    rows = [x, *(oracle.quantize(x, fmt, drawn)[0] for fmt in fmts)]
    call = {"rounding": rounding, "seed": seed, "stream": stream}
    given = [draw.given(fmt) for fmt in fmts]
    got = draw.content(fk.histogram_candidates(draw.tensor(x), given, resolution, **call))
    want = np.stack([_counted(row, x, resolution) for row in rows])
    oracle.same(got, want, f"{rounding} counts")


def expected(chance: Random) -> None:
    """The expectation over noise, from exact fractions."""
    x, resolution = _values(chance)[:300], chance.randint(1, 150)
    fmts = [draw.format_of(chance, 24) for _ in range(chance.randint(1, 4))]
    given = [draw.given(fmt) for fmt in fmts]

    def call() -> Array:
        counts = fk.histogram_candidates(draw.tensor(x), given, resolution, rounding="expected")
        return draw.content(counts)

    if x.min() == x.max():
        return
    wants = [oracle.expected_counts(x, fmt, resolution) for fmt in fmts]
    want = np.stack([_counted(x, x, resolution), *wants])
    try:
        got = call()
    except ValueError:
        steps = (float(x.max()) - float(x.min())) * 2.0 ** max(fmt.fl for fmt in fmts)
        if steps < 2**23:
            raise
        return
    # a value's place in its cell is kept to 2**-24 of a step
    _check_near(got, want, len(x) * 2.0**-23, "expected counts")


def pushed(chance: Random) -> None:
    """The smallest format that loses nothing, every candidate looked at by exact counts."""
    n = chance.randint(2, 60)
    x = (draw.normal(chance, n) * 2.0 ** chance.randint(-4, 2)).astype(np.float32)
    x[: n // 2] = np.round(x[: n // 2] * 16) / 16
    fmt = Format(chance.randint(2, 20), chance.randint(0, 18), chance.random() < 0.3)
    resolution, kl_eps = chance.randint(5, 150), 10.0 ** -chance.uniform(1, 6)
    min_fl = chance.randint(0, 4)
    if x.min() == x.max():
        return
    own = _counted(x, x, resolution).astype(np.float64)

    def loss(wl: int, fl: int) -> float:
        counts = oracle.expected_counts(x, Format(wl, fl, fmt.symmetric), resolution)
        return oracle.kl(counts, own)

    fls = range(min(min_fl, fmt.fl), fmt.fl + 1)
    losses = [loss(fmt.wl, fl) for fl in fls]
    fl = _first(losses, list(fls), kl_eps)
    wls = range(max(2, fl + 1), fmt.wl + 1)
    narrow = [loss(wl, fl) for wl in wls]
    if not wls or any(abs(value - kl_eps) < 1e-3 * kl_eps for value in losses + narrow):
        return  # too near to call
    wl = _first(narrow, list(wls), kl_eps)
    found = push_down(
        expected_divergence(draw.tensor(x), resolution),
        draw.given(fmt),
        kl_eps=kl_eps,
        min_fl=min_fl,
    )
    if (found.wl, found.fl) != (wl, fl):
        raise Failure(f"push_down gave <{found.wl}, {found.fl}>, must be <{wl}, {fl}>")


def _values(chance: Random) -> Array:
    """Return finite values, at least two different ones."""
    n, kind = max(2, min(draw.size(chance), 2000)), chance.random()
    fmt = draw.format_of(chance, 16)
    x = draw.finite(draw.values(chance, n, fmt)) if kind < 0.2 else draw.normal(chance, n)
    x = x.astype(np.float32)
    if 0.2 <= kind < 0.3:  # as small as float32 has them
        x = (x * 2.0 ** -chance.randint(110, 149)).astype(np.float32)
    if x.min() == x.max():
        x[0] = np.nextafter(x[0], np.float32(0)) if x[0] else 1
    return x


def _counted(values: Array, x: Array, resolution: int) -> Array:
    bins = oracle.bins_of(values, float(x.min()), float(x.max()), resolution)
    return np.bincount(bins, minlength=resolution)


def _check_near(got: Array, want: Array, tolerance: float, what: str) -> None:
    if got.shape != want.shape or not (np.abs(got - want) <= tolerance).all():
        raise Failure(f"{what}: off by {np.abs(got - want).max()}, must be within {tolerance}")


def _first(losses: list[float], candidates: list[int], kl_eps: float) -> int:
    lossless = (c for c, loss in zip(candidates, losses, strict=True) if loss <= kl_eps)
    return next(lossless, candidates[-1])
