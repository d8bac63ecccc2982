"""Running a program on tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fixedpoint_kernels.fused import fields, weights
from fixedpoint_kernels.fused.memory import aligned, room
from fixedpoint_kernels.fused.operations import GivenNumbers, Numbers, noise_given
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.llvm.rows import NAN_BIT
from fixedpoint_kernels.memory import are_float32, is_float32
from fixedpoint_kernels.scratch import Scratch
from fixedpoint_kernels.tokens import cpu
from fixedpoint_kernels.tokens.graph import Linear, Norm, Operation, Rotary
from fixedpoint_kernels.tokens.program import Packing, Program
from fixedpoint_kernels.tokens.reference import Parameters
from fixedpoint_kernels.tokens.rows import Pass

__all__ = ["backward", "forward"]

Pair = tuple[Tensor | None, Tensor | None]
_CLAMPED = 2**NAN_BIT - 1  # of a count; above stands how many threads met NaN


def forward(
    program: Program,
    xs: Sequence[Tensor],
    parameters: Sequence[Parameters],
    counts: list[tuple[int, int]] | None = None,
    stamp: Stamp | None = None,
    show: Callable[[Mapping[int, Tensor]], None] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Run a segment forward.

    Args:
        program: Made for so many samples and tokens.
        xs: (samples, ..., features), float32, any strides.
        parameters: Of each operation; weights, scales and shifts are contiguous.
        counts: Gets, of each operation, how many elements a linear layer clamped, and whether there was NaN: how many threads
            met one.
        stamp: Of the weights: where the program was run forward with this object before, they are not looked at; None: they are
            laid out.
        show: Of a program that observes: takes the values that linear layers take, by their number; when it
            returns, others may write there.

    Returns:
        The values that leave the segment, float32, contiguous; and what backward needs, uint8.
    """
    held = [x.detach().contiguous() for x in xs]
    kept = program.memory.lend(program.kept_bytes + 64)  # kernels read behind it
    places, widths = xs[0].shape[:-1], program.widths
    outputs = {
        v: torch.empty(*places, widths[v], dtype=torch.float32, device="cpu")
        for v in program.segment.outputs
    }
    given: dict[str, Numbers] = {**_given(program, parameters)}
    given["x"] = [*map(Tensor.data_ptr, held)]
    with _room(places, {v: widths[v] for v in program.shown - outputs.keys()}) as others:
        given["y"] = {v: y.data_ptr() for v, y in (outputs | others).items()}
        with program.memory.lock, Scratch(program.work_bytes) as (_, work):
            program.clamped[:] = 0
            moved = program.move(parameters)
            if moved or stamp is None or stamp is not program.stamp:
                program.stamp = None
                _pack(program, program.pack, given, work)
                program.stamp = stamp
            _run(program, program.forward, kept, given, work)
            if counts is not None:
                counts += [(n & _CLAMPED, n >> NAN_BIT) for n in program.clamped.sum(1).tolist()]
        if show is not None:
            show(dict(enumerate(held)) | outputs | others)
    return [outputs[v] for v in program.segment.outputs], kept


@contextmanager
def _room(places: Sequence[int], widths: Mapping[int, int]) -> Iterator[dict[int, Tensor]]:
    """Yield values that nobody reads later, float32, by place and width, by the numbers of their widths."""
    rows = math.prod(places)
    with room({v: rows * width for v, width in widths.items()}) as found:
        yield {v: own.view(*places, widths[v]) for v, own in found.items()}


def _pack(program: Program, own: Packing, given: GivenNumbers, work: int) -> None:
    """Lay out the weights for one direction."""
    own.tasks[:, fields.WEIGHTS] = [given["first"][i] for i in own.layers]
    weights.pack_weights(program.threads > 1)(
        own.tasks, own.reals, own.items, work, own.spare_bytes, program.threads
    )


