"""Functions and methods that no layer stands for: sums, shapes, orders, parts, means."""

import math
import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fixedpoint_kernels import FixedPoint, quantize
from marvin.attention import attention_weights, padded_attention
from marvin.export.frontend.builder import Builder, Whole
from marvin.export.frontend.call import Call
from marvin.export.frontend.layers import average, reshape, rounded
from marvin.export.frontend.masks import COMPARISONS, add_mask, seen_columns
from marvin.export.frontend.sizes import CUTS
from marvin.export.frontend.transformers import (
    attention,
    exact_attention,
    mask_of,
    matmul,
    spelled_attention,
)
from marvin.export.graph.formats import exact_format
from marvin.export.graph.functions import Mul
from marvin.export.graph.nodes import Add, Affine, Flatten
from marvin.export.graph.views import Concat, Slice, Transpose
from marvin.export.passes.batch_norm import nearest, scales
from marvin.kinds import called

__all__ = ["CALLS", "SHAPES", "round_values"]

_PRIMES = 2, 3, 5, 7, 11, 13
_DIFFERENCES = operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_", "subtract"
_DIVISIONS = operator.truediv, operator.itruediv, torch.div, "div", "div_"


def _add(builder: Builder, call: Call) -> str:
    """Add a sum or a difference: of two values, or of a value and a constant tensor or a number."""
    numbers = [x for x in call.args if _is_number(x)]
    others = [x for x in call.args if isinstance(x, Tensor)] + numbers
    if len(call.args) != 2 or len(call.nodes) + len(others) != 2 or call.kwargs:
        raise call.refusal()
    is_in_place = call.node.target in (operator.iadd, operator.isub, "add_", "sub_")
    if is_in_place and not isinstance(call.args[0], fx.Node):
        raise call.refusal(": a constant must stay as it is: write h + constant")
    result = (_shifted if numbers else _summed)(builder, call)
    if is_in_place:
        builder.memory.write(call.node, call.args[0], result)
    else:
        builder.memory.new(call.node, result)
    return result


def _signs(call: Call) -> tuple[int, int]:
    return (1, -1) if call.node.target in _DIFFERENCES else (1, 1)


def _summed(builder: Builder, call: Call) -> str:
    """Add a sum of two values, or of a value and a constant tensor."""
    shape = builder.shape(call.codes(call.nodes[0]))
    sources: list[str] = []
    for x, sign in zip(call.args, _signs(call), strict=True):
        if isinstance(x, Tensor):
            sources.append(call.constant(x.double() * sign, shape))
        elif sign > 0:
            sources.append(call.codes(x))
        else:
            name = builder.unused(f"{call.name}.negative")
            sources.append(_moved_by(builder, name, call.codes(x), -1, 0))
            builder.whole = _difference(call, shape)
    shapes = {builder.shape(name) for name in sources}
    if len(shapes) > 1:
        got = " and ".join(map(str, shapes))
        instead = "repeat the smaller, torch.cat([v] * n, dim)"
        raise call.refusal(f": both must have one shape, got {got}: {instead}")
    return builder.add(Add(call.name, (sources[0], sources[1])))


def _difference(call: Call, shape: tuple[int, ...]) -> Whole:
    """Return what a difference is, and how large its terms are, for float64."""

    def whole(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        first, *others = inputs
        if not others:
            others, first = [first], call.of_sample(call.args[0], shape).to(first.device)
        return first - others[0], first.abs() + others[0].abs()

    return whole


def _shifted(builder: Builder, call: Call) -> str:
    """Add a sum of a value and a number; the value itself where the number is 0, as in ``sum(values)``."""
    signs = dict(zip(map(_is_number, call.args), _signs(call), strict=True))
    (number,) = (x * signs[True] for x in call.args if _is_number(x))
    sign, node = signs[False], call.nodes[0]
    if not math.isfinite(number):
        raise call.refusal(": a number must be finite")
    if sign > 0 and number == 0:
        return call.value(node)
    builder.whole = lambda inputs: (inputs[0] * sign + number, inputs[0].abs() + abs(number))
    return _moved_by(builder, call.name, call.codes(node), sign, number)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float)


