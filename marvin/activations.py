"""Quantised activations: layers round their inputs and outputs to their own format."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd
from torch.utils.hooks import RemovableHandle

from fixedpoint_kernels import BlockFloat, FixedPoint, quantize_block, quantize_with_mask
from fixedpoint_kernels.rounding import Rounding
from marvin.base import QuantizingOptimizer
from marvin.layers import is_layer
from marvin.policy import ActivationFormats
from marvin.rounding import Format, round_one

__all__ = ["QuantizedActivations", "fake_quantize", "quantize_activations"]

StraightThrough = Literal["clip", "identity"]
_FLOATS = torch.float32, torch.bfloat16, torch.float16
# without parameters of their own, these take the format of the layer before them
_NORMS = _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm
_POOLS = _AvgPoolNd, _AdaptiveAvgPoolNd
_FOLLOWERS = *_NORMS, *_POOLS
_Back = tuple[Format, dict[str, Any]] | None  # how to round the gradient that comes back


class _Tally:
    """Counts saturated values; a device adds to its own number, so that nothing waits for it."""

    def __init__(self) -> None:
        self.clipped: Tensor | int = 0
        self.total = 0

    def add(self, clipped: Tensor | int, total: int) -> None:
        self.clipped = self.clipped + clipped
        self.total += total

    def share(self) -> float:
        return float(self.clipped) / self.total if self.total else 0.0


class _FakeQuantize(torch.autograd.Function):
    """Rounds forward; backward passes the gradient where the value was not clamped."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fmt: FixedPoint,
        options: dict[str, Any],
        tally: _Tally | None,
        back: _Back,
    ) -> Tensor:
        y, inside = quantize_with_mask(x, fmt, **options)
        if _all(inside):
            inside = None
        ctx.save_for_backward(inside)
        ctx.back = back
        if tally is not None:
            clipped = 0 if inside is None else x.numel() - inside.count_nonzero()
            tally.add(clipped, x.numel())
        return y

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        grad = _returned(grad, ctx.back)
        if inside is not None:
            grad = torch.where(inside, grad, grad.new_zeros(()))  # a tenth of the product's time
        return grad, None, None, None, None


