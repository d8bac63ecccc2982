"""Inputs made up from one generator: formats, values, and tensors that lie oddly in memory."""

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fuzz.oracle import Array, Format, stored
from fixedpoint_kernels import FixedPoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SPECIAL = (
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 2.0**-126, -(2.0**-126)),
    *(1.1754942e-38, 3.4028235e38, -3.4028235e38, 1.0, -1.0, 0.5, -0.5, 2.0**-25, -(2.0**-25)),
)


def format_of(chance: Random, longest: int = 32, signed: bool = True) -> Format:
    """Draw a format: any word length, fractional lengths below 0 and above ``wl`` too."""
    if not signed and chance.random() < 0.3:
        return Format(chance.randint(1, min(longest, 31)), _fl(chance), False, False)
    return Format(chance.randint(2, longest), _fl(chance), chance.random() < 0.3)


def _fl(chance: Random) -> int:
    return chance.randint(-31, 31) if chance.random() < 0.3 else chance.randint(-2, 12)


def given(fmt: Format) -> FixedPoint:
    """Return a format as the package has it."""
    return FixedPoint(*fmt)


def size(chance: Random) -> int:
    """Draw a number of elements: mostly 1 to 200, seldom none, seldom many."""
    kind = chance.random()
    if kind < 0.02:
        return 0
    if kind < 0.022:
        return chance.randint(10_000, 60_000)
    return chance.randint(1, 200) if kind < 0.5 else chance.randint(1, 20)


def shape_of(chance: Random, n: int) -> tuple[int, ...]:
    """Split ``n`` into one to four dimensions."""
    shape: list[int] = []
    for _ in range(chance.randint(0, 3)):
        divisors = [d for d in (1, 2, 3, 4, 5, 7) if n % d == 0]
        shape.append(chance.choice(divisors))
        n //= max(1, shape[-1])
    shape.append(n)
    chance.shuffle(shape)
    return tuple(shape)


def words(chance: Random, n: int) -> Array:
    """Draw ``n`` words of 32 bits, uint32."""
    return np.frombuffer(chance.randbytes(4 * n), np.uint32)


def uniform(chance: Random, n: int) -> Array:
    """Draw float64 in [0, 1)."""
    return words(chance, n) * 2.0**-32


def normal(chance: Random, n: int) -> Array:
    """Draw float64 of about normal distribution."""
    return uniform(chance, 4 * n).reshape(4, n).sum(0) * 1.7 - 3.4


def values(chance: Random, n: int, fmt: Format, dtype: str = "float32") -> Array:
    """Draw float32 that ``dtype`` holds: near codes, halfway, at the ends, any bits, special ones."""
    kinds = chance.choices(["grid", "bits", "normal", "ends", "special"], (4, 2, 4, 2, 1), k=2)
    with np.errstate(over="ignore"):
        parts = [_values(chance, n, fmt, kind).astype(np.float32) for kind in kinds]
    mixed = np.where(words(chance, n) % 4 > 0, *parts)
    return stored(mixed, dtype)


def _values(chance: Random, n: int, fmt: Format, kind: str) -> Array:
    lsb = 2.0**-fmt.fl
    if kind == "bits":
        return words(chance, n).view(np.float32)
    if kind == "special":
        return np.array([chance.choice(_SPECIAL) for _ in range(min(n, 500))] or [0.0])[
            np.arange(n) % max(1, min(n, 500))
        ]
    if kind == "ends":
        ends = np.array([fmt.low, fmt.high, 0], np.float64)[words(chance, n) % 3]
        near = ends + (words(chance, n) % 17 - 8.0) / 4
        return np.nextafter((near * lsb).astype(np.float32), _signs(chance, n))
    span = min(2.0 ** chance.randint(0, 30), 2.0 ** (fmt.wl + 1))
    if kind == "grid":
        return np.round(normal(chance, n) * span) * 2.0 ** -chance.randint(0, 3) * lsb
    return normal(chance, n) * span * lsb


def _signs(chance: Random, n: int) -> Array:
    return np.array([-np.inf, 0, np.inf], np.float32)[words(chance, n) % 3]


def finite(x: Array) -> Array:
    """Return values with 0 in place of what is not finite."""
    return np.where(np.isfinite(x), x, np.float32(0))


def tensor(x: Array, dtype: str = "float32") -> Tensor:
    """Return a contiguous tensor of values that ``dtype`` holds."""
    if dtype == "bfloat16":
        halves = np.asarray(np.array(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)
    as_numpy = {"float32": np.float32, "float16": np.float16}
    return torch.from_numpy(np.array(x, as_numpy[dtype], order="C"))


def odd(chance: Random, x: Tensor) -> Tensor:
    """Return the same numbers in a tensor that may have gaps, another order, or another beginning."""
    kind = chance.randrange(6)
    if kind == 0 and x.dim() > 1:
        order = chance.sample(range(x.dim()), x.dim())
        back = [order.index(i) for i in range(x.dim())]
        return x.permute(order).contiguous().permute(back)
    if kind == 1:
        wide = torch.full((*x.shape, 3), 7, dtype=x.dtype)
        wide[..., 1] = x
        return wide[..., 1]
    if kind == 2:
        first = chance.randint(1, 9)
        long = torch.full((first + x.numel(),), 7, dtype=x.dtype)
        long[first:] = x.reshape(-1)
        return long[first:].view(x.shape)
    if kind == 3 and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def content(x: Tensor) -> Array:
    """Return the numbers of a tensor: float32 of the floats of up to 32 bits, else its own dtype."""
    x = x.detach().resolve_neg().contiguous()
    if x.dtype is torch.bfloat16:
        bits = x.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16
        return bits.astype(np.uint32).view(np.float32)
    found = x.numpy()
    with np.errstate(invalid="ignore"):  # NaN that signals
        return found.astype(np.float32) if x.dtype is torch.float16 else found


def key(chance: Random) -> tuple[int, int]:
    """Draw a seed and a stream: small, or anything allowed."""
    if chance.random() < 0.5:
        return chance.randrange(5), chance.randrange(5)
    return chance.randrange(2**63), chance.randrange(2**63 - 100)


def offset(chance: Random) -> int:
    """Draw a position in a stream."""
    return chance.choice((0, chance.randrange(300), chance.randrange(2**62)))


def refused(call: Any, *arguments: Any, errors: Sequence[type[Exception]]) -> bool:
    """Say whether a call raises one of ``errors``; any other error escapes."""
    try:
        call(*arguments)
    except tuple(errors):
        return True
    return False