def _moved_by(builder: Builder, name: str, source: str, sign: int, number: float) -> str:
    """Add ``sign * source + number``: exactly if ``scale_wl`` bits hold the number, else with as many."""
    ones = torch.ones(builder.values[source].channel_count, dtype=torch.float64)
    offset = ones * number
    fmt = exact_format(offset)
    if fmt is None or fmt.wl > builder.scale_wl:
        codes, fmt = nearest(offset, builder.scale_wl)
    else:
        codes = (offset * fmt.scale).to(torch.int64)
    scale = (ones * sign).to(torch.int64)
    return builder.add(Affine(name, (source,), scale, FixedPoint(2, 0), codes, fmt))


def _mul(builder: Builder, call: Call) -> str:
    if len(call.args) == 2 and len(call.nodes) == 1 and not call.kwargs:
        return _scaled(builder, call)
    if len(call.args) != 2 or len(call.nodes) != 2 or call.kwargs:
        raise call.refusal(": two values of the network can be multiplied")
    sources = call.codes(call.args[0]), call.codes(call.args[1])
    if len(builder.shape(sources[0])) != len(builder.shape(sources[1])):
        raise call.refusal(": both must have as many dimensions")
    result = builder.add(Mul(call.name, sources))
    if call.node.target in (operator.imul, "mul_"):
        builder.memory.write(call.node, call.args[0], result)
    else:
        builder.memory.new(call.node, result)
    return result


