"""A segment in plain PyTorch operators and exact products: what the fused kernels are tested against.

Forward is equal to the bit. Backward differs only in the order in which float32 sums over a batch
are added: those of batch norm's two reductions. What is kept between two passes is rounded once: a
convolution's sums before batch norm, and the gradient of a value, to bfloat16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from fixedpoint_kernels import products
from fixedpoint_kernels.functions import Curve
from fixedpoint_kernels.fused.graph import (
    INPUT,
    Joined,
    Layer,
    Norm,
    Pooled,
    Return,
    Scaled,
    Segment,
)
from fixedpoint_kernels.products.reference import powers_of_two, to_bfloat16
from fixedpoint_kernels.rounding import encode, quantize_with_mask

__all__ = ["Parameters", "backward", "forward"]


@dataclass
class Parameters:
    """What a layer has besides its formats.

    Args:
        weight: Values of the weight's format, float32; (outputs, inputs) of a linear layer; of batch
            norm alone an empty one.
        scale: Of batch norm, or None.
        shift: Of batch norm, or the bias; None: none.
        noise: Seed and stream of the gradient's rounding.
        shifts: How many fractional bits more each output has, of a layer ``by_channel``.
        second_stream: Of another rounding of its gradient, for the product with such a weight.
        running: Mean and variance of batch norm for eval mode, float32, contiguous, which the
            kernels move by ``momentum``; None: none.
        momentum: Share of a batch in these.
    """

    weight: Tensor
    scale: Tensor | None = None
    shift: Tensor | None = None
    noise: tuple[int, int] = (0, 0)
    shifts: tuple[int, ...] = ()
    second_stream: int = 0
    running: tuple[Tensor, Tensor] | None = None
    momentum: float = 0.0


@dataclass
class _Made:
    codes: Tensor  # that the layer took
    inside: Tensor
    weight: Tensor  # codes
    z: Tensor
    mean: Tensor
    inverse: Tensor  # 1 / standard deviation
    variance: Tensor


@dataclass
class Kept:
    """What backward needs."""

    layers: list[_Made]
    values: dict[int, Tensor]
    places: dict[int, Tensor] = field(default_factory=dict)  # what was taken, of pooled values
    curved: dict[int, tuple[Curve, Tensor]] = field(default_factory=dict)  # and what it took

    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return mean and (biased) variance of each layer's channels, float64."""
        return [(made.mean, made.variance) for made in self.layers]


def forward(
    segment: Segment, x: Tensor, parameters: Sequence[Parameters]
) -> tuple[list[Tensor], Kept]:
    """Return the values that leave a segment, float32, and what backward needs."""
    kept = Kept([], {INPUT: x})
    for n, layer in enumerate(segment.layers):
        source = _value(segment, layer.source, kept, parameters)
        made = (
            _measured(segment, layer, kept)
            if isinstance(layer, Norm)
            else _layer(layer, source, parameters[n])
        )
        kept.layers.append(made)
    outputs = []
    for i, value in enumerate(segment.values):
        if value.is_output:
            outputs.append(_value(segment, i, kept, parameters))
            outputs[-1] = outputs[-1].flatten(1) if value.is_flat else outputs[-1]
    return outputs, kept


def _layer(layer: Layer, x: Tensor, own: Parameters) -> _Made:
    x = x.flatten(1)[..., None, None] if layer.is_flat else x
    _, inside = quantize_with_mask(x, layer.inputs, rounding="nearest")
    codes = encode(x, layer.inputs, rounding="nearest")
    shifts = _shifts(own, layer)
    values = own.weight.view(layer.shape) * powers_of_two(shifts).view(-1, 1, 1, 1)
    weight = encode(values, layer.weight, rounding="nearest")
    exponents = -layer.inputs.fl - layer.weight.fl - shifts
    kind = torch.float32 if layer.eps is None else torch.bfloat16
    y, sums = products.convolve_with_statistics(
        codes, weight, exponents=exponents, dtype=kind, **layer.window._asdict()
    )
    count = y.numel() // y.shape[1]
    mean = sums.sums.double() / count
    variance = (sums.squares / count - mean * mean).clamp(min=0)
    powers = powers_of_two(exponents).double()
    mean, variance = mean * powers, variance * (powers * powers)
    inverse = torch.ones_like(mean) if layer.eps is None else 1 / (variance + layer.eps).sqrt()
    return _Made(codes, inside, weight, y, mean, inverse, variance)


