"""Attention and encoders of torch, spelled as layers that can be rounded and traced one by one."""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from fixedpoint_kernels._torch_private.modules import own_hooks
from marvin.compiled import check_uncompiled
from marvin.hooks import rounders_of
from marvin.refused import check_model, check_unsharded

__all__ = [
    "Attention",
    "Encoder",
    "EncoderLayer",
    "attention_weights",
    "padded_attention",
    "spell_attention",
]


@torch.inference_mode(False)  # or the copy could not be trained
def spell_attention(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose attention is made of linear layers.

    ``nn.MultiheadAttention`` multiplies by parameters of its own, where no layer rounds what comes in.
    In the copy, it has the linear layers ``query``, ``key``, ``value`` and ``out_proj``, with the same
    numbers, and ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` call these. It computes the
    same up to float32's rounding, can be trained with any policy, calibrated, frozen and exported.
    ``marvin.calibrate`` does this by itself. Call it before the optimizer is made: parameters are others.

    Args:
        model: Stays as it is.

    Raises:
        TypeError: ``model`` is no module, or what ``torch.compile`` returned.
        ValueError: Its attention already rounds, or has ``add_bias_kv`` or ``add_zero_attn``, or shares its
            ``in_proj_weight`` with other attention; or what is spelled has a hook, a ``forward`` of one
            object or a parametrised weight, which would be lost; or parameters are sharded.

    Examples:
        >>> model = marvin.spell_attention(nn.TransformerEncoder(layer, 2))
        >>> optimizer = marvin.MSGD(model.named_parameters(), lr=0.1)
    """
    check_model(model, "spell_attention(model)")
    check_uncompiled(model, "spell_attention(model)")
    check_unsharded(model)
    _check_untied(model)
    return _spelled(copy.deepcopy(model), "", {})


def _check_untied(model: nn.Module) -> None:
    """Refuse attention that shares what is cut into three: the parts would be trained apart."""
    owners: dict[Tensor, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            first = owners.setdefault(module.in_proj_weight, name)
            if first != name:
                raise ValueError(
                    f"{first!r} and {name!r} must not share in_proj_weight to be spelled: share the module"
                )


def _check_plain(module: nn.Module, name: str) -> None:
    """Refuse what a spelled module would lose."""
    out = getattr(module, "out_proj", module)  # attention's, which is made anew
    if is_parametrized(module) or is_parametrized(out):
        raise ValueError(
            f"{name!r} must have plain weights to be spelled, got parametrised ones: call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    own = next(iter([*own_hooks(module), *own_hooks(out)]), None)
    if own is not None or "forward" in vars(module):
        got = "a forward of its own" if own is None else f"the hook {own!r:.60}"
        raise ValueError(f"{name!r} must be plain to be spelled, got {got}: it would be lost")


def _spelled(module: nn.Module, name: str, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with attention spelled; ``done`` has those that were met before."""
    if module in done:
        return done[module]
    for inner, child in [*module.named_modules(remove_duplicate=False)]:
        if inner and "." not in inner:
            setattr(module, inner, _spelled(child, f"{name}.{inner}".lstrip("."), done))
    found = module
    if type_before_parametrizations(module) is nn.MultiheadAttention:
        if rounders_of(module):
            raise ValueError(
                f"attention must be spelled before it rounds, got formats at {name!r}: call "
                "marvin.spell_attention(model) before marvin.quantize_activations or marvin.prepare"
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(
                f"{repr(name) if name else 'the model'} must have add_bias_kv=False and add_zero_attn=False to be spelled"
            )
        _check_plain(module, name)
        assert isinstance(module, nn.MultiheadAttention)
        found = Attention(module)
    elif type(module) is nn.TransformerEncoderLayer and type(module.self_attn) is Attention:
        _check_plain(module, name)
        found = EncoderLayer(module)
    elif type(module) is nn.TransformerEncoder and all(
        type(layer) is EncoderLayer for layer in module.layers
    ):
        _check_plain(module, name)
        found = Encoder(module)
    found.training = module.training
    done[module] = found
    return found


class Attention(nn.Module):
    """What ``nn.MultiheadAttention`` computes, by four linear layers.

    Args:
        source: Whose numbers to take.
    """

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, self.dropout = source.num_heads, source.dropout
        self.batch_first = source.batch_first
        if source.in_proj_weight is None:
            weights = source.q_proj_weight, source.k_proj_weight, source.v_proj_weight
        else:
            weights = source.in_proj_weight.chunk(3)
        biases = [None] * 3 if source.in_proj_bias is None else source.in_proj_bias.chunk(3)
        self.query, self.key, self.value = map(_linear, weights, biases)
        self.out_proj = _linear(source.out_proj.weight, source.out_proj.bias)

    def forward(  # noqa: PLR0913  torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        as_batch_first: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values and, if asked for, the weights of attention: see torch's.

        Args:
            query: Shape ``(n, rows, features)``, or ``(rows, n, features)`` unless ``batch_first``.
            key: Likewise, ``columns`` for ``rows``.
            value: As ``key``.
            key_padding_mask: True where a column of a sample is not seen, shape ``(n, columns)``, or what
                is added to its scores.
            need_weights: Return weights, too.
            attn_mask: True where a row does not see a column, or what is added to scores; shape
                ``(rows, columns)`` or ``(n * heads, rows, columns)``.
            average_attn_weights: Of all heads.
            is_causal: Without ``attn_mask``, let each row see columns up to its own.
            as_batch_first: True: as with ``batch_first``, whatever that is; how ``EncoderLayer`` calls it.

        Raises:
            ValueError: A tensor has not three dimensions.
        """
        if isinstance(query, Tensor) and query.ndim != 3:
            raise ValueError(f"query must have three dimensions, got shape {tuple(query.shape)}")
        taken = [query, key, value]
        as_it_is = self.batch_first or as_batch_first is True  # in a trace it may be a proxy
        if not as_it_is:
            taken = [x.transpose(0, 1) for x in taken]
        layers = self.query, self.key, self.value
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, x in zip(layers, taken, strict=True)
        )
        masks = attn_mask, key_padding_mask, is_causal
        dropout = self.dropout if self.training else 0.0
        is_traced = any(isinstance(mask, fx.Proxy) for mask in (attn_mask, key_padding_mask))
        y = (padded_attention if is_traced else _attended)(q, k, v, *masks, dropout)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        y = y if as_it_is else y.transpose(0, 1)
        weights = attention_weights(q, k, average_attn_weights, *masks) if need_weights else None
        return y, weights


def _one_call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Be one call in a trace, as with ``fx.wrap``, which changes the name's value while anything is traced."""

    @wraps(function)
    def call(*args: object, **kwargs: object) -> Tensor:
        for x in (*args, *kwargs.values()):
            if isinstance(x, fx.Proxy):
                return x.tracer.create_proxy("call_function", call, args, kwargs)  # pyright: ignore
        return function(*args, **kwargs)

    return call


@_one_call
def padded_attention(  # noqa: PLR0913  torch's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float = 0.0,
) -> Tensor:
    """Return the attended values of each head: one call in a trace where a mask or padding depends on what comes in.

    Args:
        q: Queries, shape ``(n, heads, rows, features)``.
        k: Keys, shape ``(n, heads, columns, features)``.
        v: Values, as keys.
        attn_mask: As of ``Attention``.
        key_padding_mask: As of ``Attention``.
        is_causal: As of ``Attention``.
        dropout_p: Of the weights.
    """
    return _attended(q, k, v, attn_mask, key_padding_mask, is_causal, dropout_p)


def _attended(  # noqa: PLR0913  torch's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> Tensor:
    is_plain = attn_mask is None and padding is None
    mask = None if is_plain else _merged(attn_mask, padding, is_causal, q, k)
    given: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal and is_plain}
    return F.scaled_dot_product_attention(q, k, v, **given, dropout_p=dropout_p)


@_one_call
def attention_weights(
    q: Tensor,
    k: Tensor,
    is_averaged: bool,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Return the weights of attention, shape ``(n, rows, columns)``, or of each head.

    Args:
        q: Queries, shape ``(n, heads, rows, features)``.
        k: Keys, shape ``(n, heads, columns, features)``.
        is_averaged: Over heads.
        attn_mask: As of ``Attention``.
        key_padding_mask: As of ``Attention``.
        is_causal: As of ``Attention``.
    """
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    mask = _merged(attn_mask, key_padding_mask, is_causal, q, k)
    if mask is not None:
        is_bool = mask.dtype is torch.bool
        scores = scores.masked_fill(~mask, -torch.inf) if is_bool else scores + mask
    weights = scores.softmax(-1)
    return weights.mean(1) if is_averaged else weights


def _merged(
    mask: Tensor | None, padding: Tensor | None, is_causal: bool, q: Tensor, k: Tensor
) -> Tensor | None:
    """Return all masks as one of ``F.scaled_dot_product_attention``: True where a column is seen."""
    found = []
    if mask is not None:
        found.append(mask.unflatten(0, (-1, q.shape[1])) if mask.ndim == 3 else mask)
    elif is_causal:
        found.append(torch.ones_like(q[0, 0] @ k[0, 0].T, dtype=torch.bool).triu(1))
    if padding is not None:
        found.append(padding[:, None, None])
    if not found:
        return None
    if all(x.dtype is torch.bool for x in found):
        return ~(found[0] if len(found) == 1 else found[0] | found[1])
    added = [
        torch.zeros(x.shape, dtype=q.dtype, device=x.device).masked_fill(x, -torch.inf)
        if x.dtype is torch.bool
        else x
        for x in found
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(*weight.shape[::-1], bias=bias is not None, device="meta")
    layer.weight = _parameter(weight)
    if bias is not None:
        layer.bias = _parameter(bias)
    return layer


def _parameter(x: Tensor) -> nn.Parameter:
    """Return a parameter; one that is there already, which others may share, as it is."""
    if isinstance(x, nn.Parameter):
        return x
    return nn.Parameter(x.detach().clone(), x.requires_grad)


class EncoderLayer(nn.Module):
    """What ``nn.TransformerEncoderLayer`` computes, layer by layer.

    Args:
        source: Whose layers to take; its attention is spelled.
    """

    def __init__(self, source: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.norm_first = source.norm_first
        self.self_attn: nn.Module = source.self_attn
        self.batch_first: bool = getattr(self.self_attn, "batch_first", True)
        self.linear1, self.linear2 = source.linear1, source.linear2
        self.norm1, self.norm2 = source.norm1, source.norm2
        self.dropout, self.dropout1 = source.dropout, source.dropout1
        self.dropout2 = source.dropout2
        known: dict[object, type[nn.Module]] = {F.relu: nn.ReLU, F.gelu: nn.GELU}
        activation: Any = source.activation
        self.activation = known[activation]() if activation in known else activation

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        as_batch_first: bool = False,
    ) -> Tensor:
        """Return tokens as those that came: see torch's, and masks and ``as_batch_first`` of ``Attention``."""
        as_it_is = self.batch_first or as_batch_first is True
        x = src if as_it_is else src.transpose(0, 1)
        masks = src_mask, src_key_padding_mask, is_causal
        if self.norm_first:
            x = x + self._attended(self.norm1(x), masks)
            x = x + self._perceptron(self.norm2(x))
        else:
            x = self.norm1(x + self._attended(x, masks))
            x = self.norm2(x + self._perceptron(x))
        return x if as_it_is else x.transpose(0, 1)

    def _attended(self, x: Tensor, masks: tuple[Tensor | None, Tensor | None, bool]) -> Tensor:
        mask, padding, is_causal = masks
        y, _ = self.self_attn(
            x, x, x, padding, False, mask, is_causal=is_causal, as_batch_first=True
        )
        return self.dropout1(y)

    def _perceptron(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class Encoder(nn.Module):
    """What ``nn.TransformerEncoder`` computes, layer by layer.

    Args:
        source: Whose layers to take.
    """

    def __init__(self, source: nn.TransformerEncoder) -> None:
        super().__init__()
        self.layers, self.norm = source.layers, source.norm
        self.batch_first = all(getattr(layer, "batch_first", True) for layer in self.layers)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return tokens as those that came: see torch's, and the masks of ``Attention``."""
        x = src if self.batch_first else src.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, mask, src_key_padding_mask, bool(is_causal), as_batch_first=True)
        x = x if self.norm is None else self.norm(x)
        return x if self.batch_first else x.transpose(0, 1)
