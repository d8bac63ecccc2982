"""A layer, its batch normalisation and a rounding as one step, which integer kernels compute.

Such a kernel sums products and a bias in int32, and makes of the sum ``t`` the code
``rint(float32(t) * float32(scale))``, saturated. With a scale of ``s * 2**-r``, ``s`` an odd
integer of at most 24 bits, that is the exact code where either

- ``m + r <= 24``, ``m`` the bits of the largest code. A product in the range is a multiple of
  ``2**-r`` below ``2**m``, and its ``t`` is below ``2**(m + r)``, so float32 has both. A larger
  product saturates, rounded or not, because rounding keeps the order. Or
- ``|t * s| <= 2**24``: every product is exact.

With an ``fl`` for each channel, ``t`` is a multiple of ``2**k``, with a ``k`` for each. It goes
from the weights and the bias into the scale: so weights are bytes again, and ``r`` is ``k`` less.

Whoever rounds ``(x + b) * scale`` in float32 has the same guarantee, while ``x`` and ``b`` are
numbers of float32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint
from marvin.export.execute.arithmetic import Codes, align, round_codes, trailing_zeros
from marvin.export.graph.functions import KEEP_ORDER
from marvin.export.graph.nodes import (
    FLOAT32_BITS,
    Affine,
    Conv,
    Network,
    Operation,
    Round,
    Value,
    Weighted,
)

__all__ = ["Folded", "absorbed", "fold", "roundings", "rounds_exactly", "total_of"]

_INT32 = 2**30  # half of int32: sums of bytes around 128 are up to twice as large on the way


@dataclass(frozen=True, eq=False)
class Folded:
    """Sums of products, and what they are worth.

    Args:
        layer: Whose sums they are.
        weight: Codes, int64, each -128 to 127, or each 0 to 255.
        bias: Codes at the ``fl`` of the products, shape ``(out,)``, or None.
        scales: What a weight's code is worth in each channel, float64, shape ``(out,)``, or ``()``
            where it is the same in all. Negative where codes could not be negated.
    """

    layer: Weighted
    weight: Codes
    bias: Codes | None
    scales: Any


def fold(network: Network, op: Operation, fmt: FixedPoint | None) -> Folded | None:
    """Return ``op`` as sums and scales; None where integer kernels would not compute it exactly.

    Args:
        network: Of ``op``.
        op: A layer, or a batch normalisation of a layer or of images.
        fmt: What it is rounded to; None where it is not, as only a layer can be.
    """
    if isinstance(op, Weighted):
        return _plain(network, op, fmt)
    if not isinstance(op, Affine) or fmt is None:
        return None
    x = network.values[op.inputs[0]]
    before = network.operation(op.inputs[0])
    layer = before if isinstance(before, Weighted) else _ones(op, x)
    shift = op.shift(x.fl)
    if layer is None or shift is None:
        return None
    sums = _sums(network, layer, *shift)
    if sums is None:
        return None
    if not _all_rounded_exactly(op, x, fmt):
        return None
    return _scaled(op, sums, fmt, network.values[layer.inputs[0]].fl)


def _plain(network: Network, op: Weighted, fmt: FixedPoint | None) -> Folded | None:
    """Return a layer's sums alone."""
    value = network.values[op.name]
    sums = _sums(network, op, None, value.fl)
    if sums is None:
        return None
    for channel in range(len(op.weight)):
        total, zeros = total_of(value, channel, 0, value.fl)
        is_exact = fmt is not None and rounds_exactly(1 << zeros, total, value.fl, fmt)
        if total > 2**FLOAT32_BITS and not is_exact:
            return None
    return sums


def absorbed(network: Network) -> dict[str, str]:
    """Return values that float32 does not have, though it has whatever is made of them.

    They are batch normalisations computed as ``(x + b) * scale`` and then rounded, by the rule
    above, with what keeps the order in between: ReLU and max pooling.

    Returns:
        The name of one rounding of each.
    """
    found: dict[str, str] = {}
    for op in network.operations:
        if isinstance(op, Affine) and not network.values[op.name].is_exact(FLOAT32_BITS):
            between, rounds = roundings(network, op.name)
            x = network.values[op.inputs[0]]
            if rounds and all(_is_rounded_exactly(op, x, r.fmt) for r in rounds):
                found |= dict.fromkeys(between, rounds[0].name)
    return found


def roundings(network: Network, name: str) -> tuple[list[str], list[Round]]:
    """Return names from a value to its roundings, and these; none where anything else takes it, or it is an output."""
    between, rounds, outputs = [name], [], {*network.outputs.values()}
    for current in between:  # which grows
        users = network.users.get(current, [])
        rounds += [op for op in users if isinstance(op, Round)]
        others = [op for op in users if not isinstance(op, Round)]
        is_taken = not users or not all(isinstance(op, KEEP_ORDER) for op in others)
        if is_taken or current in outputs:
            return [], []
        between += [op.name for op in others]
    return between, rounds


