"""``quantize``, ``quantize_with_mask``, ``quantize_many``, ``encode`` and ``decode``."""

from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fixedpoint_kernels as fk
from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array, Failure, Format

_REFUSALS = RuntimeError, ValueError, TypeError


def quantize(chance: Random) -> None:
    """One tensor of any dtype and strides, noise from anywhere in a stream, any ``out``."""
    fmt, dtype, n = draw.format_of(chance, signed=False), _dtype(chance), draw.size(chance)
    shape = draw.shape_of(chance, n)
    own = draw.values(chance, n, fmt, dtype).reshape(shape)
    x = draw.odd(chance, draw.tensor(own, dtype))
    options, drawn = _noise(chance, shape)
    want, inside = oracle.quantize(own, fmt, drawn)
    if chance.random() < 0.25 and "offset" not in options:
        y, mask = fk.quantize_with_mask(x, draw.given(fmt), **options)
        oracle.same(draw.content(mask), inside, "mask")
        oracle.same(draw.content(y), oracle.stored(want, dtype), "quantize_with_mask")
        return
    out, held = _out(chance, x, dtype)
    y = fk.quantize(x, draw.given(fmt), out=out, **options)
    if out is not None and y is not out:
        raise Failure("quantize returned something else than out")
    if out is None and y.stride() != torch.empty_like(x).stride():
        raise Failure(f"quantize returned strides {y.stride()} of {x.stride()}")
    oracle.same(draw.content(y), oracle.stored(want, held), "quantize")
    if out is not x:
        oracle.same(draw.content(x), own, "the input after quantize")