class _RoundedIdentity(torch.autograd.Function):
    """Rounds forward; backward passes the gradient everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: Format, options: dict[str, Any], back: _Back) -> Tensor:
        ctx.back = back
        return round_one(x, fmt, **options)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        return _returned(grad, ctx.back), None, None, None


def fake_quantize(
    x: Tensor,
    fmt: FixedPoint,
    *,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    ste: StraightThrough = "clip",
) -> Tensor:
    """Round as ``fixedpoint_kernels.quantize`` does, with a straight-through gradient.

    Args:
        x: Values, any shape, float32, bfloat16 or float16.
        fmt: The format.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed: Of the noise.
        stream: Of the noise.
        ste: The gradient is that of the identity, and 0 where the value was clamped
            (``"clip"``); or that of the identity everywhere (``"identity"``), which lets
            saturated values run away.

    Returns:
        Shape and dtype of ``x``. The derivative of the gradient is not defined: differentiating
        twice raises.

    Raises:
        ValueError: ``ste`` is unknown.
    """
    if ste not in get_args(StraightThrough):
        raise ValueError(f"ste must be one of {get_args(StraightThrough)}, got {ste!r}")
    options = {"rounding": rounding, "seed": seed, "stream": stream}
    if ste == "identity":
        return _RoundedIdentity.apply(x, fmt, options, None)  # pyright: ignore[reportReturnType]
    return _FakeQuantize.apply(x, fmt, options, None, None)  # pyright: ignore[reportReturnType]


class QuantizedActivations:
    """A model's quantised activations; made by ``quantize_activations``."""

    def __init__(
        self, optimizer: QuantizingOptimizer, ste: StraightThrough, eval_rounding: Rounding
    ) -> None:
        self._optimizer = optimizer
        self._observations = optimizer.policy.observations
        self._ste = ste
        self._eval_rounding: Rounding = eval_rounding
        self._tallies: dict[str, _Tally] = {}
        self._hooks: list[RemovableHandle] = []

    def remove(self) -> None:
        """Undo: the model's activations are float again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def layers(self) -> list[str]:
        """Return the names of the modules that round their activations."""
        return list(self._tallies)

    def saturation(self) -> dict[str, float]:
        """Return the share of values each module clamped in training since the last call.

        Inputs and outputs count together; ``ste="identity"`` does not count. Above a few per
        cent, use more ``buffer_bits``.
        """
        shares = {name: tally.share() for name, tally in self._tallies.items()}
        self._tallies = {name: _Tally() for name in self._tallies}
        return shares

    def attach(self, name: str, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Round inputs and outputs of ``module`` as the first of ``parameters`` with a format."""
        self._tallies[name] = _Tally()

        def round_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            fmt = self._formats(parameters).inputs
            if self._observations is not None and module.training and torch.is_grad_enabled():
                if name == next(iter(self._tallies)):
                    self._observations.count(inputs)
                layer = self._optimizer.observed(parameters)
                if layer is not None:
                    return tuple(self._observe(name, layer, x, fmt) for x in inputs)
            return tuple(self._round(name, module, x, fmt) for x in inputs)

        def round_outputs(module: nn.Module, _inputs: Any, output: Any) -> Any:
            formats = self._formats(parameters)
            rules = formats.outputs, formats.gradients
            if isinstance(output, tuple):
                return tuple(self._round(name, module, x, *rules) for x in output)
            return self._round(name, module, output, *rules)

        self._hooks.append(module.register_forward_pre_hook(_uncompiled(round_inputs)))
        self._hooks.append(module.register_forward_hook(_uncompiled(round_outputs)))

    def attach_input(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        """Round what comes into the model, each sample for itself."""

        def round_samples(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            fmt = self._formats(parameters).outputs
            return tuple(self._round_samples(module, x, fmt) for x in inputs)

        self._hooks.append(model.register_forward_pre_hook(_uncompiled(round_samples)))

    def _formats(self, parameters: Sequence[Tensor]) -> ActivationFormats:
        found = map(self._optimizer.activation_formats, parameters)
        return next((formats for formats in found if formats is not None), ActivationFormats())

    def _round(
        self, name: str, module: nn.Module, x: Any, fmt: Format | None, back: Format | None = None
    ) -> Any:
        if fmt is None or not isinstance(x, Tensor) or x.dtype not in _FLOATS:
            return x
        if getattr(x, "_fixed_point", None) == (fmt, x._version):
            return x  # the layer before has the same format: rounding again changes nothing
        rule = None if back is None else (back, self._options(module))
        y = self._apply(name, x, fmt, self._options(module), rule)
        y._fixed_point = (fmt, y._version)  # pyright: ignore[reportAttributeAccessIssue]
        return y

    def _observe(self, name: str, layer: int, x: Any, fmt: Format | None) -> Any:
        """Round what a layer sees, and show it and its gradient to the policy."""
        if not isinstance(x, Tensor) or x.dtype not in _FLOATS or not x.numel():
            return x
        assert self._observations is not None
        assert fmt is None or isinstance(fmt, FixedPoint)
        clip = self._ste == "clip"
        y, clamped = self._observations.round(layer, x, fmt, clip=clip)
        if clip and fmt is not None and x.requires_grad:
            self._tallies[name].add(clamped, x.numel())
        return y

    def _round_samples(self, module: nn.Module, x: Any, fmt: Format | None) -> Any:
        if not isinstance(x, Tensor) or x.dtype not in _FLOATS or not isinstance(fmt, BlockFloat):
            return x
        return quantize_block(x.detach(), fmt, per_sample=True, **self._options(module))

    def _options(self, module: nn.Module) -> dict[str, Any]:
        if not module.training:
            return {"rounding": self._eval_rounding}
        if self._optimizer.policy.activation_rounding == "nearest":
            return {"rounding": "nearest"}
        seed, stream = self._optimizer.activation_noise()
        return {"rounding": "stochastic", "seed": seed, "stream": stream}

    def _apply(
        self, name: str, x: Tensor, fmt: Format, options: dict[str, Any], back: _Back
    ) -> Any:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return round_one(x.detach(), fmt, **options)
        if self._ste == "identity" or not isinstance(fmt, FixedPoint):
            return _RoundedIdentity.apply(x, fmt, options, back)
        return _FakeQuantize.apply(x, fmt, options, self._tallies[name], back)


def _uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a hook out of torch.compile, which cannot look into the kernels."""
    disabled: Any = torch.compiler.disable(hook)
    return disabled


def quantize_activations(
    model: nn.Module,
    optimizer: QuantizingOptimizer,
    *,
    ste: StraightThrough = "clip",
    eval_rounding: Rounding = "nearest",
) -> QuantizedActivations:
    """Make layers round their inputs and outputs to their own, current format.

    That holds for every module that owns a parameter of ``optimizer``, and for normalisation and
    average pooling without one, which take the format of the module before them. In training
    mode rounding is stochastic, with noise of the optimizer's seed and a count of forward passes
    that its state keeps, or as the policy has it; in eval mode it is ``eval_rounding``. What a layer before has already
    rounded to the same format is not rounded again.

    Args:
        model: Changed by forward hooks alone: weights, names and ``state_dict`` stay.
        optimizer: Whose formats to use.
        ste: Straight-through gradient: see ``fake_quantize``.
        eval_rounding: ``"nearest"``, or ``"stochastic"`` (always the same noise).

    Returns:
        A handle: ``remove()`` undoes it, ``saturation()`` tells how much was clamped.

    Raises:
        TypeError: ``optimizer`` has no formats.
        ValueError: No module of ``model`` has a parameter of ``optimizer``.

    Source:
        MARViN, section 3.2; that inputs and outputs are rounded comes from its authors' code.
        Differs: ``"clip"``, where theirs passes the gradient of saturated values too.
    """
    if ste not in get_args(StraightThrough) or eval_rounding not in get_args(Rounding):
        raise ValueError(
            f"ste must be one of {get_args(StraightThrough)} and eval_rounding one of "
            f"{get_args(Rounding)}, got {ste!r} and {eval_rounding!r}"
        )
    if not isinstance(optimizer, QuantizingOptimizer):
        raise TypeError(
            "quantize_activations needs an optimizer with formats, marvin.MSGD or "
            f"marvin.Quantized(optimizer, policy), got {type(optimizer).__name__}"
        )
    handle = QuantizedActivations(optimizer, ste, eval_rounding)
    before: list[Tensor] = []
    policy = optimizer.policy
    if policy.quantizes_input:
        handle.attach_input(model, [p for p in model.parameters() if p in optimizer])
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p in optimizer]
        candidates = own + before if isinstance(module, _FOLLOWERS) else own
        is_left = isinstance(module, _NORMS) and not policy.quantizes_norms
        is_left |= isinstance(module, _POOLS) and not policy.quantizes_pools
        if candidates and not is_left:
            handle.attach(name, module, candidates)
        before = [p for p in own if is_layer(p)] or before
    if not handle.layers():
        raise ValueError("no module of the model has a parameter of this optimizer")
    return handle


def _all(inside: Tensor) -> bool:
    """Say whether all are inside, where that is known without waiting for a device."""
    return inside.is_cpu and (not inside.numel() or bool(inside.view(torch.uint8).min()))


def _returned(grad: Tensor, back: _Back) -> Tensor:
    """Round a gradient on its way back, where the policy wants it."""
    if back is None:
        return grad
    fmt, options = back
    return round_one(grad, fmt, **options)
