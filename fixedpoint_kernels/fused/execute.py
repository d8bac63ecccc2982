"""Running a program on tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fixedpoint_kernels.fused import cpu
from fixedpoint_kernels.fused.graph import INPUT, Layer
from fixedpoint_kernels.fused.layout import Shape
from fixedpoint_kernels.fused.memory import aligned
from fixedpoint_kernels.fused.program import Pass, Program
from fixedpoint_kernels.fused.reference import Gradients, Parameters
from fixedpoint_kernels.fused.taken import are_taken

__all__ = ["Laid", "Result", "backward", "forward", "laid", "statistics", "weight_given"]


@dataclass
class Laid:
    """A tensor as programs want it: images of ``Shape.padded`` elements each, channels last."""

    tensor: Tensor
    address: int


def laid(x: Tensor, shape: Shape) -> Laid:
    """Return images as programs want them."""
    flat = x.detach() if x.dim() == 2 else x.detach().permute(0, 2, 3, 1).reshape(len(x), -1)
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
            torch.empty(images, shape.channels, dtype=torch.float32, device="cpu")
            if is_flat
            else torch.empty(
                size, dtype=torch.float32, memory_format=torch.channels_last, device="cpu"
            )
        )
        is_dense = shape.padded == shape.elements
        self._padded = None
        if not is_dense:
            self._padded = torch.empty(images, shape.padded, dtype=torch.float32, device="cpu")
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


def forward(
    program: Program,
    x: Tensor,
    parameters: Sequence[Parameters],
    seen: dict[int, Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Run a segment forward.

    Args:
        program: Made for the shape of ``x``.
        x: (images, channels, height, width), float32, any strides.
        parameters: Of each layer.
        seen: Of a program that observes: takes the values that layers take, by their number,
            float32, channels last.

    Returns:
        The values that leave the segment, float32, channels last, or (images, channels) where they are
        flat; and what backward needs, uint8.
    """
    source = laid(x, program.shapes[INPUT])
    kept = program.memory.lend(program.kept_bytes + 64)  # kernels read behind it
    given = {("x", 0): source.address, **_given(program, parameters)}
    outputs, others = {}, {}
    for i, value in enumerate(program.segment.values):
        if value.is_output:
            outputs[i] = Result(len(x), program.shapes[i], value.is_flat)
            given["y", i] = outputs[i].address
        elif program.observes and program.segment.takers(i):
            others[i] = Result(len(x), program.shapes[i])
            given["seen", i] = others[i].address
    with program.memory.lock:
        program.clear()
        program.momenta[:] = [own.momentum for own in parameters]
        program.move(parameters)
        _run(program, program.forward, kept, given)
    found = {i: result.take() for i, result in outputs.items()}
    if seen is not None:
        seen |= {INPUT: x} | found | {i: result.take() for i, result in others.items()}
    return list(found.values()), kept


