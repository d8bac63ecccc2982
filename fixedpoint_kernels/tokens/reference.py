"""A segment in plain PyTorch operators and exact products: what the kernels are tested against.

Forward is equal to the bit: sums of float32 are added up in the order written here. Backward differs
in the order of sums over features, tokens and samples, which may move a code of a gradient by one.
What is kept between the two passes is rounded once, to bfloat16: what a norm makes before scale and
shift, what activation functions take, and what is multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedpoint_kernels import functions, products
from fixedpoint_kernels.dropout import Odds, keeps
from fixedpoint_kernels.products.reference import powers_of_two, to_bfloat16
from fixedpoint_kernels.rounding import encode, quantize_with_mask
from fixedpoint_kernels.tokens.graph import (
    Add,
    Attention,
    Curved,
    Cut,
    Dropout,
    Linear,
    Multiply,
    Norm,
    Operation,
    Part,
    Relu,
    Rotary,
    Segment,
)

__all__ = ["Parameters", "attend", "backward", "forward", "normalize"]

_LANES = 16


@dataclass
class Parameters:
    """What an operation has besides its description.

    Args:
        first: Weight of a linear layer, values of its format; scale of a norm; cosines. None: none.
        second: Bias of a linear layer; shift of a norm; sines. None: none.
        noise: Seed and stream of the gradient's rounding in a linear layer; of what dropout makes 0.
        shifts: How many fractional bits more each output has, of a linear layer ``by_channel``.
        second_stream: Of another rounding of its gradient, for the product with such a weight.
    """

    first: Tensor | None = None
    second: Tensor | None = None
    noise: tuple[int, int] = (0, 0)
    shifts: tuple[int, ...] = ()
    second_stream: int = 0


@dataclass
class Kept:
    """What backward needs: of each operation, and values."""

    made: list[tuple[Tensor, ...]]
    values: list[Tensor]


def forward(
    segment: Segment, xs: Sequence[Tensor], parameters: Sequence[Parameters]
) -> tuple[list[Tensor], Kept]:
    """Return the values that leave a segment, float32, and what backward needs.

    Args:
        segment: What is computed.
        xs: What comes in, (samples, tokens, features), float32.
        parameters: Of each operation.
    """
    kept = Kept([], list(xs))
    for op, own in zip(segment.operations, parameters, strict=True):
        y, made = _forward(op, kept.values, own)
        kept.values.append(y)
        kept.made.append(made)
    return [kept.values[v] for v in segment.outputs], kept


def _forward(
    op: Operation, values: list[Tensor], own: Parameters
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if isinstance(op, Attention):
        q, k, v = _attended(values, op)
        scores = _scores(q, k, op)
        if op.odds is None:
            return attend(scores, v).transpose(1, 2).flatten(2), ()
        kept = _kept_scores(scores, op.odds, own)
        return attend(_dropped(scores, kept, op.odds), v).transpose(1, 2).flatten(2), (kept,)
    if isinstance(op, Rotary):
        x, (cos, sin) = _heads(values[op.part.value], op.part, op.heads, op.size), _tables(own, op)
        turned, rest = x.split([op.turned, op.size - op.turned], -1)
        a, b = _halves(turned, op)
        turned = turned * cos + _joined(-b, a, op) * sin
        return torch.cat([turned, rest], -1).transpose(1, 2).flatten(2), ()
    x = values[op.source]
    if isinstance(op, Linear):
        assert own.first is not None
        _, inside = quantize_with_mask(x, op.inputs, rounding="nearest")
        codes = encode(x, op.inputs, rounding="nearest")
        shifts = _shifts(own, op)
        weight = own.first.detach().T if op.is_turned else own.first.detach()
        weight = encode(weight * powers_of_two(shifts)[:, None], op.weight, rounding="nearest")
        y = products.linear(codes, weight, exponents=-op.inputs.fl - op.weight.fl - shifts)
        return (y if own.second is None else y + own.second.detach()), (codes, inside, weight)
    if isinstance(op, Norm):
        found, inverse = normalize(_groups(x, op), op.eps, centred=op.centred)
        y = found * (1.0 if own.first is None else own.first.detach())
        y = y + (0.0 if own.second is None else own.second.detach())
        return y.view(x.shape), (to_bfloat16(found).float(), inverse)
    if isinstance(op, Multiply):
        other = values[op.other]
        return x * other, (to_bfloat16(x).float(), to_bfloat16(other).float())
    if isinstance(op, Add):
        return x + values[op.other], ()
    return _forward_of_one(op, x, own)


def _forward_of_one(
    op: Curved | Relu | Dropout | Cut, x: Tensor, own: Parameters
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if isinstance(op, Curved):
        return op.curve.value(x), (to_bfloat16(x).float(),)
    if isinstance(op, Relu):
        return torch.where(x <= 0, 0.0, x), ()
    if isinstance(op, Cut):
        return x[..., op.start : op.start + op.width], ()
    kept = keeps(x.numel(), op.odds, *own.noise).view(x.shape)
    return _dropped(x, kept, op.odds), (kept,)


def _dropped(x: Tensor, kept: Tensor, odds: Odds) -> Tensor:
    return torch.where(kept, x * torch.tensor(odds.factor, dtype=torch.float32, device="cpu"), 0.0)


def _kept_scores(scores: Tensor, odds: Odds, own: Parameters) -> Tensor:
    """Return which scores stay: noise lies by sample, head, 16 tokens that look, token that is seen, and each of the 16."""
    samples, heads, tokens, _ = scores.shape
    shape = samples, heads, -(tokens // -16), tokens, 16
    found = keeps(torch.Size(shape).numel(), odds, *own.noise).view(shape)
    return found.transpose(3, 4).flatten(2, 3)[:, :, :tokens]


def _shifts(own: Parameters, op: Linear) -> Tensor:
    """Return how many fractional bits more each output has, int32."""
    return torch.tensor(own.shifts or (0,) * op.shape[0], dtype=torch.int32, device="cpu")


def _groups(x: Tensor, op: Norm) -> Tensor:
    """Return values as (samples, tokens, heads, features); one head where all features are normalised together."""
    return x.unflatten(-1, (-1, op.size or x.shape[-1]))


def normalize(x: Tensor, eps: float, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Return features, without their mean where ``centred``, divided by the root of their mean square, and its inverse."""
    size = float(x.shape[-1])
    x = x - _total(x)[..., None] / size if centred else x
    square = _total(x * x)[..., None] / size + torch.tensor(eps, dtype=torch.float32, device="cpu")
    inverse = 1.0 / square.double().sqrt().float()  # torch's root of float32 may round otherwise
    return x * inverse, inverse