def backward(
    program: Program,
    kept: Tensor,
    parameters: Sequence[Parameters],
    grads: Sequence[Tensor],
    show: Callable[[Mapping[int, Tensor]], None] | None = None,
) -> tuple[list[Tensor | None], list[Pair]]:
    """Run a segment backward.

    Args:
        program: As of ``forward``.
        kept: What ``forward`` returned.
        parameters: As of ``forward``.
        grads: Of the outputs.
        show: Of a program that observes: takes the gradient of what each linear layer took, by the operation's number,
            as of ``forward``.

    Returns:
        The gradients of what came in, where the program was made for them; and for each operation
        those of its weight or scale, and of its bias or shift.

    Raises:
        ValueError: ``kept`` or a parameter is not as ``forward`` had it.
    """
    _check_saved(program, parameters)
    held = [grad.detach().contiguous() for grad in grads]
    kept = aligned(kept, program.kept_bytes + 64)
    pairs = zip(program.segment.outputs, held, strict=True)
    dxs: list[Tensor | None] = []
    for i, needed in enumerate(program.needs_inputs):
        width = program.widths[i]
        shape = *held[0].shape[:-1], width
        dxs.append(torch.empty(shape, dtype=torch.float32, device="cpu") if needed else None)
    given: dict[str, Numbers] = {**_given(program, parameters)}
    given["dx"] = [0 if dx is None else dx.data_ptr() for dx in dxs]
    given["dy"] = {v: grad.data_ptr() for v, grad in pairs}
    operations = enumerate(program.segment.operations if program.observes else ())
    back = {i: op.shape[1] for i, op in operations if isinstance(op, Linear)}
    with _room(held[0].shape[:-1], back) as seen:
        given["seen gradient"] = {i: own.data_ptr() for i, own in seen.items()}
        with program.memory.lock, Scratch(program.work_bytes) as (_, work):
            if program.move(parameters):  # another call had other formats by channel
                program.stamp = None
            _pack(
                program, program.pack_turned, given, work
            )  # other calls may have had other weights
            _run(program, program.backward, kept, given, work)
            found_weights = _weights(program, kept, work)
            sums = torch.from_numpy(program.partial.sum(0, dtype=np.float64).astype(np.float32))
        if show is not None:
            show(seen)
    rows, widths = sums[: program.partial_width], program.partial_widths
    pieces = iter(torch.split_with_sizes_copy(rows, widths))  # pyright: ignore[reportCallIssue, reportArgumentType]: torch says it returns None
    found: list[Pair] = []
    for i, op in enumerate(program.segment.operations):
        parts = [next(pieces) for _ in program.partials.get(i, ())]
        first = found_weights.get(i) if isinstance(op, Linear) else (parts[0] if parts else None)
        found.append((first, parts[-1] if parts else None))
    return dxs, found


def _weights(program: Program, kept: Tensor, work: int) -> dict[int, Tensor]:
    """Return the gradients of weights."""
    found: dict[int, Tensor] = {}
    for k, i in enumerate(program.linear):
        op = program.segment.operations[i]
        assert isinstance(op, Linear)
        program.layers[k, cpu.f.CODES] = kept.data_ptr() + program.codes[i].offset
        if program.needs_weights[i]:
            shape = op.shape[::-1] if op.is_turned else op.shape
            found[i] = torch.empty(shape, dtype=torch.float32, device="cpu")
            program.layers[k, cpu.f.OUT] = found[i].data_ptr()
    if found:
        cpu.add_weights(program.path, program.threads > 1)(
            program.layers,
            program.details,
            program.tasks,
            program.begins,
            program.samples,
            work,
            program.weight_bytes,
            program.threads,
        )
    return found


def _check_saved(program: Program, parameters: Sequence[Parameters]) -> None:
    """Refuse parameters that hooks on saved tensors have changed."""
    first = len(program.widths) - len(parameters)
    found: list[Tensor] = []
    shapes: list[tuple[int, ...]] = []
    for i, (op, own) in enumerate(zip(program.segment.operations, parameters, strict=True)):
        wanted_shapes = _shapes(op, program.widths[first + i], program.samples, program.tokens)
        for x, wanted in zip((own.first, own.second), wanted_shapes, strict=True):
            if x is not None:
                found.append(x)
                shapes.append(wanted)
    if are_float32(found, shapes) and all(map(Tensor.is_contiguous, found)):
        return
    for x, wanted in zip(found, shapes, strict=True):
        if not is_float32(x, wanted):
            raise ValueError(
                "hooks on saved tensors must give back what they got, contiguous float32 of "
                f"shape {tuple(wanted)}, got {x.dtype} of shape {tuple(x.shape)}"
            )


def _shapes(
    op: Operation, width: int, samples: int, tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of an operation's two parameters."""
    if isinstance(op, Linear):
        return op.shape[::-1] if op.is_turned else op.shape, (width,)
    if isinstance(op, Rotary):
        shape = tokens, op.turned
        own = (samples, *shape) if op.by_sample else shape
        return own, own
    size = op.size if isinstance(op, Norm) and op.size is not None else width
    return (size,), (size,)


def _given(program: Program, parameters: Sequence[Parameters]) -> dict[str, list[int]]:
    pairs = [(own.first, own.second) for own in parameters]
    return {
        "first": [program.ones if x is None else x.data_ptr() for x, _ in pairs],
        "second": [program.zeros if x is None else x.data_ptr() for _, x in pairs],
        **noise_given(parameters),
    }


def _run(
    program: Program,
    direction: Pass,
    kept: Tensor,
    given: GivenNumbers,
    work: int,
) -> None:
    rows, places, offsets = direction.kept
    direction.table[rows, places] = offsets + kept.data_ptr()
    direction.given.fill(direction.table, given)
    cpu.run(program.path, program.threads > 1)(
        direction.table,
        direction.reals,
        program.samples,
        program.tokens,
        program.chunk,
        work,
        program.scratch_bytes,
        program.places,
        program.partial.ctypes.data,
        program.partial_bytes,
        program.threads,
    )
