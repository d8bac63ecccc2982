"""How to tell that somebody wrote to a weight, or gave it other memory."""

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import versions_of

__all__ = ["Mark", "marks_of", "on_host"]

Mark = tuple[int, int, "ref[torch.UntypedStorage]"]


def marks_of(weights: Sequence[Tensor]) -> list[Mark]:
    """Return what changes when somebody writes to a weight, or gives it other memory (``weight.data = x``).

    The address alone does not tell: memory that was let go of comes back for the next tensor.
    """
    memory = map(ref, map(Tensor.untyped_storage, weights))
    return list(zip(versions_of(weights), map(Tensor.data_ptr, weights), memory, strict=True))


def on_host(answers: Sequence[Tensor]) -> list[float]:
    """Bring what was asked of weights to the host, in one go: all go to the device of the first."""
    return torch.stack([x.to(answers[0].device) for x in answers]).tolist() if answers else []