def _scaled(builder: Builder, call: Call) -> str:
    """Add a product with numbers, one a channel at most: powers of two exactly, else with ``scale_wl`` bits."""
    (number,) = (x for x in call.args if not isinstance(x, fx.Node))
    is_divided = call.node.target in _DIVISIONS
    if not isinstance(number, int | float | Tensor) or (
        is_divided and call.nodes[0] is not call.args[0]
    ):
        raise call.refusal(
            ": values of the network can be multiplied by each other, and by numbers"
        )
    source = call.codes(call.nodes[0])
    dims = range(len(builder.shape(source)))
    given = torch.as_tensor(number, dtype=torch.float64)
    factor = call.of_sample(
        given if given.numel() > 1 else given.reshape(()), builder.shape(source)
    )
    factor = 1 / factor if is_divided and factor.all() else factor
    axes = [i for i in dims if not torch.equal(factor, factor.narrow(i, 0, 1).expand_as(factor))]
    if len(axes) > 1:
        raise call.refusal(": numbers must be one a channel, the same in all other dimensions")
    order = tuple(sorted(dims, key=lambda i: i not in axes))  # channels first
    moved = _moved(builder, builder.unused(f"{call.name}.channels"), source, order)
    channels = builder.values[moved].channel_count
    numbers = factor.permute(order).reshape(channels, -1)[:, 0]
    fmt = exact_format(numbers)
    wl = builder.scale_wl if fmt is None else min(builder.scale_wl, fmt.wl)
    scale, fmt = scales(call.name, numbers, wl)
    offset = torch.zeros_like(scale)
    name = call.name if moved == source else builder.unused(f"{call.name}.scaled")
    result = builder.add(Affine(name, (moved,), scale, fmt, offset, FixedPoint(2, 0)))
    result = _moved(builder, call.name, result, tuple(order.index(i) for i in dims))

    def whole(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        by = factor.to(inputs[0].device)
        return inputs[0] * by, inputs[0].abs() * by.abs()

    builder.whole = whole
    if call.node.target in (operator.imul, operator.itruediv, "mul_", "div_"):
        builder.memory.write(call.node, call.nodes[0], result)
    else:
        builder.memory.new(call.node, result)
    return result


def round_values(x: Tensor, wl: int, fl: int, symmetric: bool, signed: bool) -> Tensor:
    """Return ``x``, floating, rounded to a format: what a module does around the calls inside of it."""
    if not x.is_floating_point():
        return x
    return quantize(x, FixedPoint(wl, fl, symmetric, signed), rounding="nearest")


def _round(builder: Builder, call: Call) -> str:
    fmt = FixedPoint(*call.args[1:])
    result = rounded(builder, call.name, call.value(call.args[0]), fmt)
    builder.memory.new(call.node, result)
    return result


def _unused(_builder: Builder, _call: Call) -> str:
    """Leave out what nothing takes; what does is refused."""
    return ""


def _divided(builder: Builder, call: Call) -> str:
    if len(call.args) != 2 or len(call.nodes) != 1 or call.kwargs:
        raise call.refusal(": a value of the network can be divided by a number")
    return _scaled(builder, call)


def _matmul(builder: Builder, call: Call) -> str:
    if len(call.args) != 2 or len(call.nodes) != 2 or call.kwargs:
        raise call.refusal(
            ": two values of the network can be multiplied; of weights, use nn.Linear"
        )
    values = [call.value(node) for node in call.args]
    shapes = [builder.shape(value) for value in values]
    if len(shapes[0]) < 2 or shapes[0][:-2] != shapes[1][:-2]:
        raise call.refusal(f": matrices must have one shape before them, got {shapes}")
    result = matmul(builder, call.name, values, [node.name for node in call.args])
    builder.whole = lambda inputs: (inputs[0] @ inputs[1], inputs[0].abs() @ inputs[1].abs())
    builder.memory.new(call.node, result)
    return result


def _attention(builder: Builder, call: Call) -> str:
    try:
        nodes, scale, mask, is_causal = spelled_attention(call.args, call.kwargs)
    except ValueError as error:
        raise call.refusal(f": {error}") from error
    return _attended(builder, call, nodes, scale, (mask, is_causal, False))


def _padded(builder: Builder, call: Call) -> str:
    """Add attention as ``marvin.spell_attention`` writes it, with padding."""
    *nodes, mask, padding, is_causal, _dropout = call.args
    if isinstance(mask, fx.Node):
        raise call.refusal(
            ": attn_mask must be a constant to be exported, got one that depends on what comes in: write a "
            "padding mask as key_padding_mask=ids == padding"
        )
    if isinstance(mask, Tensor) and mask.dtype is torch.bool:
        mask = ~mask  # of what is seen, from here on
    if isinstance(mask, Tensor) and mask.ndim == 3:  # of samples and heads
        heads = builder.shape(call.value(nodes[0]))[0]
        mask = mask.unflatten(0, (-1, heads))
    return _attended(builder, call, nodes, None, (mask, is_causal and mask is None, padding))


def _attended(
    builder: Builder,
    call: Call,
    nodes: Sequence[object],
    scale: float | None,
    masks: tuple[object, bool, object],
) -> str:
    """Add attention; ``masks`` are a mask of what is seen, whether it is causal, and padding or False."""
    mask, is_causal, padding = masks
    for side, node in zip(("query", "key", "value"), nodes, strict=True):
        if isinstance(node, Tensor):
            raise call.refusal(
                f": the {side} must be a value of the network, got a constant of shape {tuple(node.shape)}: of a "
                "learned query, the scores are scores = nn.Linear(features, queries, bias=False)(key), and "
                "attention is scores.transpose(-2, -1).softmax(-1) @ value"
            )
    values = [call.value(node) for node in nodes]
    for dims in (len(builder.shape(value)) for value in values):
        if dims < 2:
            raise call.refusal(
                f": attention must take samples of 2 dimensions or more, got {dims}: the first dimension of "
                "what describe takes counts samples, so write x[None] for one"
            )
    *before, rows, features = builder.shape(values[0])
    columns = builder.shape(values[1])[-2]
    of_sample: tuple[str, ...] = ()
    of_samples = [node for node in (padding, mask) if isinstance(node, fx.Node)]
    try:
        if any(builder.shape(value)[:-2] != tuple(before) for value in values):
            raise ValueError("queries, keys and values must have the same heads")
        for node in of_samples:
            scores = (*before, rows, columns)
            of_sample = (seen_columns(builder, call, node, scores, node is padding),)
        constant = None if isinstance(mask, fx.Node) else mask
        seen = mask_of(constant, is_causal, rows, columns)
    except ValueError as error:
        raise call.refusal(f": {error}") from error
    scale = 1 / math.sqrt(features) if scale is None else scale
    names = [node.name for node in nodes if isinstance(node, fx.Node)]
    result = attention(builder, call.name, values, names, scale, seen, of_sample)
    places = [call.nodes.index(node) for node in (*nodes, *of_samples) if isinstance(node, fx.Node)]
    exact = exact_attention(scale, seen, is_padded=padding is not False)
    builder.whole = lambda inputs: exact([inputs[i] for i in places])
    builder.memory.new(call.node, result)
    return result


def _reshape(builder: Builder, call: Call) -> str:
    source, shape = call.value(call.args[0]), call.shape
    if shape == builder.shape(source):
        result = source
    elif len(shape) == 1 and builder.shape(source):
        result = builder.keep(call.name, source, lambda n, x, _fmt: Flatten(n, (x,)))
    else:
        result = reshape(builder, call.name, source, shape)
    builder.memory.view(call.node, call.args[0], result)
    return result


def _clone(builder: Builder, call: Call) -> str:
    result = call.value(call.args[0])
    builder.memory.new(call.node, result)
    return result


def _transpose(builder: Builder, call: Call) -> str:
    source = call.value(call.args[0], in_any_order=True)
    dims = len(builder.shape(source)) + 1
    sizes = _PRIMES[:dims]  # which tell where each dimension goes
    moved = Call.replay(call, [torch.empty(sizes)]).shape
    order = tuple(sizes.index(size) for size in moved)
    result = _moved(builder, call.name, source, tuple(i - 1 for i in order if i))
    builder.memory.view(call.node, call.args[0], result, order.index(0))
    return result


def _attribute(builder: Builder, call: Call) -> str:
    if call.args[1] != "mT":
        raise call.refusal()
    return _transpose(builder, call)


def _moved(builder: Builder, name: str, source: str, order: tuple[int, ...]) -> str:
    if order == tuple(range(len(order))):
        return source
    return builder.keep(name, source, lambda n, x, _fmt: Transpose(n, (x,), order))


def _concat(builder: Builder, call: Call) -> str:
    arguments = dict(zip(("tensors", "dim"), call.args, strict=False)) | call.kwargs
    dim, values = arguments.get("dim", arguments.get("axis", 0)), arguments["tensors"]
    if isinstance(values, fx.Node):
        parts = Call.of(builder, values)
        raise parts.refusal(": it must leave the batch alone" if called(values) in CUTS else "")
    sources = tuple(
        call.constant(x, tuple(x.shape[1:])) if isinstance(x, Tensor) else call.codes(x)
        for x in values
    )
    axis = dim % (len(builder.shape(sources[0])) + 1) - 1
    if axis < 0:
        raise call.refusal(": it must leave the batch alone, give dim=1 or more")
    result = builder.add(Concat(call.name, sources, axis))
    builder.memory.new(call.node, result)
    return result


def _item(builder: Builder, call: Call) -> str:
    """Add a part of a tensor: one of several, or by indices."""
    of = call.args[0]
    whole = of
    if of not in builder.memory:
        parts = Call.of(builder, of)
        if called(of) not in CUTS:
            raise parts.refusal()
        whole = parts.args[0]
    source = call.value(whole, in_any_order=True)
    if whole is of and _ends_samples(call.node.args[1]):
        raise call.refusal(": it must leave the batch alone")
    # the indices of each element of one sample say which part it is
    shape = builder.shape(source)
    numbers = torch.arange(_product(shape)).reshape(1, *shape)
    try:
        batch = max(2, builder.observed.shapes[builder.operations[0].name][0])
        samples = torch.arange(batch).reshape(batch, *[1] * len(shape)).expand(batch, *shape)
        part, sample = (call.replay([x]) for x in (numbers.expand(batch, *shape), samples))
    except (IndexError, RuntimeError) as error:
        raise call.refusal() from error
    place = _batch_of(sample, batch)
    if place is None:
        raise call.refusal(": it must leave the batch alone")
    part = part.movedim(place, 0)
    if not torch.equal(part, part[:1].expand_as(part)):
        raise call.refusal(": it must leave the batch alone")
    result = _slices(builder, call, source, part[0])
    builder.memory.view(call.node, whole, result, place)
    return result


def _ends_samples(index: object) -> bool:
    """Say whether an index has all samples up to some number alone."""
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, slice) and isinstance(first.stop, int)


