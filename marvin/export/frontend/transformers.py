"""Norms of rows, softmax, attention, embeddings and constants as operations on integers."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.export.errors import ExportError, fixed_point
from marvin.export.frontend.builder import Builder, Pending, Whole
from marvin.export.graph.formats import codes_of, exact_format
from marvin.export.graph.functions import KEEP_ORDER, Table
from marvin.export.graph.nodes import AveragePool, Round
from marvin.export.graph.transformers import Constant, Embedding, MatMul, Norm, Softmax
from marvin.export.graph.views import Transpose
from marvin.export.passes.batch_norm import nearest
from marvin.export.passes.rows import root_numbers

__all__ = [
    "ROWS",
    "attention",
    "constant",
    "exact_attention",
    "exact_rows",
    "mask_of",
    "matmul",
    "softmax",
    "spelled_attention",
]

_LONGEST = 16  # bits of codes that something has rounded
_TABLE = 2**14
_GAIN_FL = 24
_MOST_NEGATIVE = -1e4  # of masks that are added: what is as far below is not seen


def _row_norm(
    builder: Builder, name: str, module: str, m: nn.LayerNorm | nn.RMSNorm, source: str
) -> str:
    if len(m.normalized_shape) != 1:
        raise ExportError(
            f"{module}: must normalise the last dimension alone, got {tuple(m.normalized_shape)}: "
            f"flatten these first"
        )
    source = builder.round_input(name, module, source)
    eps = torch.finfo(torch.float32).eps if m.eps is None else m.eps
    numbers = root_numbers(builder.values[source], eps)
    own_numbers = _gain_and_bias(builder, module, m)
    given: dict[str, Any] = {**own_numbers, **numbers, "is_centered": isinstance(m, nn.LayerNorm)}

    def make(own: str, taken: str, fmt: FixedPoint) -> Norm:
        return Norm(own, (taken,), **given, fmt=fmt)

    shape = builder.values[source].shape
    result = builder.wait(name, Pending(source, make, shape, builder.node))
    return builder.round_output(name, module, result)


def _gain_and_bias(builder: Builder, module: str, m: Any) -> dict[str, Any]:
    """Return gain and bias at one ``fl``: of their own formats, or the gain of ``scale_wl`` bits."""
    n = m.normalized_shape[0]
    gain, fmt = torch.ones(n, dtype=torch.int64), FixedPoint(2, 0)
    if m.weight is not None:
        gain, fmt = _codes(builder, f"{module}.weight", m.weight, builder.scale_wl, _GAIN_FL)
    bias, bias_fmt = None, FixedPoint(32, fmt.fl)
    if getattr(m, "bias", None) is not None:
        bias, bias_fmt = _codes(builder, f"{module}.bias", m.bias, 32, fmt.fl)
        if bias_fmt.fl != fmt.fl:  # of formats of their own: both at the finer
            fl = max(fmt.fl, bias_fmt.fl)
            gain, bias = gain << fl - fmt.fl, bias << fl - bias_fmt.fl
            fmt, bias_fmt = (FixedPoint(min(32, f.wl + fl - f.fl), fl) for f in (fmt, bias_fmt))
    return {"gain": gain, "gain_fmt": fmt, "bias": bias, "bias_fmt": bias_fmt}


def _codes(
    builder: Builder, name: str, x: Tensor, wl: int, longest_fl: int
) -> tuple[Tensor, FixedPoint]:
    name = name.lstrip(".")
    if name in builder.weights:
        fmt = fixed_point(name, builder.weights[name])
        return codes_of(name, x, fmt).to(torch.int64), fmt
    return nearest(x.detach().double(), wl, longest_fl)


def _embedding(builder: Builder, name: str, module: str, m: nn.Embedding, source: str) -> str:
    if source != builder.operations[0].name:
        raise ExportError(f"{module}: an embedding must take the network's input or constants")
    weight = f"{module}.weight".lstrip(".")
    fmt = fixed_point(weight, builder.format_of(weight, m.weight))
    codes = codes_of(weight, m.weight, fmt).to(torch.int64)
    return builder.round_output(name, module, builder.add(Embedding(name, (source,), codes, fmt)))


def softmax(
    builder: Builder,
    name: str,
    source: str,
    scale: float = 1.0,
    mask: Tensor | None = None,
    columns: tuple[str, ...] = (),
) -> str:
    """Add softmax of ``scale`` times a value, which waits for what rounds it; return the name.

    Args:
        builder: Of the network.
        name: Of the operation.
        source: A value.
        scale: Goes into the table.
        mask: 1 where a column is seen from a row, int64, or None.
        columns: The value that says which columns of a sample are seen, if there is one.
    """
    source = builder.rounded(source, name)
    x, wl = builder.values[source], builder.wl

    def make(own: str, taken: str, fmt: FixedPoint) -> Softmax:
        bits = 16 if fmt.wl <= 8 else 24
        most, shift = min(2 ** (fmt.wl + 3), _TABLE), 0
        far = (bits + 1) * math.log(2)  # where an exponential is rounded to 0
        while far / (scale * 2.0 ** (shift - x.fl)) > most - 2:
            shift += 1
        step = scale * 2.0 ** (shift - x.fl)
        places = torch.arange(math.ceil(far / step) + 1, dtype=torch.float64)
        table = torch.round(torch.exp(-places * step) * 2.0**bits).to(torch.int64)
        return Softmax(own, (taken, *columns), table, shift, mask, x.fl, fmt)

    fmt = FixedPoint(wl, wl, signed=False)
    return builder.wait(name, Pending(source, make, x.shape, builder.node, fmt=fmt))


def _softmax(builder: Builder, name: str, module: str, m: nn.Softmax, source: str) -> str:
    dims = len(builder.shape(source))
    if m.dim not in (-1, dims):
        raise ExportError(f"{module}: softmax must be over the last dimension, dim=-1, got {m.dim}")
    return softmax(builder, name, source)


def matmul(builder: Builder, name: str, values: Sequence[str], nodes: Sequence[str]) -> str:
    """Add a product of matrices, of values rounded to ``builder.wl`` bits where nothing has.

    Args:
        builder: Of the network.
        name: Of the operation.
        values: Two.
        nodes: Of the trace: what gives the values, for their ranges.
    """
    sides = "left", "right"
    taken = [
        _short(builder, f"{name}.{side}", value, node)
        for side, value, node in zip(sides, values, nodes, strict=True)
    ]
    return builder.add(MatMul(name, (taken[0], taken[1])))


def _short(builder: Builder, name: str, source: str, node: str) -> str:
    """Return a value that something has rounded, or round it to ``wl`` bits by its range."""
    source = builder.rounded(source, name)
    value, op = builder.values[source], builder.operation(source)
    while isinstance(op, KEEP_ORDER):
        op = builder.operation(op.inputs[0])
    is_rounded = isinstance(op, Round | Table | AveragePool | Norm | Softmax | Embedding)
    if value.bits - (value.low >= 0) <= (_LONGEST if is_rounded else builder.wl):
        return source
    fmt = builder.fitting(node)
    rounded = builder.add(Round(builder.unused(name), (source,), fmt))
    builder.origins[rounded] = source
    builder.found[rounded] = fmt
    return rounded


def attention(  # noqa: PLR0913  a number of each kind
    builder: Builder,
    name: str,
    values: Sequence[str],
    nodes: Sequence[str],
    scale: float,
    mask: Tensor | None,
    columns: tuple[str, ...] = (),
) -> str:
    """Add scaled dot-product attention: two products of matrices, and softmax between.

    Args:
        builder: Of the network.
        name: Of the call.
        values: Query, key and value, shapes ``(..., tokens, features)``.
        nodes: Of the trace: what gives the values, for their ranges.
        scale: Of the scores.
        mask: As of ``softmax``.
        columns: As of ``softmax``.
    """
    sides = "query", "key", "value"
    query, key, value = (
        _short(builder, f"{name}.{side}", x, node)
        for side, x, node in zip(sides, values, nodes, strict=True)
    )
    dims = len(builder.values[key].shape)
    order = (*range(dims - 2), dims - 1, dims - 2)
    keys = builder.add(Transpose(builder.unused(f"{name}.keys"), (key,), order))
    scores = builder.add(MatMul(builder.unused(f"{name}.scores"), (query, keys)))
    waiting = softmax(builder, builder.unused(f"{name}.softmax"), scores, scale, mask, columns)
    return builder.add(MatMul(name, (builder.rounded(waiting, name), value)))


_AttentionCall = tuple[Sequence[object], float | None, object, bool]


def spelled_attention(args: Sequence[object], kwargs: dict[str, Any]) -> _AttentionCall:
    """Return query, key and value of a call of attention, its scale, its mask, and if it is causal.

    Raises:
        ValueError: It has options that integers have not; says what to write.
    """

    def given(  # noqa: PLR0913  torch's
        query: object,
        key: object,
        value: object,
        attn_mask: object = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> _AttentionCall:
        if dropout_p:
            raise ValueError("write dropout_p=p if self.training else 0.0")
        if enable_gqa:
            raise ValueError("repeat keys and values, without enable_gqa")
        return (query, key, value), scale, attn_mask, is_causal

    bound = inspect.signature(given).bind(*args, **kwargs)
    return given(*bound.args, **bound.kwargs)


def mask_of(mask: object, is_causal: bool, rows: int, columns: int) -> Tensor | None:
    """Return 1 where a column is seen from a row and 0 where not, int64, or None.

    Raises:
        ValueError: The mask is no constant of this kind; says what to write.
    """
    if is_causal:
        return torch.ones(rows, columns, dtype=torch.int64).tril()
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(
            "attn_mask must be a constant, or made of indices, such as (ids != 0)[:, None, None]"
        )
    whole = mask.detach().cpu()
    while whole.ndim > 2 and len(whole) and torch.equal(whole, whole[:1].expand_as(whole)):
        whole = whole[0]
    seen = whole if whole.dtype is torch.bool else whole == 0
    is_plain = whole.dtype is torch.bool or bool((seen | (whole <= _MOST_NEGATIVE)).all())
    if whole.ndim > 2 or not is_plain:
        raise ValueError("attn_mask must be one for all heads and samples, of truths or 0 and -inf")
    seen = seen.expand(rows, columns)
    if not seen.any(-1).all():
        raise ValueError("attn_mask must let each row see a column")
    return seen.long().contiguous()


def constant(builder: Builder, name: str, x: Tensor) -> str:
    """Add a constant: exactly if 16 bits hold it, else rounded to ``scale_wl`` bits; return its name.

    Args:
        builder: Of the network.
        name: Of the operation.
        x: Floating, of the shape of one sample.
    """
    fmt = exact_format(x)
    is_exact = fmt is not None and fmt.wl <= _LONGEST
    if fmt is not None and is_exact:
        codes = codes_of(name, x.float(), fmt).to(torch.int64)
    else:
        codes, fmt = nearest(x.double(), builder.scale_wl)
    result = builder.add(Constant(name, (), codes, fmt))
    if not is_exact:
        builder.found[result] = fmt
    return result


def exact_attention(scale: float, mask: Tensor | None, *, is_padded: bool = False) -> Whole:
    """Return what attention computes, and how large its terms are, for float64.

    Args:
        scale: Of the scores.
        mask: As of ``softmax``.
        is_padded: A fourth input is 1 where columns of a sample are not seen, shape ``(n, columns)``; else,
            where they are, of as many dimensions as the scores.
    """

    def computed(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        query, key, value, *columns = inputs
        scores = query @ key.transpose(-2, -1) * scale
        largest = query.abs().amax() * key.abs().amax() * query.shape[-1] * scale
        if mask is not None:
            scores = scores.masked_fill(mask.to(scores.device) == 0, -math.inf)
        for one in columns:
            seen = one[:, None, None] == 0 if is_padded else one == 1
            scores = scores.masked_fill(~seen, -math.inf)
        size = (1 + largest) * value.abs().amax()
        sees = (scores > -math.inf).any(-1, keepdim=True)
        shares = F.softmax(scores.masked_fill(~sees, 0), -1) * sees
        return shares @ value, torch.ones_like(query[..., :1]) * size

    return computed


def exact_rows(m: nn.Module) -> Whole:
    """Return what a module of ``ROWS`` computes, and how large its terms are, for float64."""

    def computed(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x = inputs[0]
        if isinstance(m, nn.Embedding):
            y = m.weight.detach().double()[x.long()]
            return y, torch.zeros_like(y)
        if isinstance(m, nn.Softmax):
            y = F.softmax(x, -1)
            return y, y * (1 + x.abs().amax(-1, keepdim=True))
        is_centered = isinstance(m, nn.LayerNorm)
        assert isinstance(m, nn.LayerNorm | nn.RMSNorm)
        eps = torch.finfo(torch.float32).eps if m.eps is None else m.eps
        mean = x.mean(-1, keepdim=True) if is_centered else torch.zeros_like(x[..., :1])
        root = ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()
        gain = 1.0 if m.weight is None else m.weight.detach().double()
        bias = getattr(m, "bias", None)
        offset = torch.zeros(()) if bias is None else bias.detach().double()
        largest = x.abs().amax(-1, keepdim=True) / root
        size = (largest + largest.square() + 1) * torch.as_tensor(gain).abs() + offset.abs()
        return (x - mean) / root * gain + offset, size

    return computed


ROWS: dict[type[nn.Module], Callable[..., str]] = {
    nn.LayerNorm: _row_norm,
    nn.RMSNorm: _row_norm,
    nn.Embedding: _embedding,
    nn.Softmax: _softmax,
}
