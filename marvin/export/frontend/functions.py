"""Functions and methods as the layers of the same meaning, so that each is translated in one place."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["layer_of"]


_Sides = int | tuple[int, ...]


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> nn.Module | None:
    return None if training and p else nn.Identity()


def _stochastic_depth(p: float, mode: str, training: bool = True) -> nn.Module | None:
    return _dropout(p, training)


def _drop_block(
    p: float, block_size: int, inplace: bool = False, eps: float = 1e-6, training: bool = True
) -> nn.Module | None:
    return _dropout(p, training)


def _softmax(
    dim: int | None = None, _stacklevel: int = 3, dtype: object = None
) -> nn.Module | None:
    return nn.Softmax(dim) if dtype is None else None


def _clamp(min: object = None, max: object = None) -> nn.Module | None:
    ends = [-_FAR if min is None else min, _FAR if max is None else max]
    numbers = [float(end) for end in ends if isinstance(end, int | float)]
    return (
        nn.Hardtanh(numbers[0], numbers[1])
        if len(numbers) == 2 and numbers[0] < numbers[1]
        else None
    )


def _max_pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def make(
        kernel_size: _Sides,
        stride: _Sides | None = None,
        padding: _Sides = 0,
        dilation: _Sides = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> nn.Module:
        return kind(kernel_size, stride or None, padding, dilation, return_indices, ceil_mode)

    return make


def _adaptive_max_pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def make(output_size: _Sides, return_indices: bool = False) -> nn.Module:
        return kind(output_size, return_indices)

    return make


def _avg_pool(kind: type[nn.Module]) -> Callable[..., nn.Module]:
    def make(
        kernel_size: _Sides,
        stride: _Sides | None = None,
        padding: _Sides = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> nn.Module:
        rest = () if divisor_override is None else (divisor_override,)
        return kind(kernel_size, stride or None, padding, ceil_mode, count_include_pad, *rest)

    return make


def _pad(
    pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> nn.Module | None:
    kind = {2: nn.ConstantPad1d, 4: nn.ConstantPad2d, 6: nn.ConstantPad3d}.get(len(pad))
    return kind((*pad,), value or 0) if kind and mode == "constant" else None


_FAR = 3e38  # of a bound that is not there


def _relu_in_place() -> nn.Module:
    return nn.ReLU(inplace=True)


def _to(*args: object, **kwargs: object) -> nn.Module | None:
    """Return what does nothing where a value becomes what it is."""
    is_known = all(
        own in (torch.float32, "cpu", torch.device("cpu")) for own in (*args, *kwargs.values())
    )
    return nn.Identity() if is_known else None


_LAYERS: list[tuple[Sequence[object], Callable[..., nn.Module | None]]] = [
    ((torch.relu, F.relu, "relu"), lambda inplace=False: nn.ReLU(inplace)),
    ((torch.relu_, F.relu_, "relu_"), _relu_in_place),
    ((F.relu6,), lambda inplace=False: nn.ReLU6(inplace)),
    ((F.hardtanh,), lambda min_val=-1.0, max_val=1.0, inplace=False: nn.Hardtanh(min_val, max_val, inplace)),
    ((torch.clamp, torch.clip, "clamp", "clip"), _clamp),
    ((F.leaky_relu,), lambda negative_slope=0.01, inplace=False: nn.LeakyReLU(negative_slope, inplace)),
    ((F.elu,), lambda alpha=1.0, inplace=False: nn.ELU(alpha, inplace)),
    ((F.hardswish,), lambda inplace=False: nn.Hardswish(inplace)),
    ((F.hardsigmoid,), lambda inplace=False: nn.Hardsigmoid(inplace)),
    ((torch.sigmoid, F.sigmoid, "sigmoid"), nn.Sigmoid),
    ((torch.tanh, F.tanh, "tanh"), nn.Tanh),
    ((F.silu,), lambda inplace=False: nn.SiLU(inplace)),
    ((F.mish,), lambda inplace=False: nn.Mish(inplace)),
    ((F.gelu,), lambda approximate="none": nn.GELU(approximate)),
    ((torch.softmax, F.softmax, "softmax"), _softmax),
    ((F.softplus,), lambda beta=1.0, threshold=20.0: nn.Softplus(beta, threshold)),
    ((F.max_pool2d, torch.max_pool2d), _max_pool(nn.MaxPool2d)),
    ((F.max_pool1d, torch.max_pool1d), _max_pool(nn.MaxPool1d)),
    ((F.avg_pool2d,), _avg_pool(nn.AvgPool2d)),
    ((F.avg_pool1d, torch.avg_pool1d), _avg_pool(nn.AvgPool1d)),
    ((F.adaptive_avg_pool2d,), nn.AdaptiveAvgPool2d),
    ((F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d), nn.AdaptiveAvgPool1d),
    ((F.adaptive_max_pool2d,), _adaptive_max_pool(nn.AdaptiveMaxPool2d)),
    ((F.adaptive_max_pool1d,), _adaptive_max_pool(nn.AdaptiveMaxPool1d)),
    ((F.pad,), _pad),
    ((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout), _dropout),
    (("detach", "float", "cpu", torch.detach), nn.Identity),
    (("to",), _to),
]  # fmt: skip
_BY_TARGET = {target: make for targets, make in _LAYERS for target in targets}
# of torchvision, which need not be installed
_BY_NAME = {
    "stochastic_depth": _stochastic_depth,
    "drop_block2d": _drop_block,
    "drop_block3d": _drop_block,
}


def layer_of(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> nn.Module | None:
    """Return the layer that does what a call does; None where there is none.

    Args:
        target: Function, or name of a method.
        args: Behind the tensor that it takes; plain values.
        kwargs: By name.
    """
    make = _BY_TARGET.get(target) or _BY_NAME.get(getattr(target, "__name__", ""))
    if make is None:
        return None
    try:
        inspect.signature(make).bind(*args, **kwargs)
        return make(*args, **kwargs)
    except (TypeError, ValueError):
        return None
