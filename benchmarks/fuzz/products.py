"""Integer products of codes, and the rounding of gradients: sums of numpy's int64, tap by tap."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array
from fixedpoint_kernels import products

_PATHS = "amx", "avx512_vnni", "avx_vnni", "avx2", "stock", "float"


def multiply(chance: Random) -> None:
    """A convolution or a linear layer: output and both gradients, on a path of this processor."""
    layer = _Layer(chance) if chance.random() < 0.8 else _Rows(chance)
    with _path(chance):
        layer.check(chance)


def rounded(chance: Random) -> None:
    """Gradients to codes of a power of two for each sample."""
    shape = tuple(chance.choice((1, 2, 3, 5, 17)) for _ in range(chance.randint(1, 4)))
    dtype = chance.choice(("float32", "bfloat16", "float16"))
    n = int(np.prod(shape))
    x = draw.normal(chance, n).astype(np.float32) * np.float32(2.0 ** chance.randint(-120, 100))
    if chance.random() < 0.3:
        x = draw.finite(draw.words(chance, n).view(np.float32))
    if chance.random() < 0.1:
        x[chance.randrange(n)] = chance.choice((np.inf, -np.inf, np.nan))
    x = oracle.stored(x, dtype).reshape(shape)
    (seed, stream), first = draw.key(chance), chance.choice((0, 1, 1000))
    given = draw.odd(chance, draw.tensor(x, dtype))
    codes, exponents = products.round_per_sample(given, seed=seed, stream=stream, first=first)
    want, powers = _rounded(x, seed, stream, first)
    oracle.same(draw.content(exponents), powers.astype(np.int32), "exponents")
    oracle.same(draw.content(codes), want.astype(np.int8), "codes of a gradient")


def _rounded(x: Array, seed: int, stream: int, first: int) -> tuple[Array, Array]:
    flat = np.moveaxis(x, 1, -1).reshape(len(x), -1) if x.ndim > 1 else x[:, None]
    elements = flat.shape[1]
    words = -(-elements // 16) * 4
    drawn = _words(len(x) * words, seed, stream, first * words)
    noise = np.stack([drawn >> np.uint64(8 * i) & np.uint64(255) for i in range(4)], 1)
    noise = noise.reshape(len(x), -1)[:, :elements].astype(np.int64)
    codes, powers = np.zeros(flat.shape, np.int64), np.full(len(x), 128)
    for i, row in enumerate(flat.astype(np.float64)):
        if np.isfinite(row).all():
            largest, e = np.abs(row).max(), -126
            while largest > 127 * 2.0**e:
                e += 1
            powers[i] = e
            codes[i] = np.rint(row * 2.0**-e * 256).astype(np.int64) + noise[i] >> 8
    shape = (*x.shape[:1], *x.shape[2:], *x.shape[1:2])
    return (np.moveaxis(codes.reshape(shape), -1, 1) if x.ndim > 1 else codes[:, 0]), powers


def _words(n: int, seed: int, stream: int, first: int) -> Array:
    """Return words of noise from number ``first`` on, which four divides."""
    index = np.arange(first // 4, (first + n + 3) // 4, dtype=np.uint64)
    zero = np.zeros_like(index)
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    counter = index & low, index >> half, zero + stream % 2**32, zero + stream // 2**32
    return np.stack(oracle.philox(counter, (seed % 2**32, seed // 2**32)), axis=1).ravel()[:n]


class _Layer:
    """A convolution of random shape, its codes and its output's gradient."""

    def __init__(self, chance: Random) -> None:
        dims = chance.choice((1, 2, 2))
        self.dims = dims
        self.groups = chance.choice((1, 1, 1, 2, 3, 16, 21))
        n = chance.choice((1, 2, 3, 5))
        inputs = chance.choice((1, 2, 3, 4, 8, 16, 17)) * self.groups
        outputs = chance.choice((1, 2, 5, 16, 18, 33)) * self.groups
        if self.groups > 3 and chance.random() < 0.5:  # each output has a channel of its own
            inputs = outputs = self.groups
        kernel = [chance.randint(1, 3) for _ in range(dims)]
        self.stride = tuple(chance.choice((1, 1, 2, 3)) for _ in range(dims))
        self.padding = tuple(chance.randint(0, 2) for _ in range(dims))
        self.dilation = tuple(chance.choice((1, 1, 2)) for _ in range(dims))
        least = [d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True)]
        size = [max(1, low - 2 * p) for low, p in zip(least, self.padding, strict=True)]
        size = [s + chance.choice((0, 1, 2, 5, 9)) for s in size]
        self.x = _codes(chance, (n, inputs, *size), chance.choice(("int8", "uint8")))
        self.weight = _codes(chance, (outputs, inputs // self.groups, *kernel), "int8")
        counts = [
            (s + 2 * p - low) // t + 1
            for s, p, low, t in zip(size, self.padding, least, self.stride, strict=True)
        ]
        self.grad = _codes(chance, (n, outputs, *counts), "int8")

    def check(self, chance: Random) -> None:
        """Compare the three products with sums of int64."""
        own: dict[str, Any] = {
            name: getattr(self, name) for name in ("stride", "padding", "dilation", "groups")
        }
        x, weight, grad = (
            draw.odd(chance, torch.from_numpy(part)) for part in (self.x, self.weight, self.grad)
        )
        y, dx, dw = self._sums()
        _compare(chance, partial(products.convolve, x, weight, **own), y, 1, "forward")
        run = partial(products.convolve_input_gradient, grad, weight, self.x.shape[2:], **own)
        _compare(chance, run, dx, 0, "input gradient")
        got = products.convolve_weight_gradient(x, grad, self.weight.shape[2:], **own)
        oracle.same(draw.content(got), dw.sum(0), "weight gradient")
        powers = _exponents(chance, len(x))
        numbers = {"exponents": torch.from_numpy(powers), **own}
        got = products.convolve_weight_gradient(x, grad, self.weight.shape[2:], **numbers)
        oracle.same(draw.content(got), _total(dw, powers), "weight gradient with exponents")

    def _sums(self) -> tuple[Array, Array, Array]:
        """Return the output, the input's gradient, and the weight's for each sample."""
        parts = (self.x, self.weight, self.grad)
        x, weight, grad = (part.astype(np.int64) for part in parts)
        if self.dims == 1:
            x, weight, grad = x[:, :, None], weight[:, :, None], grad[:, :, None]
        one = (1,) * (2 - self.dims)
        stride, dilation = (*one, *self.stride), (*one, *self.dilation)
        (top, left) = (*(0,) * (2 - self.dims), *self.padding)
        padded = np.pad(x, ((0, 0), (0, 0), (top, top), (left, left)))
        y, dx, groups = np.zeros_like(grad), np.zeros_like(padded), self.groups
        dw = np.zeros((len(x), *weight.shape), np.int64)
        own, across = len(weight) // groups, x.shape[1] // groups
        for i, j in np.ndindex(weight.shape[2:]):
            rows = slice(
                i * dilation[0], i * dilation[0] + (y.shape[2] - 1) * stride[0] + 1, stride[0]
            )
            columns = slice(
                j * dilation[1], j * dilation[1] + (y.shape[3] - 1) * stride[1] + 1, stride[1]
            )
            for g in range(groups):
                o, c = slice(g * own, (g + 1) * own), slice(g * across, (g + 1) * across)
                tap, seen = weight[o, :, i, j], padded[:, c, rows, columns]
                y[:, o] += np.einsum("nchw,oc->nohw", seen, tap)
                dx[:, c, rows, columns] += np.einsum("nohw,oc->nchw", grad[:, o], tap)
                dw[:, o, :, i, j] = np.einsum("nohw,nchw->noc", grad[:, o], seen)
        dx = dx[:, :, top : dx.shape[2] - top, left : dx.shape[3] - left]
        return (y[:, :, 0], dx[:, :, 0], dw[:, :, :, 0]) if self.dims == 1 else (y, dx, dw)


class _Rows:
    """A linear layer of random shape."""

    def __init__(self, chance: Random) -> None:
        self.samples, self.between = chance.choice((1, 2, 7)), chance.choice((1, 3))
        inputs, outputs = (chance.choice((1, 3, 16, 65, 300)) for _ in range(2))
        rows = self.samples * self.between
        self.x = _codes(chance, (rows, inputs), chance.choice(("int8", "uint8")))
        self.weight = _codes(chance, (outputs, inputs), "int8")
        self.grad = _codes(chance, (rows, outputs), "int8")

    def check(self, chance: Random) -> None:
        """Compare the three products with sums of int64."""
        x, weight, grad = (
            draw.odd(chance, torch.from_numpy(part)) for part in (self.x, self.weight, self.grad)
        )
        own = (part.astype(np.int64) for part in (self.x, self.weight, self.grad))
        left, right, back = own
        y, dx = left @ right.T, back @ right
        _compare(chance, partial(products.linear, x, weight), y, 1, "linear")
        run = partial(products.linear_input_gradient, grad, weight)
        _compare(chance, run, dx, 0, "linear input gradient")
        powers = _exponents(chance, self.samples)
        sums = back.reshape(self.samples, self.between, -1).swapaxes(1, 2) @ left.reshape(
            self.samples, self.between, -1
        )
        got = products.linear_weight_gradient(x, grad, exponents=torch.from_numpy(powers))
        oracle.same(draw.content(got), _total(sums, powers), "linear weight gradient")


def _codes(chance: Random, shape: tuple[int, ...], dtype: str) -> Array:
    info = np.iinfo(dtype)
    codes = draw.words(chance, int(np.prod(shape))).astype(dtype).reshape(shape)
    kind = chance.random()
    if kind < 0.1:
        return np.full(shape, chance.choice((info.min, info.max)), dtype)
    return codes if kind < 0.8 else codes % 3


def _exponents(chance: Random, count: int) -> Array:
    middle = chance.randint(-90, 60)
    return np.array([middle + chance.randint(0, 20) for _ in range(count)], np.int32)


def _compare(chance: Random, run: Callable[..., Tensor], sums: Array, dim: int, what: str) -> None:
    """Compare ``run(dtype=..., exponents=...)`` with exact sums, exponents being along ``dim``."""
    dtype, powers = _drawn(chance, sums.shape[dim])
    got = run(dtype=dtype, exponents=None if powers is None else torch.from_numpy(powers))
    if powers is None:
        oracle.same(draw.content(got), sums.astype(str(dtype).removeprefix("torch.")), what)
        return
    shape = [-1 if d == dim else 1 for d in range(sums.ndim)]
    with np.errstate(all="ignore"):
        power = np.exp2(powers.astype(np.float64)).astype(np.float32).reshape(shape)
        want = sums.astype(np.float32) * power
    oracle.same(draw.content(got), oracle.stored(want, str(dtype).removeprefix("torch.")), what)


def _drawn(chance: Random, count: int) -> tuple[torch.dtype, Array | None]:
    dtype = chance.choice((torch.int32, torch.int64, torch.float32, torch.bfloat16))
    if not dtype.is_floating_point:
        return dtype, None
    return dtype, _exponents(chance, count if chance.random() < 0.7 else 1)


def _total(sums: Array, powers: Array) -> Array:
    """Add up samples exactly, and round once: float64 holds sums that are so near together."""
    least = int(powers.min())
    moved = sums * np.exp2(powers - least).astype(np.int64).reshape(-1, *[1] * (sums.ndim - 1))
    with np.errstate(all="ignore"):
        return moved.sum(0).astype(np.float64).astype(np.float32) * np.float32(2.0**least)


def _path(chance: Random) -> Any:
    """Take a path that this processor has, or the best."""
    names = [*_available()]
    return products.force(chance.choice(names)) if chance.random() < 0.7 else nullcontext()


def _available() -> Iterator[str]:
    for name in _PATHS:
        try:
            with products.force(name):
                yield name
        except ValueError:  # not on this processor
            continue