def backward(
    program: Program,
    kept: Tensor,
    parameters: Sequence[Parameters],
    grads: Sequence[Tensor],
    seen: list[Tensor] | None = None,
) -> tuple[Tensor | None, list[Gradients]]:
    """Run a segment backward.

    Args:
        program: As of ``forward``.
        kept: What ``forward`` returned.
        parameters: As of ``forward``.
        grads: Of the outputs.
        seen: Of a program that observes: takes the gradient of what each layer that multiplies took,
            before anything is masked, float32, channels last.

    Returns:
        The gradient of the input, if the program was made for it, and those of each layer;
        of weights that need none, empty ones.

    Raises:
        ValueError: ``kept`` or a parameter is not as ``forward`` had it.
    """
    _check_saved(program, parameters)
    kept, given = aligned(kept, program.kept_bytes + 64), _given(program, parameters)
    outputs = [i for i, value in enumerate(program.segment.values) if value.is_output]
    held = [laid(grad, program.shapes[i]) for i, grad in zip(outputs, grads, strict=True)]
    given |= {("dy", i): own.address for i, own in zip(outputs, held, strict=True)}
    dx = Result(program.images, program.shapes[INPUT]) if program.needs_input else None
    given["dx", 0] = 0 if dx is None else dx.address
    found = []
    for n, own in enumerate(parameters):
        outputs_of, seed, stream = program.outs[n].channels, *own.noise
        weight = (
            _like(own.weight)
            if program.needs_weights[n]
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        scale, shift = (
            torch.empty(outputs_of, dtype=torch.float32, device="cpu") for _ in range(2)
        )
        given["of_scale", n], given["of_shift", n] = scale.data_ptr(), shift.data_ptr()
        given["seed", n], given["stream", n] = seed, stream
        given["second stream", n] = own.second_stream
        given["of_weight", n] = weight.data_ptr()
        given["of_weight lies last", n] = int(not weight.is_contiguous())
        found.append(Gradients(weight, scale, shift))
    back = {}
    if program.observes:
        back = {
            n: Result(program.images, program.shapes[own.source])
            for n, own in enumerate(program.segment.layers)
            if isinstance(own, Layer)
        }
        given |= {("seen gradient", n): own.address for n, own in back.items()}
    with program.memory.lock:
        program.move(parameters)
        _run(program, program.backward, kept, given, [own.weight for own in found])
    if seen is not None:
        seen += [own.take() for own in back.values()]
    return (None if dx is None else dx.take()), found


def _check_saved(program: Program, parameters: Sequence[Parameters]) -> None:
    """Refuse parameters that hooks on saved tensors have changed."""
    layers, weights = program.segment.layers, [own.weight for own in parameters]
    others = [(own.scale, own.shift) for own in parameters]
    if are_taken(layers, weights, others):
        return
    for n, layer in enumerate(layers):
        if not are_taken([layer], weights[n : n + 1], others[n : n + 1]):
            raise ValueError(
                f"what layer {n} saved must be float32 on the CPU and of its shape, {layer}: hooks "
                "on saved tensors must give back what they got"
            )


def _like(weight: Tensor) -> Tensor:
    """Return room for a gradient, as the weight lies: autograd copies what lies otherwise."""
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        return torch.empty_like(weight)  # to name the format takes as long again
    return torch.empty(weight.shape, dtype=torch.float32, device="cpu")


def statistics(program: Program, kept: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return mean and (biased) variance of each layer's channels, float64; views of ``kept``."""
    found = []
    for means, variances, out in zip(program.means, program.variances, program.outs, strict=True):
        size = 8 * out.channels
        pair = (kept[k.offset : k.offset + size] for k in (means, variances))
        found.append(tuple(part.view(torch.float64) for part in pair))
    return found


def weight_given(n: int, weight: Tensor, places: int = 1) -> dict[tuple[str, int], int]:
    """Return where the weight of layer ``n`` is, and how it lies; ``places``: of a linear layer's input."""
    steps = weight.stride()
    names = "weight", "step_o", "step_c", "step_t"
    numbers = weight.data_ptr(), steps[0], steps[1] * places, steps[-1]
    return {(name, n): number for name, number in zip(names, numbers, strict=True)}


def _given(program: Program, parameters: Sequence[Parameters]) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for n, own in enumerate(parameters):
        layer = program.segment.layers[n]
        if isinstance(layer, Layer):
            _, height, width = program.shapes[layer.source]
            found.update(weight_given(n, own.weight, height * width if layer.is_flat else 1))
        found["scale", n] = 0 if own.scale is None else own.scale.data_ptr()
        found["shift", n] = 0 if own.shift is None else own.shift.data_ptr()
        running = (0, 0) if own.running is None else [r.data_ptr() for r in own.running]
        found["running_mean", n], found["running_variance", n] = running
    return found


def _run(
    program: Program,
    direction: Pass,
    kept: Tensor,
    given: Mapping[tuple[str, int], int],
    gradients: Sequence[Tensor] = (),
) -> None:
    work = program.place(direction, kept.data_ptr(), given)
    if gradients:
        program.place_gradients(gradients, work)
    cpu.run(program.path, direction.context, len(direction.regions), program.threads)
