"""Running a program on tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedpoint_kernels.fused import cpu
from fixedpoint_kernels.fused.graph import INPUT, Layer
from fixedpoint_kernels.fused.layout import Shape
from fixedpoint_kernels.fused.memory import aligned, room
from fixedpoint_kernels.fused.operations import GivenNumbers, Numbers, noise_given
from fixedpoint_kernels.fused.program import Pass, Program
from fixedpoint_kernels.fused.reference import Gradients, Parameters
from fixedpoint_kernels.fused.taken import Wanted
from fixedpoint_kernels.scratch import Scratch

__all__ = ["Laid", "Result", "addresses_of", "backward", "forward", "laid"]
__all__ += ["statistics", "steps_given"]


@dataclass
class Laid:
    """A tensor as programs want it: images of ``Shape.padded`` elements each, channels last."""

    tensor: Tensor
    address: int


def laid(x: Tensor, shape: Shape) -> Laid:
    """Return images as programs want them."""
    x = x.detach().resolve_neg()
    order = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    if shape.padded == shape.elements and x.is_contiguous(memory_format=order):
        return Laid(x, x.data_ptr())
    flat = x if x.dim() == 2 else x.permute(0, 2, 3, 1).reshape(len(x), -1)
    if shape.padded != shape.elements:
        padded = flat.new_zeros(len(x), shape.padded)
        padded[:, : shape.elements] = flat
        flat = padded
    flat = flat.contiguous()
    return Laid(flat, flat.data_ptr())


class Result:
    """An image map for a program to write, channels last; or (images, channels) of one place."""

    def __init__(self, images: int, shape: Shape, is_flat: bool = False) -> None:
        self._shape, size = shape, (images, *shape)
        self.image = (
            _empty(images, shape.channels)
            if is_flat
            else torch.empty(
                size, dtype=torch.float32, memory_format=torch.channels_last, device="cpu"
            )
        )
        is_dense = shape.padded == shape.elements
        self._padded = None
        if not is_dense:
            self._padded = _empty(images, shape.padded)
        self.address = (self.image if self._padded is None else self._padded).data_ptr()

    def take(self) -> Tensor:
        """Return the map, once it is written."""
        if self._padded is not None:
            channels, height, width = self._shape
            own = self._padded[:, : self._shape.elements]
            own = (
                own
                if self.image.dim() == 2
                else own.view(-1, height, width, channels).permute(0, 3, 1, 2)
            )
            self.image.copy_(own)
        return self.image


@contextmanager
def _room(images: int, shapes: Mapping[int, Shape]) -> Iterator[dict[int, Tensor]]:
    """Yield image maps that nobody reads later, float32, channels last, by the numbers of their shapes."""
    with room({i: images * shape.padded for i, shape in shapes.items()}) as found:
        yield {
            i: found[i]
            .view(images, -1)[:, : shape.elements]
            .view(images, shape.height, shape.width, shape.channels)
            .permute(0, 3, 1, 2)
            for i, shape in shapes.items()
        }


def forward(
    program: Program,
    x: Tensor,
    parameters: Sequence[Parameters],
    counts: list[int] | None = None,
    show: Callable[[Mapping[int, Tensor]], None] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Run a segment forward.

    Args:
        program: Made for the shape of ``x``.
        x: (images, channels, height, width), float32, any strides.
        parameters: Of each layer.
        counts: Gets, of each layer, how many elements it clamped.
        show: Of a program that observes: takes the values that layers take, by their number,
            float32, channels last; when it returns, others may write there.

    Returns:
        The values that leave the segment, float32, channels last, or (images, channels) where they are
        flat; and what backward needs, uint8.
    """
    source = laid(x, program.shapes[INPUT])
    kept = program.memory.lend(program.kept_bytes + 64)  # kernels read behind it
    outputs = {
        i: Result(len(x), program.shapes[i], value.is_flat)
        for i, value in enumerate(program.segment.values)
        if value.is_output
    }
    given = _given(program, parameters)
    given["x"], given["y"] = [source.address], addresses_of(outputs)
    running = [own.running for own in parameters]
    given["running_mean"], given["running_variance"] = (
        [0 if own is None else own[k].data_ptr() for own in running] for k in range(2)
    )
    with _room(len(x), {i: program.shapes[i] for i in program.shown}) as others:
        given["seen"] = {i: own.data_ptr() for i, own in others.items()}
        with program.memory.lock:
            program.clear()
            program.momenta[:] = [own.momentum for own in parameters]
            program.move(parameters)
            _run(program, program.forward, kept, given)
            if counts is not None:
                counts += program.clamped.sum(1).tolist()
        found = {i: result.take() for i, result in outputs.items()}
        if show is not None:
            show({INPUT: x} | found | others)
    return list(found.values()), kept


