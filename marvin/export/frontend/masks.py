"""Padding masks: what is seen of a sample, as rows of a table that its indices choose.

``ids != padding`` has one truth for each index, so it is an embedding with one feature, 1 or 0.
"""

import operator

import torch
from torch import Tensor, fx, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.frontend.builder import Builder
from marvin.export.frontend.call import Call
from marvin.export.frontend.layers import reshape
from marvin.export.graph.nodes import Flatten
from marvin.export.graph.transformers import Embedding
from marvin.export.graph.views import Reshape

__all__ = ["COMPARISONS", "add_mask", "seen_columns"]

COMPARISONS: tuple[object, ...] = (
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge),
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *(operator.invert, torch.logical_not, "logical_not"),
    *(operator.and_, torch.logical_and, "logical_and"),
    *(operator.or_, torch.logical_or, "logical_or"),
)
_INSTEAD = (
    ": a mask must be made of the indices that an nn.Embedding takes, by comparisons with numbers, ~, & and |, "
    "such as ids == 0"
)
_TRUTHS = FixedPoint(2, 0, signed=False)


def add_mask(builder: Builder, call: Call) -> str:
    """Add what a comparison gives of indices, or a combination of such masks; return its name."""
    sources = [call.value(node) for node in call.nodes]
    found = [
        _table(builder, source, node) for source, node in zip(sources, call.nodes, strict=True)
    ]
    tables = [table for table in found if table is not None]
    has_numbers = not any(isinstance(x, Tensor) and x.numel() > 1 for x in call.args)
    is_one_shape = {builder.shape(source) for source in sources} == {call.shape}
    if len(tables) < len(sources) or not has_numbers or not is_one_shape:
        raise call.refusal(_INSTEAD)
    table = call.replay(tables)
    if table.dtype is not torch.bool or table.shape != tables[0].shape:
        raise call.refusal(_INSTEAD)
    result = _chosen(builder, call.name, table, call.shape)
    if builder.operations[0].name not in sources:
        builder.whole = lambda inputs: (
            call.replay([x.bool() for x in inputs]).double(),
            inputs[0] * 0,
        )
    builder.memory.new(call.node, result)
    return result


def seen_columns(
    builder: Builder, call: Call, mask: fx.Node, shape: tuple[int, ...], is_padding: bool
) -> str:
    """Return the value that says which columns of a sample are seen, shape ``(1, ..., 1, columns)``.

    Args:
        builder: Of the network.
        call: Of attention.
        mask: Of truths.
        shape: Of the scores of a sample.
        is_padding: ``mask`` is true where a column is not seen, of shape ``(columns,)``; else where it is
            seen, of as many dimensions as ``shape``.

    Raises:
        ExportError: The mask is none of this kind; says what to write.
    """
    source = call.value(mask)
    table = _table(builder, source, mask)
    columns = (*[1] * (len(shape) - 1), shape[-1])
    if table is None or table.dtype is not torch.bool:
        raise call.refusal(_INSTEAD)
    if builder.shape(source) != (columns[-1:] if is_padding else columns):
        raise call.refusal(
            ": a mask must be the same for all heads and rows, such as (ids != 0)[:, None, None]"
        )
    if not is_padding:
        return source
    name = f"{source}.seen"  # once for all layers
    return name if name in builder.values else _chosen(builder, name, ~table, columns)


def _chosen(builder: Builder, name: str, table: Tensor, shape: tuple[int, ...]) -> str:
    """Add the truths of a sample's indices; return their name."""
    rows = Embedding(f"{name}.table", (builder.operations[0].name,), table.long()[:, None], _TRUTHS)
    return reshape(builder, name, builder.add(rows), shape)


def _table(builder: Builder, source: str, node: fx.Node) -> Tensor | None:
    """Return what a value is for each index: the indices themselves, or truths; None if it is neither."""
    if source == builder.operations[0].name:
        rows = [_rows(builder.model, user) for user in node.users]
        return torch.arange(min(rows)) if (rows := [n for n in rows if n]) else None
    if source in builder.pending:
        return None
    op = builder.operation(source)
    while isinstance(op, Reshape | Flatten):
        op = builder.operation(op.inputs[0])
    if not isinstance(op, Embedding) or (op.weight_fmt, op.weight.shape[1]) != (_TRUTHS, 1):
        return None
    return op.weight[:, 0] == 1


def _rows(model: nn.Module, user: fx.Node) -> int:
    """Return the rows of an embedding; 0 of another call."""
    layer = model.get_submodule(str(user.target)) if user.op == "call_module" else None
    return layer.num_embeddings if isinstance(layer, nn.Embedding) else 0
