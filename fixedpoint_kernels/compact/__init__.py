"""An optimizer's state in few bytes: what the functions promise, and the choice of a kernel.

Three kinds of codes; 256 elements of a row share a float32 scale, which follows their largest
magnitude in each write.

``"fixed"``: 16-bit fixed point, ``code * scale``; the scale is a power of two. For masters.
``"signed"``: 8 bits, ``code * |code| * scale``. For momenta and sums of gradients: steps are as fine
as those of equal steps for typical values, and finer below, down to 1/16129 of the largest.
``"squares"``: 8 bits, ``code**4 * scale``. For means of squares; a value above 0 never becomes 0,
for Adam divides by it.

Rounding is stochastic, and unbiased inside of the range, to 2**-17 of a step; a value of the codes does not
move where the scale stays. Blocks begin anew in each row, so that a part of whole rows has the bits
of the whole tensor. A block with a value that is not finite becomes NaN.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fixedpoint_kernels.compact import reference
from fixedpoint_kernels.compact.records import (
    BLOCK,
    Adam,
    Codes,
    Kind,
    Moves,
    Noise,
    Row,
    Sgd,
    Sum,
    blocks_of,
    check_codes,
    flattened,
)
from fixedpoint_kernels.compact.targets import Targets
from fixedpoint_kernels.memory import PLAIN, in_memory, places_on_cpu
from fixedpoint_kernels.rounding.reference import Rounding

__all__ = ["BLOCK", "Adam", "Codes", "Kind", "Moves", "Noise", "Row", "Sgd", "Sum", "Targets"]
__all__ += [
    "add_many",
    "blocks_of",
    "check_codes",
    "decode",
    "encode",
    "flattened",
    "step_many",
    "zeros",
]


def encode(x: Tensor, kind: Kind, noise: Noise | None = None) -> Codes:
    """Return ``x`` in few bytes.

    Args:
        x: Values, two or more dimensions, any strides, floating; for ``"squares"`` none below 0.
        kind: Of the codes.
        noise: Of stochastic rounding; None: to nearest.

    Raises:
        ValueError: ``x`` has fewer than two dimensions, or its storage was freed.
        TypeError: ``x`` does not lie in memory (sparse, nested).
    """
    if x.ndim < 2:
        raise ValueError(f"x must have two or more dimensions, got shape {tuple(x.shape)}")
    if _has_kernel([x]):
        from fixedpoint_kernels.compact import cpu

        return cpu.encode(in_memory(x).detach().float().contiguous(), kind, noise)
    return reference.encode(x, kind, noise)


def decode(codes: Codes, kind: Kind) -> Tensor:
    """Return the values of codes: float32, contiguous, shape of the codes.

    Raises:
        ValueError: They are not of this kind, or their scales are not theirs.
    """
    check_codes(codes, kind)
    if _has_kernel(codes):
        from fixedpoint_kernels.compact import cpu

        return cpu.decode(codes, kind)
    return reference.decode(codes, kind)


def zeros(like: Tensor, kind: Kind) -> Codes:
    """Return the codes of zeros, of the shape and on the device of ``like``."""
    return encode(torch.zeros_like(like, dtype=torch.float32), kind)


def add_many(
    before: Sequence[Codes | Tensor],
    xs: Sequence[Tensor],
    noises: Sequence[Noise | None],
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Sequence[Sum | Tensor], Tensor]:
    """Add tensors to what codes of kind ``"signed"`` mean, or to tensors, out of place.

    One pass over memory on a CPU. There squares are added up in float64, in an order that does not
    depend on the number of threads.

    Args:
        before: Codes, or float32; at least one.
        xs: As many, of the same shapes, float32, any strides.
        noises: Of the new codes; None: to nearest, and where there are none.
        dtype: In which norms are added up where there is no kernel; on a CPU, float64.

    Returns:
        The sums, and the 2-norms of them before they are rounded, ``(len(xs),)``.

    Raises:
        ValueError: One of ``before`` is not of the shape of its ``xs``, or codes are not ``"signed"``;
            there are not as many of ``noises``.
        TypeError: A tensor is not float32.
    """
    for own, x, _ in zip(before, xs, noises, strict=True):
        dtypes = {x.dtype} if isinstance(own, Codes) else {x.dtype, own.dtype}
        if dtypes != {torch.float32}:
            raise TypeError(
                "what is added, and to what, must be float32 (write x.float()), got "
                f"{' and '.join(map(str, dtypes))}"
            )
        if isinstance(own, Codes):
            check_codes(own, "signed", x.shape)
        elif own.shape != x.shape:
            raise ValueError(f"before must have shape {tuple(x.shape)}, got {tuple(own.shape)}")
    if dtype is torch.float64 and _has_kernel([*xs, *flattened(before)]):
        from fixedpoint_kernels.compact import cpu

        xs = [x.contiguous() for x in xs]
        before = [x.contiguous() if isinstance(x, Tensor) else x for x in before]
        return cpu.add_many(before, xs, noises)
    return reference.add_many(before, xs, noises, dtype)


def step_many(
    targets: Targets,
    moves: Moves,
    *,
    rounding: Rounding,
    seed: int,
    stream: int = 0,
    noise: int = 0,
) -> None:
    """Move masters by SGD or Adam, keep them and their moments as codes, and round the weights.

    One pass over memory on a CPU. The bits are those of torch's optimizer on the decoded states,
    of ``encode`` with 16 bits of noise for each, and of ``quantize``; where torch rounds sums of
    products otherwise than the kernel, plain PyTorch does it.

    Args:
        targets: The parameters; their states and weights are changed.
        moves: Which of them move, and how; gradients share no memory with the targets.
        rounding: Of the weights, ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise, 0 to 2**63 - 1.
        stream: Of the weights' noise, from which the rows' are counted.
        noise: Of the states' noise, from which the rows' are counted.

    Raises:
        TypeError: A float32 master is to move by Adam.
        ValueError: A gradient is not of its weight's shape, or a row has other moments than its move
            takes.
    """
    for i, grad, how in zip(moves.rows, moves.grads, moves.moves, strict=True):
        row = targets.rows[i]
        if isinstance(how, Adam) and isinstance(row.master, Tensor):
            raise TypeError("a float32 master must move by Sgd, got Adam")
        if grad.shape != row.weight.shape:
            raise ValueError(
                f"a gradient must have its weight's shape {tuple(row.weight.shape)}, got "
                f"{tuple(grad.shape)}"
            )
        counts = (2,) if isinstance(how, Adam) else (1,) if how.momentum else (0, 1)
        if len(row.moments) not in counts:
            raise ValueError(
                f"what moves by {type(how).__name__} must have {counts[-1]} moments, got "
                f"{len(row.moments)}"
            )
    places = places_on_cpu(moves.grads) if moves.grads else None
    if places is not None or not moves.grads:
        tables = targets.find()
        if tables is not None:
            from fixedpoint_kernels.compact import cpu

            if cpu.has_bits_of_torch():
                torch.autograd.graph.increment_version(targets.written)
                grads = places.xs if places else ()
                key = rounding, seed, stream, noise
                cpu.step_many(tables, moves, grads, key)
                return
    reference.step_many(
        targets.rows, moves, rounding=rounding, seed=seed, stream=stream, noise=noise
    )


def _has_kernel(tensors: Sequence[Tensor]) -> bool:
    return all(x.is_cpu and type(x) in PLAIN for x in tensors)