def backward(
    program: Program,
    kept: Tensor,
    parameters: Sequence[Parameters],
    grads: Sequence[Tensor],
    show: Callable[[Sequence[Tensor]], None] | None = None,
) -> tuple[Tensor | None, list[Gradients]]:
    """Run a segment backward.

    Args:
        program: As of ``forward``.
        kept: What ``forward`` returned.
        parameters: As of ``forward``.
        grads: Of the outputs.
        show: Of a program that observes: takes the gradient of what each layer that multiplies took,
            before anything is masked, as of ``forward``.

    Returns:
        The gradient of the input, if the program was made for it, and those of each layer;
        of weights that need none, empty ones.

    Raises:
        ValueError: ``kept`` or a parameter is not as ``forward`` had it.
    """
    _check_saved(program, parameters)
    kept = aligned(kept, program.kept_bytes + 64)
    outputs = [i for i, value in enumerate(program.segment.values) if value.is_output]
    held = [laid(grad, program.shapes[i]) for i, grad in zip(outputs, grads, strict=True)]
    dx = Result(program.images, program.shapes[INPUT]) if program.needs_input else None
    weights = [
        _like(own.weight) if is_needed else _empty(0)
        for own, is_needed in zip(parameters, program.needs_weights, strict=True)
    ]
    pairs = [*zip(parameters, program.outs, strict=True)]
    scales, shifts = ([_vector(own, out.channels) for own, out in pairs] for _ in range(2))
    back: dict[int, Shape] = {}
    if program.observes:
        back = {
            n: program.shapes[own.source]
            for n, own in enumerate(program.segment.layers)
            if isinstance(own, Layer)
        }
    given = _given(program, parameters) | noise_given(parameters)
    given["dx"] = [0 if dx is None else dx.address]
    given["dy"] = {i: own.address for i, own in zip(outputs, held, strict=True)}
    names = "of_weight", "of_scale", "of_shift"
    for name, own in zip(names, (weights, scales, shifts), strict=True):
        given[name] = [*map(Tensor.data_ptr, own)]
    given["of_weight lies last"] = [int(not own.is_contiguous()) for own in weights]
    with _room(program.images, back) as seen:
        given["seen gradient"] = {n: own.data_ptr() for n, own in seen.items()}
        with program.memory.lock:
            program.move(parameters)
            _run(program, program.backward, kept, given)
        if show is not None:
            show([*seen.values()])
    found = map(Gradients, weights, scales, shifts)
    return (None if dx is None else dx.take()), [*found]


def _check_saved(program: Program, parameters: Sequence[Parameters]) -> None:
    """Refuse parameters that hooks on saved tensors have changed."""
    found = [(own.weight, own.scale, own.shift) for own in parameters]
    if program.wanted.are(*zip(*found, strict=True)):
        return
    for n, layer in enumerate(program.segment.layers):
        if not Wanted([layer]).are(*([own] for own in found[n])):
            raise ValueError(
                f"what layer {n} saved must be float32 on the CPU and of its shape, {layer}: hooks "
                "on saved tensors must give back what they got"
            )


def _like(weight: Tensor) -> Tensor:
    """Return room for a gradient, as the weight lies: autograd copies what lies otherwise."""
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        return torch.empty_like(weight)  # to name the format takes as long again
    return _empty(*weight.shape)


def _vector(own: Parameters, channels: int) -> Tensor:
    """Return room for a number of each channel."""
    like = own.shift if own.scale is None else own.scale
    return _empty(channels) if like is None else torch.empty_like(like)  # in half the time


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def statistics(program: Program, kept: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return mean and (biased) variance of each layer's channels, float64; views of ``kept``."""
    found = []
    for means, variances, out in zip(program.means, program.variances, program.outs, strict=True):
        size = 8 * out.channels
        pair = (kept[k.offset : k.offset + size] for k in (means, variances))
        found.append(tuple(part.view(torch.float64) for part in pair))
    return found


def steps_given(
    strides: Sequence[tuple[int, ...]], places: Sequence[int] = ()
) -> dict[str, list[int]]:
    """Return how weights lie.

    Args:
        strides: Of each layer's weight; fewer than two: it has none.
        places: Of the image that a linear layer takes flat, of each layer; default: 1.
    """
    own = [
        (steps[0], steps[1] * n, steps[-1]) if len(steps) > 1 else (0, 0, 0)
        for steps, n in zip(strides, places or [1] * len(strides), strict=True)
    ]
    names = "step_o", "step_c", "step_t"
    return {name: [steps[k] for steps in own] for k, name in enumerate(names)}


def _given(program: Program, parameters: Sequence[Parameters]) -> dict[str, Numbers]:
    weights = [own.weight for own in parameters]
    strides, known = [*map(Tensor.stride, weights)], program.steps  # threads may come at once
    if strides != known[0]:
        program.steps = known = strides, steps_given(strides, program.places_of_weights)
    return {
        "weight": [*map(Tensor.data_ptr, weights)],
        **known[1],
        "scale": [0 if own.scale is None else own.scale.data_ptr() for own in parameters],
        "shift": [0 if own.shift is None else own.shift.data_ptr() for own in parameters],
    }


def addresses_of(results: Mapping[int, Result]) -> dict[int, int]:
    """Return where each is written, by number of a layer or value."""
    return {i: own.address for i, own in results.items()}


def _run(
    program: Program,
    direction: Pass,
    kept: Tensor,
    given: GivenNumbers,
) -> None:
    with Scratch(program.work_bytes) as (_, work):
        program.place(direction, kept.data_ptr(), given, work)
        if direction is program.backward:
            program.place_gradients(given, work)
        cpu.run(program.path, direction.context, len(direction.regions), program.threads)
