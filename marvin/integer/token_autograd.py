"""Running a segment of linear layers, norms and attention under autograd; see ``fixedpoint_kernels.tokens``."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fixedpoint_kernels import FixedPoint, tokens
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels.fused.stamp import Stamp
from fixedpoint_kernels.memory import is_float32
from fixedpoint_kernels.threads import is_parallel, thread_count
from fixedpoint_kernels.tokens import Parameters, Segment
from marvin.integer.autograd import Noise, once
from marvin.integer.programs import Programs

if TYPE_CHECKING:
    from fixedpoint_kernels.tokens.program import Program

__all__ = ["NO_NOISE", "LinearCall", "Run", "is_plain", "run_tokens", "threads_of"]

NO_NOISE = Noise(0, 0, 0)
_See = Callable[[Tensor, FixedPoint], Callable[[Tensor], None]]
_MACS = 64  # multiply-adds that cost as much as one element of another kernel


class LinearCall(NamedTuple):
    """What a linear layer has in one call.

    Args:
        noise: For its gradient.
        shifts: Each output's further fractional bits, or none.
        see: Measures what it takes, by a format, and returns what measures the gradient of that; None: nobody asks.
    """

    noise: Noise
    shifts: tuple[int, ...]
    see: _See | None = None


class _Drawn(NamedTuple):
    """Chance in one call of a segment: of each linear layer, and the seed of what dropout makes 0."""

    calls: list[LinearCall]
    seed: int


class _Made(NamedTuple):
    """A segment that was run forward: what backward needs, what leaves it, and what measures gradients by operation."""

    program: "Program"
    kept: Tensor
    outputs: list[Tensor]
    observers: dict[int, Callable[[Tensor], None]]


class Run(Protocol):
    """Whoever runs a segment.

    Attributes:
        programs: Its own.
        stamp: Of weights that may stay laid out between calls.
    """

    programs: "Programs[Program]"
    stamp: Stamp | None

    def note(
        self, segment: Segment, xs: Sequence[Tensor], counts: Sequence[tuple[int, int]]
    ) -> None:
        """Count what each operation clamped, and how many threads met NaN."""
        ...


def _program_of(
    programs: "Programs[Program]",
    segment: Segment,
    x: Tensor,
    inputs: Sequence[bool],
    weights: Sequence[bool],
    observes: bool,
) -> "Program":
    """Return the program of a segment for values of the shape of ``x``, and what is wanted, see ``Program``."""
    from fixedpoint_kernels.tokens.program import Program  # Numba takes a second to import

    path, rows = tokens.path() or "", x.shape[:-1].numel()
    threads = min(threads_of(segment, rows), len(x))
    key = segment, len(x), rows, path, threads, tuple(inputs), tuple(weights), observes
    rest = len(x), rows // len(x), path, threads, inputs, weights
    return programs.get(key, lambda own: Program(segment, *rest, own, observes=observes))


def threads_of(segment: Segment, rows: int) -> int:
    """Return how many threads rows of values are worth; a thread takes whole samples."""
    macs = sum(math.prod(op.shape) for op in segment.operations if isinstance(op, tokens.Linear))
    return thread_count() if is_parallel(rows * max(256, macs // _MACS)) else 1


def is_plain(x: Tensor) -> bool:
    """Say whether a tensor is float32 and lies one after the other on the CPU."""
    return is_float32(x, x.shape)


def run_tokens(
    run: Run,
    segment: Segment,
    calls: list[LinearCall],
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Return what leaves a segment, under autograd.

    Args:
        run: Has programs, and notes what was clamped.
        segment: What is computed.
        calls: Of each linear layer.
        xs: What comes in.
        parameters: Weight or scale, and bias or shift, of each operation.
    """
    drawn = _Drawn(calls, _seed_of(segment))
    tensors = *xs, *parameters
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors):
        return tuple(_forward(run, segment, drawn, xs, parameters, ()).outputs)
    return _Tokens.apply(run, segment, drawn, *xs, *parameters)  # pyright: ignore[reportReturnType]


def _seed_of(segment: Segment) -> int:
    """Return a seed of torch's generator for what dropout makes 0; 0 where there is none: then nothing is drawn."""
    return int(torch.randint(2**62, (), device="cpu")) if segment.has_dropout else 0


def _forward(
    run: Run,
    segment: Segment,
    drawn: _Drawn,
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> "_Made":
    """Run a segment forward, and show what linear layers take to who asks."""
    from fixedpoint_kernels.tokens import execute

    count, observes = len(xs), any(own.see for own in drawn.calls)
    wanted = needed[:count], needed[count::2], observes
    program = _program_of(run.programs, segment, xs[0], *wanted)
    counts: list[tuple[int, int]] = []
    observers: dict[int, Callable[[Tensor], None]] = {}

    def show(seen: Mapping[int, Tensor]) -> None:
        if not any(nans for _, nans in counts):  # else layers run alone, and show it
            observers.update(_show(segment, drawn, seen))

    own = _parameters_of(segment, parameters, drawn)
    outputs, kept = execute.forward(program, xs, own, counts, run.stamp, show if observes else None)
    run.note(segment, xs, counts)
    return _Made(program, kept, outputs, observers)


def _show(
    segment: Segment, drawn: _Drawn, seen: Mapping[int, Tensor]
) -> dict[int, Callable[[Tensor], None]]:
    """Return what measures gradients, by the number of the operation."""
    layers = [(i, op) for i, op in enumerate(segment.operations) if isinstance(op, tokens.Linear)]
    return {
        i: own.see(seen[op.source], op.inputs)
        for (i, op), own in zip(layers, drawn.calls, strict=True)
        if own.see is not None
    }


class _Tokens(torch.autograd.Function):
    """A chain, forward and backward; keeps codes, and what norms, GELU and attention need."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        segment: Segment,
        drawn: _Drawn,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(segment.inputs)
        xs = [x for x in tensors[:count] if x is not None]
        rest = tensors[count:], ctx.needs_input_grad[3:]
        made = _forward(run, segment, drawn, xs, *rest)
        ctx.save_for_backward(made.kept, *tensors[count:])
        ctx.program, ctx.drawn, ctx.observers = made.program, drawn, made.observers
        return tuple(made.outputs)

    @staticmethod
    @left_uncompiled
    @once
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        from fixedpoint_kernels.tokens import execute

        kept, *parameters = ctx.saved_tensors
        own = _parameters_of(ctx.program.segment, parameters, ctx.drawn)

        def show(seen: Mapping[int, Tensor]) -> None:
            for i, observe in ctx.observers.items():
                observe(seen[i])

        dxs, found = execute.backward(ctx.program, kept, own, grads, show)
        back = [None, None, None, *dxs, *(way for pair in found for way in pair)]
        pairs = zip(back, ctx.needs_input_grad, strict=True)
        return tuple(way if needed else None for way, needed in pairs)


def _parameters_of(
    segment: Segment, tensors: Sequence[Tensor | None], drawn: _Drawn
) -> list[Parameters]:
    """Return what each operation takes: a linear layer also what it has in this call; dropout a stream of the seed."""
    found, own = [], iter(drawn.calls)
    triples = zip(segment.operations, tensors[::2], tensors[1::2], strict=True)
    for stream, (operation, first, second) in enumerate(triples):
        found.append(Parameters(first, second, (drawn.seed, stream)))
        if isinstance(operation, tokens.Linear):
            (seed, stream, other), shifts, _ = next(own)
            found[-1] = Parameters(first, second, (seed, stream), shifts, other)
    return found
