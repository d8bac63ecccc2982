"""Block floating point, and rounding that counts."""

from random import Random

import numpy as np

import fixedpoint_kernels as fk
from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array, Failure, Format
from fixedpoint_kernels import observer


def block(chance: Random) -> None:
    """One power of two for a tensor, or for each sample."""
    wl, n = chance.randint(2, 24), min(draw.size(chance), 2000)
    dtype = chance.choices(list(draw.DTYPES), (6, 2, 2))[0]
    shape = draw.shape_of(chance, n)
    own = draw.values(chance, n, Format(wl, chance.randint(-20, 20)), dtype).reshape(shape)
    if chance.random() < 0.7:
        own = draw.finite(own)
    per_sample = chance.random() < 0.4
    (seed, stream), drawn = draw.key(chance), None
    if chance.random() < 0.5:
        drawn = oracle.noise(n, seed, stream).reshape(shape)
    x = draw.odd(chance, draw.tensor(own, dtype))
    y = fk.quantize_block(
        x,
        fk.BlockFloat(wl),
        rounding="nearest" if drawn is None else "stochastic",
        seed=seed,
        stream=stream,
        per_sample=per_sample,
    )
    rows = range(len(own)) if per_sample else [slice(None)]
    want = np.zeros(shape, np.float32)
    for row in rows if n else ():
        part = own[row]
        fl = oracle.block_fl(float(part.min()), float(part.max()), wl)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (part.astype(np.float64) * 2.0**fl).astype(np.float32)
            given = None if drawn is None else drawn[row]
            codes, _ = oracle.quantize(scaled, Format(wl, 0), given)
            want[row] = (codes.astype(np.float64) * 2.0**-fl).astype(np.float32)
    if n or y.numel():
        oracle.same(draw.content(y), oracle.stored(want, dtype), f"block of {wl} bits")


def observe(chance: Random) -> None:
    """Values, mask, magnitudes and sums of one pass, and the masked gradient."""
    n, fmt = max(1, draw.size(chance)), draw.format_of(chance, signed=False)
    dtype, shape = chance.choices(list(draw.DTYPES), (6, 2, 2))[0], draw.shape_of(chance, n)
    own = draw.values(chance, n, fmt, dtype).reshape(shape)
    x = draw.odd(chance, draw.tensor(own, dtype))
    rounds = chance.random() < 0.8
    y, ste_mask, counts, sums = observer.round_and_observe(x, draw.given(fmt) if rounds else None)
    want, inside = oracle.quantize(own, fmt, None) if rounds else (own, np.ones(shape, bool))
    oracle.same(draw.content(y), oracle.stored(want, dtype), "rounded values")
    kinds = (inside + 2 * (inside & (own != 0))).astype(np.uint8)
    oracle.same(draw.content(ste_mask), kinds, "ste_mask")
    oracle.same(draw.content(counts), _magnitudes(own), "magnitudes")
    total = draw.content(sums)
    if total[2] != (~inside).sum():
        raise Failure(f"{total[2]} values clamped, must be {(~inside).sum()}")
    if not np.isnan(own).any():
        oracle.same(total[:1] + 0.0, np.array([own.min() + 0.0], np.float64), "smallest value")
        _check_squares(total[1], own)
    grad = draw.finite(draw.values(chance, n, fmt, dtype)).reshape(shape)
    clip = chance.random() < 0.5
    g = draw.odd(chance, draw.tensor(grad, dtype))
    out, squares = observer.mask_and_observe(g, ste_mask, clip=clip)
    masked = np.where(inside, grad, np.float32(0)) if clip else grad
    oracle.same(draw.content(out), masked, "masked gradient")
    _check_squares(float(squares), np.where(kinds > 1, grad, np.float32(0)))


def _magnitudes(x: Array) -> Array:
    """Count ``ceil(log2(abs(x))) + 127``, by the powers of two themselves."""
    with np.errstate(invalid="ignore"):  # NaN that signals
        size = np.abs(x.ravel().astype(np.float64))
    powers = 2.0 ** np.arange(-127, 128)
    indices = np.searchsorted(powers, size, side="left")
    # the first two are 0 and what is below 2**-126; the last two above 2**127 and NaN
    tiny = (size > 0) & (size < 2.0**-126)
    indices = np.where(size == 0, 0, np.where(tiny, 1, indices))
    indices = np.where(np.isnan(size), 256, indices)
    return np.bincount(indices, minlength=257)


def _check_squares(got: float, x: Array) -> None:
    """Fail unless a sum of squares is right to float32's precision of squares and partial sums."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(x.astype(np.float32))
        want = float(squares.astype(np.float64).sum())
    if not np.isfinite(want) or want > 3e38:
        return  # partial sums may overflow in one order and not in another
    if abs(got - want) > x.size * (2.0**-23 * want + 1e-45):
        raise Failure(f"sum of squares {got}, must be {want}")
