"""Scales of batch normalisation as long as integer kernels compute them exactly."""

from dataclasses import replace

import torch

from fixedpoint_kernels import FixedPoint
from marvin.export.bounds import value_of
from marvin.export.fold import SIGNIFICAND, roundings
from marvin.export.network import Affine, Network
from marvin.export.norm import shift_of

__all__ = ["short_scales"]

_BYTE = 8


def short_scales(network: Network) -> Network:
    """Return a network whose scales are short enough, where that is all that integer kernels lack.

    A scale before a rounding to at most 8 bits loses the last bits that the rule of ``fold`` does
    not allow: rounded to nearest, and the offset again a multiple of it. Others stay.
    """
    values, operations = dict(network.values), []
    for op in network.operations:
        new = _shortened(network, op) if isinstance(op, Affine) else op
        operations.append(new)
        is_first = new.inputs in ((), (network.input.name,))  # what comes in has no value
        if not is_first:
            values[new.name] = value_of(new, [values[name] for name in new.inputs])
    return replace(network, operations=tuple(operations), values=values)


def _shortened(network: Network, op: Affine) -> Affine:
    _, rounds = roundings(network, op.name)
    x = network.values[op.inputs[0]]
    shift = shift_of(op, x.fl)
    if shift is None or not rounds or any(r.fmt.wl > _BYTE for r in rounds):
        return op
    extra = max(
        r.fmt.max_code.bit_length() + shift[1] + op.scale_fmt.fl - r.fmt.fl - SIGNIFICAND
        for r in rounds
    )
    extra = min(extra, network.values[op.name].magnitude.bit_length() - SIGNIFICAND)
    wl = op.scale_fmt.wl - extra
    if extra <= 0 or wl < 2:
        return op
    scale_fmt = FixedPoint(wl, op.scale_fmt.fl - extra)
    scale = (
        torch.round(op.scale.double() * 2.0**-extra).to(torch.int64).clamp(max=scale_fmt.max_code)
    )
    offset_fmt = FixedPoint(op.offset_fmt.wl, op.offset_fmt.fl - extra)
    steps = torch.where(scale == 0, 1, scale)
    offset = torch.round(op.offset.double() * 2.0**-extra / steps).to(torch.int64) * steps
    return replace(op, scale=scale, scale_fmt=scale_fmt, offset=offset, offset_fmt=offset_fmt)
