"""Compact states in plain PyTorch: the definition that the kernels are tested against."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from fixedpoint_kernels.compact.records import (
    BLOCK,
    DTYPES,
    FACTORS,
    Adam,
    Codes,
    Kind,
    Moves,
    Noise,
    Row,
    Sgd,
    Sum,
    blocks_of,
)
from fixedpoint_kernels.philox import Key, words
from fixedpoint_kernels.rounding import reference as rounding_reference
from fixedpoint_kernels.rounding.reference import Rounding

_MOST = {"fixed": 2.0**15 - 1, "signed": 127.0, "squares": 255.0}
_SMALLEST = 2.0**-126  # of float32's normal numbers


def encode(x: Tensor, kind: Kind, noise: Noise | None) -> Codes:
    """See ``fixedpoint_kernels.compact.encode``."""
    rows, count = blocks_of(x.shape)
    columns = x.shape[1:].numel()
    flat = x.detach().float().reshape(rows, columns)
    padded = pad(flat.abs(), (0, count * BLOCK - columns)).view(rows, count, BLOCK)
    scales = _scales(padded.amax(-1), kind)
    inverse = (1.0 / scales).repeat_interleave(BLOCK, 1)[:, :columns]
    chance = _chances(flat, noise)
    codes = _rounded(flat * inverse, chance, kind)
    if kind == "squares":
        codes = torch.where(flat > 0, codes.clamp(1.0), codes)
    return Codes(codes.nan_to_num(0.0).to(DTYPES[kind]).view(x.shape), scales)


def decode(codes: Codes, kind: Kind) -> Tensor:
    """See ``fixedpoint_kernels.compact.decode``."""
    shape = codes.codes.shape
    rows, columns = shape[0], shape[1:].numel()
    values = codes.codes.reshape(rows, columns).float()
    if kind == "signed":
        values = values * values.abs()
    elif kind == "squares":
        values = values.square().square()
    return (values * codes.scales.repeat_interleave(BLOCK, 1)[:, :columns]).view(shape)


def add_many(
    before: Sequence[Codes | Tensor],
    xs: Sequence[Tensor],
    noises: Sequence[Noise | None],
    dtype: torch.dtype,
) -> tuple[list[Sum | Tensor], Tensor]:
    """See ``fixedpoint_kernels.compact.add_many``."""
    sums, norms = [], []
    for own, x, noise in zip(before, xs, noises, strict=True):
        values = (decode(own, "signed") if isinstance(own, Codes) else own) + x
        is_coded = isinstance(own, Codes)
        sums.append(Sum(encode(values, "signed", noise), own, x) if is_coded else values)
        norms.append(vector_norm(values, dtype=dtype))
    return sums, torch.stack(norms)


def _scales(top: Tensor, kind: Kind) -> Tensor:
    """Return the scale of each block from its largest magnitude; NaN where that is not finite."""
    if kind == "fixed":
        # of the leading bit, plus 127; one code above the largest must fit, too
        exponent = top.view(torch.int32) + 511 >> 23
        lsb = ((exponent - 14).clamp(1) << 23).view(torch.float32)
        return torch.where(top.isfinite(), lsb, torch.nan)
    most = _MOST[kind] ** (2 if kind == "signed" else 4)
    return torch.where(top.isfinite(), (top / most).clamp(_SMALLEST), torch.nan)


def _chances(flat: Tensor, noise: Noise | None) -> Tensor | float:
    """Return what the distance above a code is compared with: in steps, above 0 and below 1."""
    if noise is None:
        return 0.5
    first, n = noise.key.offset, flat.numel()
    key = noise.key._replace(offset=first >> 1)
    drawn = words((n + first % 2 + 1) // 2, key, flat.device)
    halves = torch.stack([drawn & 0xFFFF, drawn >> 16], dim=1).flatten()[first % 2 :][:n]
    own = halves * FACTORS[noise.lane] & 0xFFFF
    return ((own.float() + 0.5) * 2.0**-16).view(flat.shape)


def _rounded(scaled: Tensor, chance: Tensor | float, kind: Kind) -> Tensor:
    """Return codes, as float32, of values in units of their block's scale."""
    most = _MOST[kind]
    if kind == "fixed":
        below = scaled.floor()
        return (below + (scaled - below > chance)).clamp(-most, most)
    size = scaled.abs() if kind == "signed" else scaled.clamp(0.0)
    root = _sqrt(size) if kind == "signed" else _sqrt(_sqrt(size))
    below = root.floor().clamp(max=most)
    low, high = (_power(c, kind) for c in (below, below + 1.0))
    code = (below + ((high - low) * chance < size - low)).clamp(max=most)
    return code.copysign(scaled) if kind == "signed" else code


