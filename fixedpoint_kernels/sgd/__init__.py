"""A step of SGD on float32 masters and the rounding of the weights, in one pass over memory.

The bits are those of ``torch.optim.SGD``, and then of ``quantize_many``: see ``reference.py``. Where
torch's ``add_`` of ``alpha`` times a tensor rounds once (it has fused multiply-adds), the kernel does
the same; where it rounds twice, there is no kernel: see ``has_bits_of_torch``.
"""

from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fixedpoint_kernels.memory import places_on_cpu
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.rounding.reference import Rounding
from fixedpoint_kernels.sgd.targets import Moves, Rates, Targets
from fixedpoint_kernels.strides import is_dense

__all__ = ["Moves", "Rates", "Targets", "has_bits_of_torch", "step_many"]


def step_many(
    targets: Targets, moves: Moves, *, rounding: Rounding, seed: int, stream: int
) -> bool:
    """Move masters by SGD with momentum, and round all of them into the weights, in one launch.

    Args:
        targets: Masters, weights and formats.
        moves: Which masters move.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise, 0 to 2**63 - 1.
        stream: Of the first weight that has a format; each further one has the next.

    Returns:
        Whether it was done. If not, nothing has changed: a tensor is not as it should be or shares
        memory with another, noise would go to a tensor whose dimensions lie in another order, or
        torch's sums of products round twice on this machine.

    Raises:
        TypeError, ValueError: ``seed``, ``stream`` or an offset is out of range.
    """
    offsets = targets.offsets
    Key.checked(seed, stream + len(offsets), max(offsets, default=0))
    key = Key.checked(seed, stream, min(offsets, default=0))
    momenta = [x for x in moves.momenta if x is not None]
    rows = [row for row, x in zip(moves.rows, moves.momenta, strict=True) if x is not None]
    if not has_bits_of_torch() or (addresses := targets.find(momenta, rows)) is None:
        return False
    if targets.is_turned and rounding == "stochastic":  # noise goes by the order of dimensions
        return False
    read = np.empty(0, np.int64)
    if moves.grads:
        places = moves.places or places_on_cpu(moves.grads, is_dense)
        if places is None or not targets.are_alike(moves.rows, moves.grads, places.elements):
            return False
        read = np.array(places.xs, np.int64)
        if targets.shares(read, np.array(places.elements)):
            return False
    from fixedpoint_kernels.sgd import cpu

    written = targets.written()
    if any(map(Tensor.is_inference, written)):
        written = [x for x in written if not x.is_inference()]
    increment_version(written)
    cpu.step_many(targets, addresses, read, moves, key if rounding == "stochastic" else None)
    return True


@cache
def has_bits_of_torch() -> bool:
    """Say whether ``add_`` of ``alpha`` times a tensor rounds once, as the kernel does.

    Torch's vectors and what is left after them are two pieces of code; all lengths up to 67 are
    looked at.
    """
    factor = 1.0 + 2.0**-12  # its square has 25 bits: rounded twice, the last one is lost
    number = partial(torch.full, dtype=torch.float32, device="cpu")
    sums = [number((n,), -1.0).add_(number((n,), factor), alpha=factor) for n in range(1, 68)]
    return bool((torch.cat(sums) == 2.0**-11 + 2.0**-24).all())
