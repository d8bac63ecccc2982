"""Multiply-adds from shapes: plain numbers, nothing to install.

Shapes include the batch. One multiplication with its addition counts 1; products element by element,
biases, normalisation, activation functions and pooling count 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["Layer", "attention", "bilinear", "convolution", "matmul", "transposed_convolution"]

Shape = Sequence[int]


@dataclass(frozen=True)
class Layer:
    """One place where a model multiplies, or keeps a weight of two or more dimensions.

    Args:
        name: Module it happens in, ``""`` for the model itself.
        kind: ``"conv2d"``, ``"conv_transpose1d"``, ``"linear"`` (a product with a weight),
            ``"matmul"`` (a product of two activations), ``"attention"`` (the same inside an
            attention), ``"bilinear"``, ``"embedding"``, ``"elementwise"`` (a weight that is only
            added or scaled with), ``"unused"`` (a weight that took no part) or ``"unknown"``.
        madds: Multiply-adds of one sample's forward pass.
        parameters: Elements of its weight and bias.
        input_shape: Of one sample, without the batch.
        output_shape: Of one sample, without the batch.
        weight: Name of its weight, ``""`` where two activations are multiplied. Tied weights
            have one name, the first.
        elements: Elements of its weight.
    """

    name: str
    kind: str
    madds: int
    parameters: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    weight: str = ""
    elements: int = 0


def convolution(weight: Shape, output: Shape) -> int:
    """Return the multiply-adds of a convolution of any number of dimensions.

    Args:
        weight: ``(outputs, inputs / groups, kernel...)``.
        output: ``(batch, outputs, spatial...)``.

    Returns:
        Every output element takes one product per weight of its filter. Products with padding
        count too, as they do in hardware.
    """
    return math.prod(output) * math.prod(weight[1:])


def transposed_convolution(weight: Shape, input_shape: Shape) -> int:
    """Return the multiply-adds of a transposed convolution.

    Args:
        weight: ``(inputs, outputs / groups, kernel...)``.
        input_shape: ``(batch, inputs, spatial...)``.

    Returns:
        Every input element is multiplied with each weight of its channel; what padding then cuts
        off counts too.
    """
    return math.prod(input_shape) * math.prod(weight[1:])


def matmul(left: Shape, right: Shape) -> int:
    """Return the multiply-adds of ``left @ right``: vectors, matrices, or batches of matrices.

    Batches are broadcast, as in torch.

    Raises:
        ValueError: The inner dimensions differ, or the batches cannot be broadcast.
    """
    inner = right[-2] if len(right) > 1 else right[0]
    if left[-1] != inner:
        raise ValueError(f"inner dimensions must agree, got {tuple(left)} and {tuple(right)}")
    columns = right[-1] if len(right) > 1 else 1
    rows = left[-2] if len(left) > 1 else 1
    return _batches(left, right) * rows * inner * columns


def _batches(left: Shape, right: Shape) -> int:
    """Return how many matrices are multiplied: batches are aligned at their last dimension."""
    count = 1
    for one, other in zip_longest(reversed(left[:-2]), reversed(right[:-2]), fillvalue=1):
        if 1 not in (one, other) and one != other:
            raise ValueError(f"batches must be broadcast, got {tuple(left)} and {tuple(right)}")
        count *= other if one == 1 else one
    return count


def attention(query: Shape, key: Shape, value: Shape) -> int:
    """Return the multiply-adds of scaled dot-product attention.

    Args:
        query: ``(batch..., heads, queries, features)``.
        key: ``(batch..., heads, keys, features)``; fewer heads are shared.
        value: ``(batch..., heads, keys, value features)``.

    Returns:
        Scores and their product with the values; a causal mask skips nothing.
    """
    scores = math.prod(query[:-1]) * key[-2]
    return scores * (query[-1] + value[-1])


def bilinear(left: Shape, weight: Shape) -> int:
    """Return the multiply-adds of ``x1 W x2`` for each row and output, as ``nn.Bilinear`` does.

    Args:
        left: ``(rows, ..., inputs)``.
        weight: ``(outputs, inputs, other inputs)``.
    """
    return math.prod(left[:-1]) * math.prod(weight)