def _sqrt(x: Tensor) -> Tensor:
    """Return square roots, rounded once; those of torch on a CPU are off by an ulp in places."""
    return x.double().sqrt().float()


def _power(code: Tensor, kind: Kind) -> Tensor:
    square = code * code
    return square if kind == "signed" else square * square


def step_many(
    rows: Sequence[Row],
    moves: Moves,
    *,
    rounding: Rounding,
    seed: int,
    stream: int,
    noise: int,
) -> None:
    """See ``fixedpoint_kernels.compact.step_many``; ``rows`` are those of its targets."""
    moving = {row: (grad, move) for row, grad, move in zip(*moves, strict=True)}
    for position, row in enumerate(rows):
        own = row.master
        if position in moving:
            _step(row, *moving[position], Key(seed, noise + row.noise, row.offset))
        master = decode(own, "fixed") if isinstance(own, Codes) else own.detach()
        key = Key(seed, stream + row.stream, row.offset)
        if row.fmt is None:
            row.weight.copy_(master)
        else:
            rounding_reference.quantize(master, row.weight, None, row.fmt, rounding, key)


def _step(row: Row, grad: Tensor, move: Sgd | Adam, key: Key) -> None:
    """Move a master and its moments; ``key``: noise of what is compact."""
    kinds: tuple[Kind, ...] = ("fixed", "signed", "squares")
    places = list(zip((row.master, *row.moments), kinds, strict=False))
    master, *old = [decode(x, kind) if isinstance(x, Codes) else x for x, kind in places]
    new = _sgd(master, grad, old, move) if isinstance(move, Sgd) else _adam(master, grad, old, move)
    for lane, ((place, kind), values) in enumerate(zip(places, new, strict=True)):
        if isinstance(place, Codes):
            codes = encode(values, kind, Noise(key, lane))
            place.codes.copy_(codes.codes)
            place.scales.copy_(codes.scales)
        else:
            place.copy_(values)


def _sgd(master: Tensor, grad: Tensor, old: Sequence[Tensor], move: Sgd) -> list[Tensor]:
    step = grad.add(master, alpha=move.weight_decay) if move.weight_decay else grad
    if not old:
        return [master.add(step, alpha=-move.lr)]
    momentum = (old[0] * move.momentum).add_(step)
    step = step.add(momentum, alpha=move.momentum) if move.nesterov else momentum
    return [master.add(step, alpha=-move.lr), momentum]


def _adam(master: Tensor, grad: Tensor, old: Sequence[Tensor], move: Adam) -> list[Tensor]:
    beta1, beta2 = move.betas
    if move.weight_decay and move.decoupled:
        master = master * (1 - move.lr * move.weight_decay)
    elif move.weight_decay:
        grad = grad.add(master, alpha=move.weight_decay)
    first = old[0].lerp(grad, 1 - beta1)
    second = (old[1] * beta2).addcmul_(grad, grad, value=1 - beta2)
    size = move.lr / (1 - beta1**move.step)
    below = (_sqrt(second) / (1 - beta2**move.step) ** 0.5).add_(move.eps)
    return [master.addcdiv(first, below, value=-size), first, second]