def _is_rounded_exactly(op: Affine, x: Value, fmt: FixedPoint) -> bool:
    """Say whether float32 gives the codes of ``op``, computed as ``(x + b) * scale`` and rounded.

    Args:
        op: The operation.
        x: What it takes.
        fmt: What it is rounded to.
    """
    shift = op.shift(x.fl)
    if shift is None or not x.is_exact(FLOAT32_BITS):
        return False
    constants = torch.cat([op.offset[op.scale == 0], shift[0]])
    return torch.equal(constants.float().long(), constants) and _all_rounded_exactly(op, x, fmt)


def _all_rounded_exactly(op: Affine, x: Value, fmt: FixedPoint) -> bool:
    """Say whether the rule holds in every channel."""
    shift = op.shift(x.fl)
    assert shift is not None
    codes, at_fl = shift
    for channel, (scale, b) in enumerate(zip(op.scale.tolist(), codes.tolist(), strict=True)):
        total, zeros = total_of(x, channel, b, at_fl)
        if not rounds_exactly(scale << zeros, total, at_fl + op.scale_fmt.fl, fmt):
            return False
    return True


def total_of(x: Value, channel: int, b: int, at_fl: int) -> tuple[int, int]:
    """Return a bound of ``x + b`` in a channel, and its steps: ``2**(zeros - at_fl)``.

    Returns:
        The bound, and ``zeros``.
    """
    found = x.channel(channel)
    total = (max(abs(found.low), abs(found.high)) << at_fl - x.fl) + abs(b)
    zeros = trailing_zeros(b, found.trailing_zeros)
    return total >> zeros, zeros


def rounds_exactly(scale: int, total: int, fl: int, fmt: FixedPoint) -> bool:
    """Say whether sums up to ``total`` times ``scale``, at ``fl``, are rounded exactly."""
    if scale == 0:
        return True
    zeros = (scale & -scale).bit_length() - 1
    odd, r = abs(scale) >> zeros, fl - zeros - fmt.fl
    is_in_range = fmt.max_code.bit_length() + r <= FLOAT32_BITS
    return odd <= 2**FLOAT32_BITS and (is_in_range or total * odd <= 2**FLOAT32_BITS)


def _sums(network: Network, op: Weighted, b: Tensor | None, at_fl: int) -> Folded | None:
    """Return a layer's sums plus ``b`` at ``at_fl``; None where bytes and int32 do not hold them."""
    x = network.values[op.inputs[0]]
    left = at_fl - x.fl - op.weight_fmt.fl
    if not 0 <= left <= 8:
        return None
    bias = None if b is None else b.numpy()
    if op.bias is not None:
        own = align(op.bias.numpy(), at_fl - op.bias_fmt.fl)
        bias = own if bias is None else own + bias
    zeros = _shared_zeros(op, bias, left)
    weight = op.weight.numpy() << left >> zeros.reshape(-1, *[1] * (op.weight.ndim - 1))
    low, high = int(weight.min()), int(weight.max())
    is_byte = (low >= -128 and high <= 127) or (low >= 0 and high <= 255)
    total = np.abs(weight).reshape(len(weight), -1).sum(1) * max(-x.low, x.high, 0)
    if bias is not None:
        bias = bias >> zeros
        total = total + np.abs(bias)
    if not is_byte or total.max() > _INT32:
        return None
    scales = 2.0 ** (x.fl - at_fl + zeros)
    return Folded(op, weight, bias, scales if op.per_channel else scales[0])


def _shared_zeros(op: Weighted, bias: Codes | None, left: int) -> Codes:
    """Return how often 2 divides all that is summed in each channel, int64, shape ``(out,)``."""
    if op.per_channel is None:
        return np.zeros(len(op.weight), np.int64)
    biases = [0] * len(op.weight) if bias is None else bias.tolist()
    pairs = zip(op.trailing_zeros, biases, strict=True)
    return np.array([trailing_zeros(b, zeros + left) for zeros, b in pairs], np.int64)


def _scaled(op: Affine, sums: Folded, fmt: FixedPoint, fl: int) -> Folded:
    """Return sums with the scales of ``op``; where those are 0, the code itself is the bias."""
    assert sums.bias is not None
    scale = op.scale.numpy()
    rows = len(scale), *[1] * (sums.weight.ndim - 1)
    can_negate = (sums.weight.reshape(len(scale), -1).min(1) > -128) & (sums.weight.max() <= 127)
    sign = np.where((scale < 0) & can_negate, -1, 1)
    is_zero = scale == 0
    constants = round_codes(op.offset.numpy(), op.offset_fmt.fl, fmt)
    weight = np.where(is_zero, 0, sign).reshape(rows) * sums.weight
    bias = np.where(is_zero, constants, sign * sums.bias)
    scales = np.where(is_zero, 2.0 ** (fl - fmt.fl), sign * scale * op.scale_fmt.lsb * sums.scales)
    return Folded(sums.layer, weight, bias, scales)


def _ones(op: Affine, x: Value) -> Conv | None:
    """Return a convolution that gives each channel of images or sequences back."""
    sides = len(x.shape) - 1
    if sides not in (1, 2):
        return None
    one = torch.ones(x.shape[0], 1, *[1] * sides, dtype=torch.int64)
    fmt, same = FixedPoint(8, 0), ((1,) * sides, (0,) * sides, (1,) * sides, x.shape[0])
    return Conv(op.name, op.inputs, one, fmt, None, fmt, *same)
