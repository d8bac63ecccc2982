"""What each function keeps that ``saving`` knows: ``HANDLERS``.

A handler is called with a scope and a call, and returns what the function returns, or
``NotImplemented`` where torch's own is to run.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import NotImplementedType
from typing import Any

import torch
from torch import Tensor

from fixedpoint_kernels._torch_private.tensors import attention_of_functions
from fixedpoint_kernels.few_bit import functional as few_bit_functional
from fixedpoint_kernels.few_bit.activations import ENTRIES
from fixedpoint_kernels.forward_save import exact, layers, maps, norms, recompute
from fixedpoint_kernels.forward_save.in_place import overwrite
from fixedpoint_kernels.forward_save.scope import paused
from fixedpoint_kernels.forward_save.settings import Division, FewBit, bit_count

__all__ = ["HANDLERS", "Keeper", "keeps"]

FINEST = 8  # bits; a softmax has them, for two bits of a row's range would drown small shares

Function = Callable[..., Tensor]
Arguments = Sequence[Any]
Options = Mapping[str, Any]
Made = Tensor | tuple[Tensor, Tensor | None] | NotImplementedType


class Keeper:
    """How tensors are kept in a scope.

    Args:
        few_bit: Of activation functions; None: as they are.
        division: Of the rest; None: as it is.
        noise: Of the conversion.
    """

    few_bit: FewBit | None
    division: Division | None
    noise: Tensor

    def seen(self) -> AbstractContextManager[object]:
        """Return what makes functions keep less that a function calls by itself."""
        raise NotImplementedError

    def pack(
        self, x: Tensor, dtype: torch.dtype | None = None, *, times: int = 1, most: int = 3
    ) -> maps.Packed:
        """Return ``x`` in ``times`` the bits, or as it is: a parameter, or where that takes no less.

        A plane has no more than ``most`` dimensions.
        """
        settings = self.division
        finer = settings and replace(settings, bits=min(FINEST, times * settings.bits), rows=None)
        return self._pack(x, max(1, min(x.dim() - 2, most)), finer, dtype)

    def pack_shares(self, x: Tensor) -> maps.Packed:
        """Return what a softmax gave in 8 bits, or as it is.

        Each row has a range of its own, so that NaN of one, masked later, are not in others.
        """
        return self._pack(x, 1, self.division and of_shares(self.division))

    def _pack(
        self, x: Tensor, spatial: int, settings: Division | None, dtype: torch.dtype | None = None
    ) -> maps.Packed:
        if settings is None or x.dim() == 0 or maps.is_parameter(x):
            return maps.whole(x)
        if not maps.is_smaller(x, spatial, settings):
            return maps.whole(x)
        return maps.pack(x, spatial, settings, self.noise, dtype, by=self)

    def pack_rows(self, x: Tensor, dtype: torch.dtype | None = None) -> maps.Packed:
        """Return the input of a linear layer as ``pack`` does, or some of its rows."""
        settings = self.division
        if settings is None or settings.rows is None or maps.is_parameter(x) or x.dim() == 0:
            return self.pack(x, dtype)
        return maps.pack(x, 1, settings, self.noise, dtype, by=self)

    def pack_operand(self, x: Tensor) -> maps.Packed:
        """Return ``x`` in twice the bits: its noise goes on into the gradients of earlier layers.

        Constants, which many may share, stay as they are.
        """
        return self.pack(x, times=2) if x.requires_grad else maps.whole(x)


def of_shares(division: Division) -> Division:
    """Return how the values of a softmax are kept."""
    return replace(division, method="fixed", bits=FINEST, rows=None)


def keeps(function: str, few_bit: FewBit | None, division: Division | None) -> str:
    """Return what a function keeps in a scope, ``""`` if all that it keeps elsewhere."""
    name = function.removesuffix("_")
    if name in ENTRIES:
        if ENTRIES[name].exact:
            return bit_count(1) + " an element" if division else ""
        return f"{bit_count(few_bit.bits)} an element" if few_bit else ""
    if division is None or function not in HANDLERS:
        return ""
    if function == "dropout":
        return "1 bit an element"
    if function == "softmax":
        return str(of_shares(division)).replace("a plane", "a row")
    times = 1 if function in FOR_WEIGHTS else 2
    finer = replace(division, bits=min(FINEST, times * division.bits))
    if function in ("linear", "addmm"):
        return finer.of_linear
    return f"{finer}; computed again" if function in AGAIN else str(finer)


def _bound(names: str, args: Arguments, kwargs: Options) -> dict[str, Any] | None:
    """Return arguments by name, in torch's order; None: there are others."""
    order = names.split()
    if len(args) > len(order) or not set(kwargs) <= set(order):
        return None
    return dict(zip(order, args, strict=False)) | dict(kwargs)


