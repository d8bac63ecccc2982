"""Scales of batch normalisation as long as integer kernels compute them exactly."""

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from marvin.export.graph.bounds import value_of
from marvin.export.graph.functions import Table
from marvin.export.graph.nodes import FLOAT32_BITS, Affine, Network, Round, Value, Weighted
from marvin.export.passes.batch_norm import spare_of, zeros_of
from marvin.export.passes.fold import roundings, rounds_exactly, total_of

__all__ = ["shorten_scales"]

_BYTE = 8


def shorten_scales(network: Network) -> Network:
    """Return a network whose scales are short enough, where that is all that integer kernels lack.

    Before a rounding to at most 8 bits, the scale of each channel loses as many of its last bits as
    the rule of ``fold`` asks for: it is rounded to nearest, and its offset is made a multiple of it
    again. Others stay, and so does an operation of which a channel would lose more than an eighth of its scale:
    its sums are too long for integer kernels. Where the network has tables, so does one whose roundings would reach
    more codes than before: a table has those that were reached.
    """
    values, operations = dict(network.values), []
    has_tables = any(isinstance(op, Table) for op in network.operations)
    for op in network.operations:
        new = op
        if isinstance(op, Affine):
            rounds = roundings(network, op.name)[1]
            if rounds and all(r.fmt.wl <= _BYTE for r in rounds):
                x, before = values[op.inputs[0]], network.operation(op.inputs[0])
                fl = values[before.inputs[0]].fl if isinstance(before, Weighted) else 0
                spare = spare_of(before, x, fl)
                new = _shortened(op, x, spare, rounds)
                if has_tables and new is not op and _reaches_more(op, new, x, rounds):
                    new = op
        operations.append(new)
        is_first = new.inputs in ((), (network.input.name,))  # what comes in has no value
        if not is_first:
            values[new.name] = value_of(new, [values[name] for name in new.inputs])
    return replace(network, operations=tuple(operations), values=values)


def _shortened(op: Affine, x: Value, spare: Tensor, rounds: list[Round]) -> Affine:
    shift = op.shift(x.fl)
    if shift is None:
        return op
    finer = op.offset_fmt.fl - op.scale_fmt.fl - x.fl
    zeros = zeros_of(x, spare, finer).tolist()

    def is_exact(channel: int, scale: int, b: int) -> bool:
        total, zeros = total_of(x, channel, b << max(0, -finer), shift[1])
        fl = shift[1] + op.scale_fmt.fl
        return all(rounds_exactly(scale << zeros, total, fl, r.fmt) for r in rounds)

    pairs = []
    for i, (scale, offset) in enumerate(zip(op.scale.tolist(), op.offset.tolist(), strict=True)):
        for lost in range(op.scale_fmt.wl + 1):  # with none left, the scale is 0
            short = min(round(scale / 2**lost), op.scale_fmt.max_code >> lost) << lost
            b = round(offset / (short << zeros[i])) << zeros[i] if short else 0
            if not op.offset_fmt.min_code <= short * b <= op.offset_fmt.max_code:
                b -= (1 if b > 0 else -1) << zeros[i]
            if is_exact(i, short, b):
                if _changes(op, x, i, short, rounds):
                    return op
                pairs.append((short, short * b if short else _significant(offset)))
                break
    scale, offset = torch.tensor(pairs).T
    return replace(op, scale=scale.contiguous(), offset=offset.contiguous())


def _reaches_more(op: Affine, new: Affine, x: Value, rounds: list[Round]) -> bool:
    """Say whether ``new`` has roundings to codes that those of ``op`` do not have."""
    pairs = [[value_of(r, [value_of(own, [x])]) for own in (op, new)] for r in rounds]
    return any(now.low < was.low or now.high > was.high for was, now in pairs)


def _changes(op: Affine, x: Value, channel: int, short: int, rounds: list[Round]) -> bool:
    """Say whether a shorter scale is another: an eighth off, and half a step somewhere."""
    scale = int(op.scale[channel])
    lost = abs(scale - short)
    moved = lost * x.channel(channel).magnitude
    half = max(r.fmt.fl for r in rounds) + 1 - x.fl - op.scale_fmt.fl  # in steps, to powers of two
    return 8 * lost > abs(scale) and Fraction(moved) * Fraction(2) ** half > 1


def _significant(code: int) -> int:
    """Return a code rounded to what float32 has."""
    lost = max(0, code.bit_length() - FLOAT32_BITS)
    return round(code / 2**lost) << lost
