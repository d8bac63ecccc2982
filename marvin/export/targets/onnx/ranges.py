"""Which roundings ONNX Runtime's kernels of sums, products and means of bytes compute."""

from fixedpoint_kernels import FixedPoint
from marvin.export.graph.nodes import Network

__all__ = ["in_range"]

_INT32 = 2**30  # half of it: what rounding adds stays below


def in_range(network: Network, source: str, fmt: FixedPoint, count: int | None = None) -> bool:
    """Say whether these kernels round to a format.

    Those of ONNX Runtime 1.31 convert codes to int32 before they saturate, and codes beyond turn over.
    ``QLinearGlobalAveragePool`` ends the run unless a step of what comes in, divided by ``count``, has 2**-32 to
    2**8 steps of the result.

    Args:
        network: What is written.
        source: A sum or a product; of a mean, what it is taken of.
        fmt: What it is rounded to.
        count: How many numbers a mean is of; None for sums and products.
    """
    value = network.values[source]
    steps = 2.0 ** (fmt.fl - value.fl)  # of the result, in one of the source
    is_taken = count is None or 2.0**-32 <= steps / count < 2.0**8
    return is_taken and max(-value.low, value.high) * steps < _INT32