def _batch_of(sample: Tensor, batch: int) -> int | None:
    """Return the dimension in which a part has all samples, in order; None where there is none."""
    for place, size in enumerate(sample.shape):
        first = torch.arange(size).reshape(-1, *[1] * (sample.ndim - place - 1))
        if size == batch and torch.equal(sample, first.expand_as(sample)):
            return place
    return None


def _slices(builder: Builder, call: Call, source: str, part: Tensor) -> str:
    """Add the slices that give a part, whose elements are numbered as those of the source."""
    shape = builder.shape(source)
    if not part.numel():
        got = tuple(part.shape)
        raise call.refusal(f": a part must have values, got shape {got} of {shape}: leave it out")
    places = torch.unravel_index(part.reshape(-1), shape)
    result = source
    for axis, taken in enumerate(places):
        found = taken.unique()  # in order
        step = int(found[1] - found[0]) if len(found) > 1 else 1
        start, stop = int(found[0]), int(found[-1]) + 1
        if not torch.equal(found, torch.arange(start, stop, step)):
            raise call.refusal(": indices must be a slice")
        if (start, stop, step) != (0, shape[axis], 1):
            what = axis, start, stop, step
            name = call.name if result == source else builder.unused(f"{call.name}.part")
            result = builder.keep(name, result, lambda n, x, _f, what=what: Slice(n, (x,), *what))
    sizes = tuple(len(taken.unique()) for taken in places)
    grid = torch.arange(_product(shape)).reshape(shape)
    for axis, taken in enumerate(places):
        grid = grid.index_select(axis, taken.unique())
    if not torch.equal(grid.reshape(-1), part.reshape(-1)):
        raise call.refusal(": indices must be slices in order")
    if tuple(part.shape) != sizes:
        name = call.name if result == source else builder.unused(f"{call.name}.shaped")
        result = reshape(builder, name, result, tuple(part.shape))
    return result


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _mean(builder: Builder, call: Call) -> str:
    """Add a mean over some dimensions: moved behind the others, then averaged in one window."""
    arguments = dict(zip(("input", "dim", "keepdim"), call.args, strict=False)) | call.kwargs
    source, dims = call.codes(call.args[0]), arguments.get("dim")
    if arguments.get("dtype") is not None or dims is None:
        raise call.refusal(": give the dimensions, without the batch, and no dtype")
    shape = builder.shape(source)
    chosen = [dims] if isinstance(dims, int) else list(dims)
    axes = sorted(d % (len(shape) + 1) - 1 for d in chosen)
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    if not axes or axes[0] < 0:
        raise call.refusal(": it must leave the batch alone")
    result = _moved(builder, builder.unused(f"{call.name}.moved"), source, (*kept, *axes))
    sizes = [shape[axis] for axis in axes]
    sides = tuple(sizes) if len(sizes) <= 2 else (_product(sizes),)
    images = (_product([shape[axis] for axis in kept]), *sides)
    if builder.shape(result) != images:
        result = reshape(builder, builder.unused(f"{call.name}.images"), result, images)
    window = sides, sides, (0,) * len(sides)
    result = average(builder, call.name, result, window, call.node.name)
    result = reshape(builder, builder.unused(f"{call.name}.shaped"), result, call.shape)
    builder.memory.new(call.node, result)
    return result


