"""Networks of random operations: int64 or wider in the package, Python's integers here."""

import itertools
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.oracle import Array, Failure, Format
from marvin.export import integer
from marvin.export.graph.bounds import first_value, value_of
from marvin.export.graph.nodes import (
    Add,
    Affine,
    AveragePool,
    Conv,
    Flatten,
    Input,
    Linear,
    MaxPool,
    Network,
    Operation,
    Relu,
    Round,
)

_Value = tuple[Array, int]  # Python's integers in an array of objects, and their fl


def run(chance: Random) -> None:
    """Every value of a network has the oracle's codes and fl, within its own bounds."""
    shape = (chance.randint(1, 3), chance.randint(1, 6), chance.randint(1, 6))
    fmt = draw.format_of(chance, signed=False)
    n = chance.randint(1, 2)
    own = draw.values(chance, n * int(np.prod(shape)), fmt).reshape(n, *shape)
    own = np.where(np.isnan(own), np.float32(0), own)
    ops: list[Operation] = [Input("x", (), shape), Round("0", ("x",), draw.given(fmt))]
    values = {"0": first_value(Round("0", ("x",), draw.given(fmt)), shape)}
    wants: dict[str, _Value] = {"0": (_first(own, fmt), fmt.fl)}
    for i in range(chance.randint(1, 6)):
        op, want = _operation(chance, str(i + 1), wants)
        ops.append(op)
        wants[op.name] = want
        values[op.name] = value_of(op, [values[name] for name in op.inputs])
    found = integer.run_all(Network(tuple(ops), values, "trained"), draw.tensor(own))
    for op in ops[1:]:
        (want, fl), value, got = wants[op.name], values[op.name], found[op.name]
        what = f"{op.name} of {[type(op).__name__ for op in ops[1:]]}"
        if (value.shape, value.fl) != (want.shape[1:], fl):
            raise Failure(f"{what}: {value.shape} at {value.fl}, must be {want.shape[1:]} at {fl}")
        oracle.same(got.astype(object), want, what)
        if want.size and not value.low <= want.min() <= want.max() <= value.high:
            raise Failure(f"{what}: codes are not within {value.low} and {value.high}")


def _first(x: Array, fmt: Format) -> Array:
    codes = np.clip(np.rint(x.astype(np.float64) * 2.0**fmt.fl), fmt.low, fmt.high)
    return codes.astype(np.int64).astype(object)


def _operation(chance: Random, name: str, wants: dict[str, _Value]) -> tuple[Operation, _Value]:
    source = chance.choice(list(wants)[-2:])
    x, fl = wants[source]
    kinds = ["round", "affine", "relu", "add", "linear"]
    if x.ndim == 4:
        kinds = ["round", "affine", "relu", "add", "conv", "conv", "max", "average", "flatten"]
    kind, inputs = chance.choice(kinds), (source,)
    if kind == "round":
        fmt = draw.format_of(chance, signed=False)
        return Round(name, inputs, draw.given(fmt)), (rounded(x, fl, fmt), fmt.fl)
    if kind == "relu":
        return Relu(name, inputs), (np.maximum(x, 0), fl)
    if kind == "flatten":
        return Flatten(name, inputs), (x.reshape(len(x), -1), fl)
    if kind == "add":
        return _add(chance, name, source, wants)
    if kind == "affine":
        return _affine(chance, name, inputs, wants[source])
    if kind in ("max", "average"):
        return _pool(chance, name, inputs, wants[source], kind)
    return _weighted(chance, name, inputs, wants[source])


def _add(
    chance: Random, name: str, source: str, wants: dict[str, _Value]
) -> tuple[Operation, _Value]:
    like = [key for key, (codes, _) in wants.items() if codes.shape == wants[source][0].shape]
    other = chance.choice(like)
    (x, fl), (y, other_fl) = wants[source], wants[other]
    out_fl = max(fl, other_fl)
    total = (x << out_fl - fl) + (y << out_fl - other_fl)
    return Add(name, (source, other)), (total, out_fl)


def _affine(
    chance: Random, name: str, inputs: tuple[str, ...], value: _Value
) -> tuple[Operation, _Value]:
    (x, fl), fmts = value, [draw.format_of(chance), draw.format_of(chance)]
    scale, offset = (_codes(chance, fmt, (x.shape[1],)) for fmt in fmts)
    out_fl = max(fl + fmts[0].fl, fmts[1].fl)
    shape = -1, *[1] * (x.ndim - 2)
    own = x * scale.astype(object).reshape(shape) << out_fl - fl - fmts[0].fl
    total = own + (offset.astype(object).reshape(shape) << out_fl - fmts[1].fl)
    parts: Any = (
        torch.from_numpy(scale),
        draw.given(fmts[0]),
        torch.from_numpy(offset),
        draw.given(fmts[1]),
    )
    return Affine(name, inputs, *parts), (total, out_fl)