def _shifts(own: Parameters, layer: Layer) -> Tensor:
    """Return how many fractional bits more each output has, int32."""
    return torch.tensor(own.shifts or (0,) * layer.shape[0], dtype=torch.int32, device="cpu")


def _measured(segment: Segment, layer: Norm, kept: Kept) -> _Made:
    """Return a value as batch norm keeps it: bfloat16; mean and variance are those of the float32."""
    x, none = kept.values[layer.source], torch.empty(0, dtype=torch.bool, device="cpu")
    count = x.numel() // x.shape[1]
    moments = _moments(segment, layer.source, kept)
    mean, squares = (_in_order(part) / count for part in moments)
    variance = (squares - mean * mean).clamp(min=0)
    inverse = 1 / (variance + layer.eps).sqrt()
    return _Made(none, none, none, to_bfloat16(x), mean, inverse, variance)


def _moments(segment: Segment, i: int, kept: Kept) -> tuple[Tensor, Tensor]:
    """Return the sums of each image of a value, and of its squares: (images, channels) float64."""
    value = None if i == INPUT else segment.values[i]
    if isinstance(value, Joined):
        parts = zip(*(_moments(segment, k, kept) for k in value.sources), strict=True)
        first, second = (
            F.pad(torch.cat(part, 1), value.zeros) * math.prod(value.times) for part in parts
        )
        return first, second
    x = kept.values[i].double()
    return _by_image(x).flatten(1), _by_image(x * x).flatten(1)


def _term(layer: Layer | Norm, made: _Made, own: Parameters) -> Tensor:
    """Return what a layer makes, float32: its sums, scaled and shifted."""
    a, b = coefficients(layer, made.mean, made.inverse, own.scale, own.shift)
    return made.z.float() * a.view(-1, 1, 1) + b.view(-1, 1, 1)


