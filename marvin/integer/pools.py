"""Pooling in a traced model: which windows, and what is taken of them."""

import math
import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fixedpoint_kernels.fused import INPUT, MOST_TAPS, Pooled
from fixedpoint_kernels.products.shapes import Window
from fixedpoint_kernels.sides import for_each_side
from marvin.integer.nodes import asks_shape, plain

__all__ = ["let_windows_be_whole", "mean_of_sides", "pooling"]

_LARGEST = F.max_pool2d, torch.max_pool2d
_MEANS = torch.mean, "mean"
_KERNEL = "kernel_size"
_BOTH = slice(2, None), slice(2, 4), slice(-2, None)


def pooling(node: fx.Node, module: nn.Module) -> Pooled | None:
    """Return what a node pools, if chains can; its source is not known yet."""
    if len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_module":
        return _of_module(module.get_submodule(str(node.target))) if plain(node) else None
    if node.target is operator.getitem:
        return _every(node.args[1])
    args = node.args[1:]
    options = {name: value for name, value in node.kwargs.items() if name != "input"}
    if any(isinstance(value, fx.Node) for value in (*args, *options.values())):
        return None
    if node.target in _LARGEST:
        return _of_module(nn.MaxPool2d(*args, **options))  # pyright: ignore[reportArgumentType]
    if node.target is F.avg_pool2d:
        return _of_module(nn.AvgPool2d(*args, **options))  # pyright: ignore[reportArgumentType]
    if node.target is mean_of_sides:
        return replace(_of_all(), is_square=args != ((2, 3),))
    if node.target is F.adaptive_avg_pool2d:
        return _of_module(nn.AdaptiveAvgPool2d(*args, **options))  # pyright: ignore[reportArgumentType]
    return _mean(*args, **options) if node.target in _MEANS else None


def _of_module(own: nn.Module) -> Pooled | None:
    if type(own) is nn.AdaptiveAvgPool2d:
        return _of_all() if own.output_size in (1, (1, 1), [1, 1]) else None
    if type(own) is nn.AvgPool2d:
        border = _pair(own.padding) == (0, 0) or own.count_include_pad
        fits = border and not own.ceil_mode and own.divisor_override is None
    elif type(own) is nn.MaxPool2d:
        fits = _pair(own.dilation) == (1, 1) and math.prod(_pair(own.kernel_size)) <= MOST_TAPS
        fits = fits and not own.ceil_mode and not own.return_indices
    else:
        return None
    pairs = own.kernel_size, own.stride or own.kernel_size, own.padding
    kernel, stride, padding = map(_pair, pairs)
    is_mean = type(own) is nn.AvgPool2d and kernel != (1, 1)
    return Pooled(INPUT, kernel, Window(stride, padding), is_mean=is_mean) if fits else None


def _pair(numbers: int | tuple[int, ...] | list[int]) -> tuple[int, int]:
    down, across = for_each_side(numbers, 2)
    return down, across


def _every(index: object) -> Pooled | None:
    """Return what takes every so manieth row and column, ``x[:, :, ::2, ::2]``: windows of one place."""
    parts: tuple[object, ...] = index if isinstance(index, tuple) else (index,)
    if (left := 4 - len(parts) + parts.count(...)) >= 0 and parts.count(...) == 1:
        i = parts.index(...)
        parts = *parts[:i], *[slice(None)] * left, *parts[i + 1 :]
    slices = [own for own in parts if isinstance(own, slice)]
    if not len(slices) == len(parts) == 4:
        return None
    is_whole = all(own.start in (None, 0) and own.stop is None for own in slices)
    samples, channels, down, across = (own.step or 1 for own in slices)
    if not is_whole or (samples, channels) != (1, 1):
        return None
    steps = isinstance(down, int) and isinstance(across, int)
    return Pooled(INPUT, (1, 1), Window((down, across))) if steps else None


def _of_all(is_flat: bool = False) -> Pooled:
    return Pooled(INPUT, None, Window(), is_mean=True, is_flat=is_flat)


def _mean(dim: Any = None, keepdim: Any = False, **others: Any) -> Pooled | None:
    """Return the mean over all places, if these arguments of ``torch.mean`` say so."""
    if others or not isinstance(dim, tuple | list) or len(dim) != 2:
        return None
    return _of_all(is_flat=not keepdim) if {d % 4 for d in dim} == {2, 3} else None


def mean_of_sides(x: Tensor, sides: tuple[int, int]) -> Tensor:
    """Return the means of windows as high as ``x`` is in one dimension, and as wide as in another.

    Args:
        x: (images, channels, height, width).
        sides: Which dimensions: (2, 3) for one window of all places, (3, 3) for square ones.
    """
    return F.avg_pool2d(x, [x.shape[side] for side in sides])


def let_windows_be_whole(graph: fx.Graph) -> None:
    """Let pooling with windows of a value's own sizes take the value alone, as chains do."""
    for node in [*graph.nodes]:
        if node.target is not F.avg_pool2d:
            continue
        given = dict(zip(("input", _KERNEL), node.args, strict=False)) | node.kwargs
        value, kernel = given.get("input"), given.get(_KERNEL)
        if given.keys() != {"input", _KERNEL} or len(node.args) > 2:
            continue
        if not isinstance(value, fx.Node) or (sides := _sides(kernel, value)) is None:
            continue
        with graph.inserting_before(node):
            found = graph.call_function(mean_of_sides, (value, sides))
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def _sides(kernel: object, value: fx.Node) -> tuple[int, int] | None:
    """Return which dimensions of a value give the height and the width of windows; None: others do."""
    if isinstance(kernel, fx.Node):
        is_part = kernel.target is operator.getitem and _asks_all(kernel.args[0], value)
        if is_part and kernel.args[1] in _BOTH:
            return 2, 3
        side = _side(kernel, value)
        return None if side is None else (side, side)
    parts = [_side(own, value) for own in kernel] if isinstance(kernel, tuple | list) else []
    known = [side for side in parts if side is not None]
    return (known[0], known[1]) if len(known) == len(parts) == 2 else None


def _side(node: object, value: fx.Node) -> int | None:
    """Return the dimension whose size a node is, ``value.shape[3]`` or ``value.size(3)``."""
    if not isinstance(node, fx.Node):
        return None
    is_part = node.target is operator.getitem and _asks_all(node.args[0], value)
    is_size = node.target == "size" and node.args[:1] == (value,) and not node.kwargs
    dim = node.args[1] if (is_part or is_size) and len(node.args) == 2 else None
    return dim % 4 if isinstance(dim, int) and dim % 4 >= 2 and -4 <= dim < 4 else None


def _asks_all(node: object, value: fx.Node) -> bool:
    """Say whether a node is the whole shape of a value."""
    if not isinstance(node, fx.Node) or not asks_shape(node) or node.args[0] is not value:
        return False
    is_shape = node.target is getattr and node.args[1] == "shape"
    return is_shape or (node.target == "size" and len(node.args) == 1 and not node.kwargs)
