"""The 2-norms of many tensors, in one launch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import foreach_norm
from fixedpoint_kernels.memory import Places, places_on_cpu
from fixedpoint_kernels.strides import is_dense

__all__ = ["norms_many"]


def norms_many(
    xs: Sequence[Tensor], *, dtype: torch.dtype = torch.float64, places: Places | None = None
) -> Tensor:
    """Return the 2-norm of each tensor.

    On a CPU, squares are added up in float64, piece by piece in one order, whatever the number of
    threads; elsewhere, and where a tensor is not plain, by torch. Rounded to float32 the norms are the
    same but where float64's last bits decide.

    Args:
        xs: Floating tensors, any shapes, at least one, on one device.
        dtype: In which to add up; of the result.
        places: What ``places_on_cpu`` says of ``xs``, without gaps, if it was asked.

    Returns:
        Shape ``(len(xs),)``, ``dtype``.
    """
    if dtype is torch.float64:
        places = places or places_on_cpu(xs, is_dense)
    if places is None or dtype is not torch.float64:
        return torch.stack(foreach_norm(list(xs), 2, dtype))
    from fixedpoint_kernels.norms import cpu

    return torch.from_numpy(cpu.norms_many(places))
