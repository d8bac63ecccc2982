"""The layers of a model that multiply, found by running it on shapes alone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from perfmodel.madds import Layer

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Layer", "UnknownLayerError", "layers", "total_madds"]

Shape = tuple[int, ...]


class UnknownLayerError(ValueError):
    """A model computes with operations whose multiply-adds are not known.

    Args:
        found: ``module: operation`` of each.
    """

    def __init__(self, found: Sequence[str]):
        self.found = tuple(found)
        super().__init__(
            f"multiply-adds must be known for every operation, got {', '.join(found)}; "
            "unknown='list' counts the rest and lists these as kind 'unknown'"
        )


def layers(
    model: "nn.Module",
    input_shape: Sequence[int] | Sequence[Sequence[int]],
    *,
    dtype: "torch.dtype | None" = None,
    unknown: Literal["raise", "list"] = "raise",
) -> list[Layer]:
    """Count the multiply-adds of each layer of ``model``.

    A copy without values runs once on the meta device, so a model of any size takes no memory and
    the model itself is not touched: its hooks are not called, its statistics and random numbers
    do not move. It runs in the mode it is in, batch normalisation apart, which one sample alone
    may leave without statistics. The first call of a process waits for torch to load what its
    meta device needs, about a second; ResNet-50 then takes a tenth of one.

    Args:
        model: Any module, on any device. What ``marvin.integer.convert`` and ``forward_save.convert``
            did to it does not count: its layers are those of before.
        input_shape: Shape of one sample, without the batch; of several inputs, their shapes.
        dtype: Of the input; default: that of the parameters. ``torch.int64`` for tokens.
        unknown: What to do about operations that are not known to multiply or not to: raise, or
            list them as kind ``"unknown"`` with 0 multiply-adds.

    Returns:
        One record for each module and weight, in the order in which they first ran; a module that
        runs twice counts twice. Weights of two or more dimensions that multiply nothing follow
        with 0. What is made of one weight and of tensors that do not depend on the input, such as
        a masked, scaled or normalised weight, is that weight; products of several weights are
        activations, as learned queries behind their layer are. Products that do not depend on the
        input count as all others, but for those that normalise a weight by itself, as spectral
        normalisation does: they count 0.

    Raises:
        TypeError: ``model`` is no module, or the shape no sequence.
        UnknownLayerError: An operation is not known, and ``unknown="raise"``.
        ValueError: The model cannot run on shapes alone, or is lazy and has not run yet; says which
            module failed.

    Examples:
        >>> [r.madds for r in perfmodel.layers(torch.nn.Linear(3, 2), (3,))]
        [6]
    """
    from perfmodel.counting import count  # loads torch

    if unknown not in ("raise", "list"):
        raise ValueError(f"unknown must be 'raise' or 'list', got {unknown!r}")
    found, strange = count(model, shapes_of(input_shape), dtype)
    if strange and unknown == "raise":
        raise UnknownLayerError([f"{row.name or 'model'}: {row.weight}" for row in strange])
    return [*found, *strange]


def shapes_of(value: Any) -> list[Shape]:
    """Return the shapes of all inputs, of one shape or of several.

    Raises:
        TypeError: It is no sequence.
        ValueError: A size is not a positive whole number.
    """
    if not isinstance(value, Sequence):
        raise TypeError(f"a shape must be that of one sample, such as (3, 32, 32), got {value!r}")
    several = [tuple(v) if isinstance(v, Sequence) else None for v in value]
    shapes = [s for s in several if s is not None] if all(several) and value else [tuple(value)]
    for size in (size for shape in shapes for size in shape):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"a shape must be of sizes of at least 1, got {value!r}")
    return shapes


def total_madds(found: Sequence[Layer]) -> int:
    """Return the multiply-adds of one sample's forward pass."""
    return sum(row.madds for row in found)