_HANDLERS: list[tuple[Sequence[object], Callable[[Builder, Call], str]]] = [
    ((operator.add, operator.iadd, torch.add, "add", "add_"), _add),
    (_DIFFERENCES, _add),
    ((operator.mul, operator.imul, torch.mul, "mul", "mul_"), _mul),
    ((operator.truediv, operator.itruediv, torch.div, "div", "div_"), _divided),
    ((operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm"), _matmul),
    ((F.scaled_dot_product_attention,), _attention),
    ((padded_attention,), _padded),
    (COMPARISONS, add_mask),
    ((round_values,), _round),
    ((attention_weights,), _unused),
    ((getattr,), _attribute),
    (("view", "reshape", "flatten", "unsqueeze", "squeeze", "unflatten", "contiguous"), _reshape),
    ((torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze), _reshape),
    (("clone", torch.clone), _clone),
    (("transpose", "permute", "swapaxes", "movedim"), _transpose),
    ((torch.transpose, torch.permute, torch.swapaxes, torch.movedim), _transpose),
    ((torch.cat, torch.concat, torch.concatenate), _concat),
    ((operator.getitem,), _item),
    (("mean", torch.mean), _mean),
]
CALLS = {target: handler for targets, handler in _HANDLERS for target in targets}
SHAPES = [target for target, handler in CALLS.items() if handler is _reshape]