def _total(x: Tensor) -> Tensor:
    """Add up the last dimension: in 16 lanes one after the other, then halves of the lanes."""
    lanes = x.unflatten(-1, (-1, _LANES))
    total = torch.zeros_like(lanes[..., 0, :])
    for i in range(lanes.shape[-2]):
        total = total + lanes[..., i, :]
    for half in (8, 4, 2, 1):
        total = total[..., :half] + total[..., half:]
    return total[..., 0]


def _heads(value: Tensor, part: Part, heads: int, size: int) -> Tensor:
    """Return a part of features as (samples, heads, tokens, size)."""
    starts = [part.start + part.step * head for head in range(heads)]
    return torch.stack([value[..., s : s + size] for s in starts], 1)


def _attended(values: list[Tensor], op: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, a head of each for every head of queries."""
    q, k, v = (_heads(values[part.value], part, n, op.size) for part, n in op.heads_of_parts)
    return q, k.repeat_interleave(op.groups, 1), v.repeat_interleave(op.groups, 1)


def _tables(own: Parameters, op: Rotary) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (samples or 1, 1, tokens, turned)."""
    assert own.first is not None
    assert own.second is not None
    samples = len(own.first) if op.by_sample else 1
    cos, sin = (x.reshape(samples, 1, -1, op.turned) for x in (own.first, own.second))
    return cos, sin


def _scores(q: Tensor, k: Tensor, op: Attention) -> Tensor:
    """Return the softmax of products of queries and keys; sums over features and over tokens in order."""
    products = torch.zeros(*q.shape[:-1], k.shape[-2], dtype=torch.float32, device=q.device)
    for d in range(op.size):
        products = products + q[..., d, None] * k[..., None, :, d]
    products = products * torch.tensor(op.scale, dtype=torch.float32, device="cpu")
    tokens = k.shape[-2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device)
    seen = seen.tril() if op.causal else seen
    products = products.masked_fill(~seen, -torch.inf)
    powers = functions.exp(products - products.amax(-1, keepdim=True)).masked_fill(~seen, 0.0)
    total = torch.zeros(powers.shape[:-1], dtype=torch.float32, device=q.device)
    for j in range(tokens):
        total = total + powers[..., j]
    return powers / total[..., None]


def attend(scores: Tensor, v: Tensor) -> Tensor:
    """Return the mean of values by scores."""
    y = torch.zeros(*scores.shape[:-1], v.shape[-1], dtype=torch.float32, device=v.device)
    for j in range(v.shape[-2]):
        y = y + scores[..., j, None] * v[..., None, j, :]
    return y


Pair = tuple[Tensor | None, Tensor | None]


def backward(
    segment: Segment, kept: Kept, parameters: Sequence[Parameters], grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Pair]]:
    """Return the gradients of what came in, and of each operation's parameters."""
    back: dict[int, Tensor] = {}
    for v, grad in zip(segment.outputs, grads, strict=True):
        back[v] = grad
    found: list[Pair] = []
    count = len(segment.inputs)
    for i in reversed(range(len(segment.operations))):
        op, own = segment.operations[i], parameters[i]
        ways, pair = _backward(op, kept, kept.made[i], own, back[count + i])
        found.insert(0, pair)
        for source, way in ways:
            back[source] = back[source] + way if source in back else way
    return [back[v] for v in range(count)], found