def quantize_outs(chance: Random) -> None:
    """Outputs that overlap, share memory or need a gradient: refused, or right all the same."""
    fmt, n = draw.format_of(chance, 24), chance.randint(2, 200)
    own = draw.finite(draw.values(chance, n, fmt))
    base, gap = draw.tensor(own), chance.randint(1, max(1, n // 2))
    options, drawn = _noise(chance, (n - gap,), has_offset=False)
    want, _ = oracle.quantize(own[: n - gap], fmt, drawn)
    kind, number = chance.randrange(4), draw.given(fmt)
    if kind == 0:  # forwards or backwards
        x, out = base[: n - gap], base[gap:]
        if chance.random() < 0.5:
            x, out = out, x
            want, _ = oracle.quantize(own[gap:], fmt, drawn)
        _refused_or_right(lambda: fk.quantize(x, number, out=out, **options), want)
    elif kind == 1:
        out = torch.zeros(n - gap, requires_grad=True)
        if not draw.refused(
            lambda: fk.quantize(base[: n - gap], number, out=out, **options), errors=_REFUSALS
        ):
            raise Failure("quantize wrote to an out that requires a gradient")
    elif kind == 2:
        out = torch.zeros(1).expand(n - gap)
        if n - gap > 1 and not draw.refused(
            lambda: fk.quantize(base[: n - gap], number, out=out, **options), errors=_REFUSALS
        ):
            raise Failure("quantize wrote all elements of an expanded out to one place")
    else:
        out = torch.zeros(n - gap)
        pair = [base[: n - gap], base[gap:]]
        if not draw.refused(
            lambda: fk.quantize_many(pair, [number] * 2, out=[out, out], **options),
            errors=_REFUSALS,
        ):
            raise Failure("quantize_many wrote two results to one tensor")


def quantize_many(chance: Random) -> None:
    """Some tensors in one launch, and some that are laid out so that they cannot be."""
    count = chance.choice((1, 2, 3, 5, 8))
    fmts = [draw.format_of(chance, signed=False) for _ in range(count)]
    sizes = [draw.size(chance) for _ in range(count)]
    owns = [draw.values(chance, n, fmt) for n, fmt in zip(sizes, fmts, strict=True)]
    is_plain = chance.random() < 0.6
    xs = [draw.tensor(x) if is_plain else draw.odd(chance, draw.tensor(x)) for x in owns]
    seed, stream = draw.key(chance)
    offsets = [draw.offset(chance) for _ in range(count)] if chance.random() < 0.5 else None
    rounding = chance.choice(("stochastic", "nearest"))
    wants = []
    for j, (x, fmt) in enumerate(zip(owns, fmts, strict=True)):
        drawn = oracle.noise(len(x), seed, stream + j, offsets[j] if offsets else 0)
        wants.append(oracle.quantize(x, fmt, drawn if rounding == "stochastic" else None)[0])
    out: Any = chance.choice((None, xs, [torch.full((n,), 7.0) for n in sizes]))
    ys = fk.quantize_many(
        xs,
        [draw.given(fmt) for fmt in fmts],
        rounding=rounding,
        seed=seed,
        stream=stream,
        offsets=offsets,
        out=out,
    )
    for j, (y, want) in enumerate(zip(ys, wants, strict=True)):
        oracle.same(draw.content(y), want, f"tensor {j} of quantize_many")
        if out is not None and y is not out[j]:
            raise Failure("quantize_many returned something else than out")


def lazy(chance: Random) -> None:
    """Tensors that are not what their address says: the numbers they stand for, or an error."""
    fmt = draw.format_of(chance, 24)
    n = chance.choice((1, chance.randint(1, 50)))  # of one, strides do not matter
    own = draw.finite(draw.values(chance, n, fmt))
    plain, kind = draw.tensor(own), chance.randrange(3)
    if kind == 0:
        x = torch.complex(torch.zeros(n), -plain).conj().imag
    elif kind == 1:
        x, own = torch._efficientzerotensor(n), np.zeros(n, np.float32)
    else:
        x = plain.clone()
        x.untyped_storage().resize_(chance.choice((0, 4 * (n - 1))))
    want, _ = oracle.quantize(own, fmt, None)
    calls = (
        lambda: fk.quantize(x, draw.given(fmt), rounding="nearest"),
        lambda: fk.quantize_many([plain, x], [draw.given(fmt)] * 2, rounding="nearest")[1],
        lambda: fk.decode(fk.encode(x, draw.given(fmt), rounding="nearest"), draw.given(fmt)),
    )
    call = chance.choice(calls)
    if kind == 0:
        oracle.same(draw.content(call()), want, "a tensor whose negation waits")
    elif kind == 1:
        _refused_or_right(call, want)
    elif not draw.refused(call, errors=_REFUSALS):
        raise Failure("a tensor whose storage is too short was read")


def codes(chance: Random) -> None:
    """``encode`` gives codes of the smallest dtype, ``decode`` what they are worth."""
    fmt, dtype, n = draw.format_of(chance, signed=False), _dtype(chance), draw.size(chance)
    shape = draw.shape_of(chance, n)
    own = draw.values(chance, n, fmt, dtype).reshape(shape)
    options, drawn = _noise(chance, shape, has_offset=False)
    got = fk.encode(draw.odd(chance, draw.tensor(own, dtype)), draw.given(fmt), **options)
    if got.dtype is not _smallest(fmt):
        raise Failure(f"encode gave {got.dtype} for {fmt}")
    want = oracle.encode(own, fmt, drawn)
    oracle.same(draw.content(got).astype(np.int64), want, "encode")
    wide = fk.decode(got, draw.given(fmt), dtype=torch.float64)
    oracle.same(draw.content(wide), want * 2.0**-fmt.fl, "decode to float64")
    if fmt.wl <= 25:
        narrow = fk.decode(got, draw.given(fmt))
        oracle.same(draw.content(narrow), (want * 2.0**-fmt.fl).astype(np.float32), "decode")


def _dtype(chance: Random) -> str:
    return chance.choices(list(draw.DTYPES), (6, 2, 2))[0]


def _noise(
    chance: Random, shape: tuple[int, ...], has_offset: bool = True
) -> tuple[dict[str, Any], Array | None]:
    """Return arguments of a call, and the noise that they mean."""
    if chance.random() < 0.4:
        return {"rounding": "nearest"}, None
    (seed, stream), first = draw.key(chance), 0
    options: dict[str, Any] = {"rounding": "stochastic", "seed": seed, "stream": stream}
    if has_offset and chance.random() < 0.5:
        first = options["offset"] = draw.offset(chance)
    return options, oracle.noise(int(np.prod(shape)), seed, stream, first).reshape(shape)


def _out(chance: Random, x: Tensor, dtype: str) -> tuple[Tensor | None, str]:
    kind = chance.randrange(4)
    if kind == 0:
        return x, dtype
    if kind == 1:
        held = chance.choice(list(draw.DTYPES))
        space = torch.full((*x.shape, 2), 7.0, dtype=draw.DTYPES[held])
        return space[..., 1] if chance.random() < 0.5 else torch.full_like(x, 7.0).to(
            draw.DTYPES[held]
        ), held
    return None, dtype


def _refused_or_right(call: Any, want: Array) -> None:
    try:
        got = call()
    except _REFUSALS:
        return
    oracle.same(draw.content(got), want, "a call that was not refused")


def _smallest(fmt: Format) -> torch.dtype:
    if fmt.wl <= 8:
        return torch.int8 if fmt.signed else torch.uint8
    return torch.int16 if fmt.high < 2**15 else torch.int32