def coefficients(
    layer: Layer | Norm, mean: Tensor, inverse: Tensor, scale: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return by what each channel is multiplied, and what is added; float32, from float64."""
    offset = torch.zeros_like(mean) if shift is None else shift.detach().double()
    if layer.eps is None:
        return torch.ones_like(mean).float(), offset.float()
    a = inverse if scale is None else scale.detach().double() * inverse
    return a.float(), (offset - a * mean).float()


def _value(segment: Segment, i: int, kept: Kept, parameters: Sequence[Parameters]) -> Tensor:
    value = segment.values[i] if i not in kept.values else None
    if isinstance(value, Pooled):
        source = _value(segment, value.source, kept, parameters)
        if value.is_mean:
            kept.values[i] = _average(value, source)
        else:
            kept.values[i], kept.places[i] = _pool(value, source)
    elif isinstance(value, Scaled):
        source, gate = (_value(segment, k, kept, parameters) for k in (value.source, value.gate))
        kept.values[i] = source * gate
    elif isinstance(value, Joined):
        whole = torch.cat([_value(segment, k, kept, parameters) for k in value.sources], 1)
        down, across = value.times
        whole = F.pad(whole, (0, 0, 0, 0, *value.zeros))
        kept.values[i] = whole.repeat_interleave(down, 2).repeat_interleave(across, 3)
    elif value is not None:
        terms = [_term(segment.layers[n], kept.layers[n], parameters[n]) for n in value.layers]
        terms += [_value(segment, k, kept, parameters) for k in value.values]
        y = sum(terms[1:], terms[0])
        y = y.relu() if value.relu else y
        if value.curve is not None:
            kept.curved[i], y = (value.curve, y), value.curve.value(y)
        kept.values[i] = y if value.ceiling is None else y.clamp(max=value.ceiling)
    return kept.values[i]


def _pool(value: Pooled, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each window, the first of equal ones, and where it is in its map."""
    assert value.kernel is not None
    stride, padding = value.window[:2]
    return F.max_pool2d(x, value.kernel, stride, padding, return_indices=True)


def _unpool(g: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of what was pooled: float32 sums in the order of the windows."""
    found = torch.zeros_like(like, memory_format=torch.contiguous_format).flatten(2)
    return found.scatter_add_(2, places.flatten(2), g.flatten(2)).view(like.shape)


def _average(value: Pooled, x: Tensor) -> Tensor:
    """Return the mean of each window: float32 sums in the order of its places, times ``1 / places``."""
    height, width = value.kernel or x.shape[2:]
    size = x.shape[2], x.shape[3]
    (down, across), (above, left) = value.window[:2]
    rows, columns = value.window.outputs(size, (height, width))
    padded = F.pad(x, (left, left, above, above))
    total = x.new_zeros(*x.shape[:2], rows, columns)
    for row, column in product(range(height), range(width)):
        own = padded[
            :, :, row : row + down * rows : down, column : column + across * columns : across
        ]
        total = total + own
    return total * x.new_tensor(1 / (height * width))


def _spread(value: Pooled, g: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of what means were taken of: float32 sums in the order of the windows."""
    height, width = value.kernel or like.shape[2:]
    (down, across), (above, left) = value.window[:2]
    size = like.shape[2] + 2 * above, like.shape[3] + 2 * left
    found = like.new_zeros(*like.shape[:2], *size)
    g = g * g.new_tensor(1 / (height * width))
    for i, j in product(range(g.shape[2]), range(g.shape[3])):
        top, start = i * down, j * across
        found[:, :, top : top + height, start : start + width] += g[:, :, i : i + 1, j : j + 1]
    return found[:, :, above : size[0] - above, left : size[1] - left]


def _cut(value: Joined, source: int, g: Tensor, kept: Kept) -> list[Tensor]:
    """Return the gradients of one of those that were joined, of each of the places made of one."""
    channels, (down, across) = [kept.values[k].shape[1] for k in value.sources], value.times
    own = g.split([value.zeros[0], *channels, value.zeros[1]], 1)[1 + value.sources.index(source)]
    return [own[:, :, i::down, j::across] for i, j in product(range(down), range(across))]


def _weighed(g: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a gate; see ``_by_image``."""
    return _by_image(g * x)


def _by_image(x: Tensor) -> Tensor:
    """Return sums over places: of every ``lcm(channels, 64)``-th element, added up in order."""
    channels = x.shape[1]
    pattern = math.lcm(channels, 64)
    every = x.permute(0, 2, 3, 1).flatten(1)
    every = F.pad(every, (0, -every.shape[1] % pattern)).view(len(x), -1, pattern)
    total = _in_order(every.transpose(0, 1)).view(len(x), -1, channels)
    return _in_order(total.transpose(0, 1))[..., None, None]


def _in_order(rows: Tensor) -> Tensor:
    """Return the sum of rows, one after the other."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


@dataclass
class Gradients:
    """Of a layer: of its weight, and of batch norm's or its bias."""

    weight: Tensor
    scale: Tensor
    shift: Tensor


def backward(
    segment: Segment, kept: Kept, parameters: Sequence[Parameters], grads: Sequence[Tensor]
) -> tuple[Tensor, list[Gradients]]:
    """Return the gradient of the input and of each layer, from those of the outputs."""
    outputs = [i for i, value in enumerate(segment.values) if value.is_output]
    outer = dict(zip(outputs, grads, strict=True))
    total: dict[int, Tensor] = {}
    back: dict[int, Tensor] = {}
    found: dict[int, Gradients] = {}
    made_by = segment.made_by
    for step in segment.backward(needs_input=True):
        if not isinstance(step, Return):
            g, own = total[made_by[step]], parameters[step]
            found[step], back[step] = _layer_backward(
                segment.layers[step], kept.layers[step], own, g
            )
            continue
        i = step.value
        like = kept.values[i]
        parts = [] if step.layer is None else [back.pop(step.layer).reshape(like.shape)]
        if (k := step.pooled) is not None:
            value = segment.values[k]
            assert isinstance(value, Pooled)
            if value.is_mean:
                parts.append(_spread(value, total[k], like))
            else:
                parts.append(_unpool(total[k], kept.places[k], like))
        if (k := step.gated) is not None:
            value = segment.values[k]
            assert isinstance(value, Scaled)
            parts.append(_weighed(total[k], kept.values[value.source]))
        for k in step.joined:
            value = segment.values[k]
            assert isinstance(value, Joined)
            parts += _cut(value, i, total[k], kept)
        gates = {k: own.gate for k, own in enumerate(segment.values) if isinstance(own, Scaled)}
        parts += [total[k] * kept.values[gates[k]] for k in step.added if k in gates]
        parts += [total[i]] if step.continues else []
        parts += [total[k] for k in step.added if k not in gates]
        parts += [outer[i].reshape(like.shape)] if step.outer else []
        g = sum(parts[1:], parts[0])
        if step.is_last and i != INPUT and segment.values[i].relu:
            ceiling = segment.values[i].ceiling
            inside = (kept.values[i] > 0) & (ceiling is None or kept.values[i] < ceiling)
            g = torch.where(inside, g, 0.0)
        if step.is_last and i in kept.curved:
            curve, x = kept.curved[i]
            g = g * curve.slope(x)
        total[i] = g if step.is_last and i == INPUT else to_bfloat16(g).float()
    return total[INPUT], [found[n] for n in range(len(segment.layers))]


def _layer_backward(
    layer: Layer | Norm, made: _Made, own: Parameters, g: Tensor
) -> tuple[Gradients, Tensor]:
    first, second = (s.sum((0, 2, 3), dtype=torch.float64) for s in (g, g * made.z.float()))
    of_scale = (second - made.mean * first) * made.inverse
    if layer.eps is not None:
        a = made.inverse if own.scale is None else own.scale.detach().double() * made.inverse
        count = g.numel() // g.shape[1]
        b = -a * made.inverse * of_scale / count
        c = -a * first / count - b * made.mean
        a, b, c = (t.float().view(-1, 1, 1) for t in (a, b, c))
        g = g * a + (made.z.float() * b + c)
    if isinstance(layer, Norm):
        return Gradients(
            torch.empty(0, dtype=torch.float32, device=g.device), of_scale.float(), first.float()
        ), g
    seed, stream = own.noise
    codes, exponents = products.round_per_sample(g, seed=seed, stream=stream)
    window = layer.window._asdict()
    weight = products.convolve_weight_gradient(
        made.codes, codes, layer.shape[2:], exponents=exponents, **window
    )
    if layer.by_channel:
        moved = g * powers_of_two(-_shifts(own, layer)).view(-1, 1, 1)
        codes, exponents = products.round_per_sample(moved, seed=seed, stream=own.second_stream)
    powers = torch.where(exponents == 128, exponents, (exponents - layer.weight.fl).clamp(max=127))
    back = products.convolve_input_gradient(
        codes, made.weight, made.codes.shape[2:], exponents=powers, **window
    )
    if layer.clip:
        back = torch.where(made.inside, back, 0.0)
    weight = weight.view(own.weight.shape)
    return Gradients(weight * layer.inputs.lsb, of_scale.float(), first.float()), back