def _activation(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    name = func.__name__.removesuffix("_")
    entry, kwargs = ENTRIES[name], dict(kwargs)
    x = args[0] if args else kwargs.pop("input", None)
    wanted = scope.division if entry.exact else scope.few_bit
    if wanted is None or not _is_trained(x):
        return NotImplemented
    try:
        given = entry.signature.bind(*args[1:], **kwargs)
    except TypeError:  # an option that no table is for
        return NotImplemented
    given.apply_defaults()
    values = dict(given.arguments)
    is_inplace = values.pop("inplace", False) or func.__name__.endswith("_")
    settings = scope.few_bit or FewBit(1)
    parameters = few_bit_functional.numbers(values.values())
    bits = 1 if entry.exact else settings.bits
    if not maps.is_less_in_code(x, bits):
        return NotImplemented
    if name == "hardtanh" and values["min_val"] > values["max_val"]:  # torch says what is wrong
        return NotImplemented
    out = few_bit_functional.run(name, x, parameters, bits, settings.weight)
    return overwrite(x, out) if is_inplace else out


def _is_trained(*tensors: object) -> bool:
    """Whether all are floating tensors, neither sparse nor nested, and one needs a gradient."""
    found = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    is_floating = len(found) == len(tensors) and any(t.requires_grad for t in found)
    return is_floating and _are_dense(found)


def _are_dense(values: Sequence[object]) -> bool:
    """Whether tensors among ``values`` are neither sparse nor nested."""
    return all(maps.is_dense(t) for t in values if isinstance(t, Tensor))


def _product(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    if scope.division is None or kwargs or len(args) != 2 or not _is_trained(*args):
        return NotImplemented
    a, b = args
    if min(a.dim(), b.dim()) == 0:
        return NotImplemented
    return recompute.product(func, a, b, scope.pack_operand)


def _square(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    if scope.division is None or kwargs or not args or not _is_trained(args[0]):
        return NotImplemented
    x, *exponent = args
    if exponent and not (type(exponent[0]) in (int, float) and exponent == [2]):
        return NotImplemented
    return recompute.product(lambda a, b: func(a, *exponent), x, x, scope.pack_operand)


def _matmul(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    if scope.division is None or kwargs or len(args) != 2 or not _is_trained(*args):
        return NotImplemented
    if min(x.dim() for x in args) < 2:
        return NotImplemented
    a, b = args
    return recompute.matmul(func, a, b, scope.pack_operand)


def _baddbmm(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    """Add a product to a constant, as attention does to its mask."""
    if scope.division is None or kwargs or len(args) != 3 or not _is_trained(*args[1:]):
        return NotImplemented
    constant, a, b = args
    if constant.requires_grad:
        return NotImplemented
    return recompute.matmul(lambda a, b: func(constant, a, b), a, b, scope.pack_operand)


def _attention(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    """Let the functions keep less that ``F.multi_head_attention_forward`` calls."""
    if scope.division is None:
        return NotImplemented
    with scope.seen():
        return attention_of_functions(*args, **kwargs)


def _softmax(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    if scope.division is None or not args or not _is_trained(args[0]):
        return NotImplemented
    x, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    if dim not in (-1, x.dim() - 1):
        return NotImplemented
    return recompute.softmax(lambda x: func(x, *rest, **kwargs), x, scope.pack_shares)


def _again(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    """Keep all operands, and compute the function again."""
    if scope.division is None or kwargs.get("training") is False:
        return NotImplemented
    operands = [*args, *kwargs.values()]
    at = [i for i, value in enumerate(operands) if isinstance(value, Tensor)]
    if not any(operands[i].requires_grad for i in at) or not _are_dense(operands):
        return NotImplemented

    tensors, count, names = [operands[i] for i in at], len(args), [*kwargs]
    for i in at:
        operands[i] = None  # what runs again must not hold them

    def run(*tensors: Tensor) -> Tensor:
        given = list(operands)
        for i, tensor in zip(at, tensors, strict=True):
            given[i] = tensor
        with paused():
            return func(*given[:count], **dict(zip(names, given[count:], strict=True)))

    named = _bound(AGAIN[func.__name__], args, kwargs) or {}
    is_random = float(named.get("dropout_p") or 0) > 0
    mask = named.get("attn_mask")  # it may have infinities

    def pack(x: Tensor) -> maps.Packed:
        return maps.whole(x) if x is mask else scope.pack_operand(x)

    return recompute.again(run, tensors, pack, is_random=is_random)


def _linear(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    given = _bound("input weight bias", args, kwargs)
    if scope.division is None or given is None or not _is_trained(given["input"], given["weight"]):
        return NotImplemented
    weight, bias = given["weight"], given.get("bias")
    if weight.dim() != 2 or (bias is not None and bias.dim() > 1):
        return NotImplemented
    return layers.linear(given["input"], weight, bias, scope.pack_rows)


def _addmm(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    if scope.division is None or kwargs or len(args) != 3:
        return NotImplemented
    bias, x, weight = args
    if bias.dim() != 1 or not _is_trained(x, weight):
        return NotImplemented
    return layers.linear(x, weight.t(), bias, scope.pack_rows)


def _convolution(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    given = _bound("input weight bias stride padding dilation groups", args, kwargs)
    if scope.division is None or given is None or not _is_trained(given["input"], given["weight"]):
        return NotImplemented
    if isinstance(given.get("padding", 0), str):
        return NotImplemented
    return layers.convolution(**given, pack=scope.pack)


def _dropout(scope: Keeper, func: Function, args: Arguments, kwargs: Options) -> Made:
    given = _bound("input p training inplace", args, kwargs)
    if scope.division is None or given is None or not _is_trained(given.get("input")):
        return NotImplemented
    x, p = given["input"], given.get("p", 0.5)
    if not given.get("training", True) or not 0 < p < 1 or not maps.is_less_in_code(x, 1):
        return NotImplemented
    out = exact.dropout(x, p)
    return overwrite(x, out) if given.get("inplace") else out


def _norm(
    names: str,
    run: Function,
    scope: Keeper,
    func: Function,
    args: Arguments,
    kwargs: Options,
) -> Made:
    given = _bound(names, args, kwargs)
    if scope.division is None or given is None:
        return NotImplemented
    x, weight = given["input"], given.get("weight")
    if not _is_trained(x, *([] if weight is None else [weight])) or maps.is_parameter(x):
        return NotImplemented
    most = len(given.get("normalized_shape", range(3)))  # each row has statistics of its own
    return run(**given, pack=partial(scope.pack, most=most))


FOR_WEIGHTS = {
    "conv1d",
    "conv2d",
    "conv3d",
    "linear",
    "addmm",
}  # only a weight's gradient has noise
FOR_WEIGHTS |= {"layer_norm", "rms_norm", "group_norm", "batch_norm"}  # and little of the input's
AGAIN = {  # names of their arguments
    "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal scale enable_gqa",
    "glu": "input dim",
}
HANDLERS: dict[str, Callable[[Keeper, Function, Arguments, Options], Made]] = {
    **dict.fromkeys(ENTRIES, _activation),
    **dict.fromkeys((name + "_" for name in ENTRIES), _activation),
    **dict.fromkeys(("mul", "multiply"), _product),
    **dict.fromkeys(("square", "pow"), _square),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(AGAIN, _again),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "baddbmm": _baddbmm,
    "multi_head_attention_forward": _attention,
    "softmax": _softmax,
    "linear": _linear,
    "addmm": _addmm,
    "dropout": _dropout,
    "layer_norm": partial(_norm, "input normalized_shape weight bias eps", norms.layer_norm),
    "rms_norm": partial(_norm, "input normalized_shape weight eps", norms.rms_norm),
    "group_norm": partial(_norm, "input num_groups weight bias eps", norms.group_norm),
    "batch_norm": partial(
        _norm,
        "input running_mean running_var weight bias training momentum eps",
        norms.batch_norm,
    ),
}
