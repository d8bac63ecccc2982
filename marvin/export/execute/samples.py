"""What a network refuses to take."""

from torch import Tensor

from marvin.export.errors import ExportError, check_tensor
from marvin.export.graph.nodes import Network

__all__ = ["check_numbers", "check_samples"]


def check_samples(network: Network, x: object) -> None:
    """Refuse what are no samples of a network.

    Raises:
        ExportError: ``x`` has another shape than ``(n, *network.input.shape)``.
        TypeError: ``x`` is not a tensor.
    """
    check_tensor(x)
    assert isinstance(x, Tensor)
    shape = network.input.shape
    if tuple(x.shape[1:]) != shape:
        raise ExportError(f"the input must have shape (n, {shape}), got {tuple(x.shape)}")


def check_numbers(x: Tensor) -> None:
    """Refuse samples with a NaN.

    Raises:
        ExportError: There is one.
    """
    if x.isnan().any():
        raise ExportError("the input must be numbers, got NaN")
