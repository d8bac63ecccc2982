"""Numbers by which queries are multiplied before attention, which attention itself may multiply by."""

import math
import operator

import torch
import torch.nn.functional as F
from torch import fx

from marvin.integer.nodes import asks_shape

__all__ = ["let_attention_scale"]

_PRODUCTS = operator.mul, torch.mul, "mul"
_QUOTIENTS = operator.truediv, torch.div, "div"
_VIEWS = "view", "reshape", "transpose", "permute", "unflatten", "contiguous"


def let_attention_scale(graph: fx.Graph) -> None:
    """Move powers of two by which queries are multiplied or divided into attention's own scale, which has the same bits."""
    for node in [*graph.nodes]:
        scale = node.kwargs.get("scale")
        if node.target is not F.scaled_dot_product_attention or not isinstance(scale, int | float):
            continue
        query = node.args[0] if node.args else node.kwargs.get("query")
        while isinstance(query, fx.Node) and query.target in _VIEWS and _has_one_user(query):
            query = query.args[0]
        if not isinstance(query, fx.Node) or not _has_one_user(query):
            continue
        if (found := _scaled(query)) is not None:
            value, factor = found
            node.kwargs = {**node.kwargs, "scale": scale * factor}
            query.replace_all_uses_with(value)
            graph.erase_node(query)


def _has_one_user(node: fx.Node) -> bool:
    """Say whether one node takes a value; others may ask for its shape."""
    return sum(not asks_shape(user) for user in node.users) == 1


def _scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return what a node multiplies or divides by a power of two, and by what it multiplies."""
    if node.target not in (*_PRODUCTS, *_QUOTIENTS) or len(node.args) != 2 or node.kwargs:
        return None
    value, number = node.args
    if node.target in _PRODUCTS and isinstance(value, float):
        value, number = number, value
    if not isinstance(value, fx.Node) or not isinstance(number, float):
        return None
    is_power = math.frexp(number)[0] == 0.5
    return (value, number if node.target in _PRODUCTS else 1 / number) if is_power else None