def _pool(
    chance: Random, name: str, inputs: tuple[str, ...], value: _Value, kind: str
) -> tuple[Operation, _Value]:
    x, fl = value
    kernel = [chance.randint(1, min(3, side)) for side in x.shape[2:]]
    padding = [chance.randint(0, size // 2) for size in kernel]
    stride = [chance.randint(1, 3) for _ in kernel]
    if kind == "max":
        parts = windows(x, kernel, stride, padding, (1, 1), None)
        return MaxPool(name, inputs, _pair(kernel), _pair(stride), _pair(padding), (1, 1)), (
            _reduced(parts, max),
            fl,
        )
    fmt = draw.format_of(chance, signed=False)
    total = _reduced(windows(x, kernel, stride, padding, (1, 1), 0), sum)
    op = AveragePool(name, inputs, _pair(kernel), _pair(stride), _pair(padding), draw.given(fmt))
    return op, (rounded(total, fl, fmt, kernel[0] * kernel[1]), fmt.fl)


def _weighted(
    chance: Random, name: str, inputs: tuple[str, ...], value: _Value
) -> tuple[Operation, _Value]:
    (x, fl), fmt, bias_fmt = value, draw.format_of(chance), draw.format_of(chance)
    groups = x.shape[1] if x.ndim == 4 and chance.random() < 0.3 else 1
    out = groups * chance.randint(1, 2)
    sides = [chance.randint(1, min(3, side)) for side in x.shape[2:]]
    weight = _codes(chance, fmt, (out, x.shape[1] // groups, *sides))
    bias = _codes(chance, bias_fmt, (out,)) if chance.random() < 0.7 else None
    given = torch.from_numpy(weight), draw.given(fmt)
    added = None if bias is None else torch.from_numpy(bias), draw.given(bias_fmt)
    if x.ndim == 2:
        total, op = x @ weight.astype(object).T, Linear(name, inputs, *given, *added)
    else:
        stride, padding = ([chance.randint(low, 2) for _ in sides] for low in (1, 0))
        dilation = [
            chance.randint(1, 2) if size * 2 - 1 <= side else 1
            for size, side in zip(sides, x.shape[2:], strict=True)
        ]
        total = convolved(x, weight, stride, padding, dilation, groups)
        places = _pair(stride), _pair(padding), _pair(dilation)
        op = Conv(name, inputs, *given, *added, *places, groups)
    if bias is None:
        return op, (total, fl + fmt.fl)
    out_fl = max(fl + fmt.fl, bias_fmt.fl)
    aligned = bias.astype(object).reshape(-1, *[1] * (x.ndim - 2)) << out_fl - bias_fmt.fl
    return op, ((total << out_fl - fl - fmt.fl) + aligned, out_fl)


def convolved(
    x: Array, weight: Array, stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    """Return a convolution of Python's integers, one weight at a time."""
    out, channels = weight.shape[:2]
    total = 0
    parts = windows(x, weight.shape[2:], stride, padding, dilation, 0)
    for (a, b), part in parts.items():
        rows = [
            sum(
                int(weight[o, c, a, b]) * part[:, o // (out // groups) * channels + c]
                for c in range(channels)
            )
            for o in range(out)
        ]
        total = total + np.stack(rows, 1)
    return np.asarray(total, object)


def windows(
    x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, fill: int | None
) -> dict[tuple[int, int], Array]:
    """Return what each place of a kernel sees; padding is ``fill``, or None for none at all."""
    height, width = (side + 2 * p for side, p in zip(x.shape[2:], padding, strict=True))
    padded = np.full((*x.shape[:2], height, width), fill, object)  # np.pad would put int64 there
    inner = (slice(p, p + side) for side, p in zip(x.shape[2:], padding, strict=True))
    padded[(slice(None), slice(None), *inner)] = x
    counts = [
        (padded.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)
    ]
    found = {}
    for a, b in itertools.product(range(kernel[0]), range(kernel[1])):
        rows = slice(a * dilation[0], a * dilation[0] + stride[0] * (counts[0] - 1) + 1, stride[0])
        columns = slice(
            b * dilation[1], b * dilation[1] + stride[1] * (counts[1] - 1) + 1, stride[1]
        )
        found[a, b] = padded[:, :, rows, columns]
    return found


def _reduced(parts: dict[tuple[int, int], Array], reduce: Any) -> Array:
    columns = zip(*(part.ravel() for part in parts.values()), strict=True)
    shape = next(iter(parts.values())).shape
    numbers = [reduce(c for c in column if c is not None) for column in columns]
    found = np.empty(len(numbers), object)
    found[:] = numbers
    return found.reshape(shape)


def rounded(codes: Array, fl: int, fmt: Format, divisor: int = 1) -> Array:
    """Return ``codes / divisor`` in a format: nearest, ties to even, saturated."""
    up, down = max(0, fmt.fl - fl), max(0, fl - fmt.fl)
    found = np.empty(codes.size, object)
    for i, code in enumerate(codes.ravel().tolist()):
        whole, rest = divmod(code << up, divisor << down)
        twice = 2 * rest - (divisor << down)
        whole += twice > 0 or (twice == 0 and whole % 2)
        found[i] = min(max(whole, fmt.low), fmt.high)
    return found.reshape(codes.shape)


def _codes(chance: Random, fmt: Format, shape: tuple[int, ...]) -> Array:
    numbers = [
        chance.choice((fmt.low, fmt.high, chance.randint(fmt.low, fmt.high), 0))
        for _ in range(int(np.prod(shape)))
    ]
    return np.array(numbers, np.int64).reshape(shape)


def _pair(x: list[int]) -> tuple[int, int]:
    return x[0], x[1]