def _backward(
    op: Operation, kept: Kept, made: tuple[Tensor, ...], own: Parameters, g: Tensor
) -> tuple[list[tuple[int, Tensor]], Pair]:
    if isinstance(op, Linear):
        return _linear_backward(op, made, own, g)
    if isinstance(op, Norm):
        (normal, inverse), shape, g = made, g.shape, _groups(g, op)
        scaled = g if own.first is None else g * own.first.detach()
        first = scaled.mean(-1, keepdim=True) if op.centred else 0.0
        second = (scaled * normal).mean(-1, keepdim=True)
        back = ((scaled - first - normal * second) * inverse).view(shape)
        return [(op.source, back)], ((g * normal).sum((0, 1, 2)), g.sum((0, 1, 2)))
    if isinstance(op, Curved):
        return [(op.source, g * op.curve.slope(made[0]))], (None, None)
    if isinstance(op, Multiply):
        return [(op.source, g * made[1]), (op.other, g * made[0])], (None, None)
    if isinstance(op, Relu):
        return [(op.source, torch.where(kept.values[op.source] > 0, g, 0.0))], (None, None)
    if isinstance(op, Dropout):
        return [(op.source, _dropped(g, made[0], op.odds))], (None, None)
    if isinstance(op, Add):
        return [(op.source, g), (op.other, g)], (None, None)
    if isinstance(op, Cut):
        found = torch.zeros_like(kept.values[op.source])
        found[..., op.start : op.start + op.width] = g
        return [(op.source, found)], (None, None)
    if isinstance(op, Rotary):
        return [(op.part.value, _rotary_backward(op, kept, own, g))], (None, None)
    return _attention_backward(op, kept, made, g), (None, None)


def _rotary_backward(op: Rotary, kept: Kept, own: Parameters, g: Tensor) -> Tensor:
    g, (cos, sin) = g.unflatten(-1, (op.heads, op.size)).transpose(1, 2), _tables(own, op)
    turned, rest = g.split([op.turned, op.size - op.turned], -1)
    a, b = _halves(turned * sin, op)
    way = torch.cat([turned * cos + _joined(b, -a, op), rest], -1)
    found = torch.zeros_like(kept.values[op.part.value])
    _add_heads(found, op.part, way)
    return found


def _halves(x: Tensor, op: Rotary) -> tuple[Tensor, Tensor]:
    """Return the features that are turned with each other."""
    half = op.turned // 2
    return (x[..., ::2], x[..., 1::2]) if op.in_pairs else (x[..., :half], x[..., half:])


def _joined(a: Tensor, b: Tensor, op: Rotary) -> Tensor:
    """Return features in one row again."""
    return torch.stack([a, b], -1).flatten(-2) if op.in_pairs else torch.cat([a, b], -1)


def _add_heads(found: Tensor, part: Part, way: Tensor) -> None:
    """Add the gradients of heads, (samples, heads, tokens, size), to that of the value where they lie."""
    for head in range(way.shape[1]):
        start = part.start + part.step * head
        found[..., start : start + way.shape[-1]] += way[:, head]


def _linear_backward(
    op: Linear, made: tuple[Tensor, ...], own: Parameters, g: Tensor
) -> tuple[list[tuple[int, Tensor]], Pair]:
    x, inside, weight = made
    seed, stream = own.noise
    codes, exponents = products.round_per_sample(g.flatten(1), seed=seed, stream=stream)
    codes = codes.view(g.shape)
    of_weight = products.linear_weight_gradient(x, codes, exponents=exponents) * op.inputs.lsb
    of_weight = of_weight.T if op.is_turned else of_weight
    if op.by_channel:
        moved = (g * powers_of_two(-_shifts(own, op))).flatten(1)
        codes, exponents = products.round_per_sample(moved, seed=seed, stream=own.second_stream)
        codes = codes.view(g.shape)
    powers = torch.where(exponents == 128, exponents, (exponents - op.weight.fl).clamp(max=127))
    back = products.linear_input_gradient(codes, weight, exponents=powers)
    if op.clip:
        back = torch.where(inside, back, 0.0)
    return [(op.source, back)], (of_weight, g.sum((0, 1)))


def _attention_backward(
    op: Attention, kept: Kept, made: tuple[Tensor, ...], g: Tensor
) -> list[tuple[int, Tensor]]:
    q, k, v = _attended(kept.values, op)
    scores = _scores(q, k, op)
    g = g.unflatten(-1, (op.heads, op.size)).transpose(1, 2)
    of_scores, weights = g @ v.mT, scores
    if op.odds is not None:
        of_scores, weights = (_dropped(x, made[0], op.odds) for x in (of_scores, scores))
    of_products = scores * (of_scores - (scores * of_scores).sum(-1, keepdim=True)) * op.scale
    ways = of_products @ k, of_products.mT @ q, weights.mT @ g
    found: dict[int, Tensor] = {}
    for (part, heads), way in zip(op.heads_of_parts, ways, strict=True):
        own = found.setdefault(part.value, torch.zeros_like(kept.values[part.value]))
        _add_heads(own, part, way.unflatten(1, (heads, -1)).sum(2))
    return list(found.items())
