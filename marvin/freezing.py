"""A plain module for inference: what training computes in eval mode, in torch's operators wherever these are traced."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import StateDict

from fixedpoint_kernels import BlockFloat, FixedPoint, quantize
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.modes import is_watched
from fixedpoint_kernels._torch_private.modules import (
    buffer_of,
    hook_wrapper,
    hooks_of,
    remove_hooks,
)
from fixedpoint_kernels.block import block_fl
from fixedpoint_kernels.forward_save.conversion import revert
from fixedpoint_kernels.forward_save.swap import is_converted
from fixedpoint_kernels.rounding.reference import float_bounds, power
from marvin.attention import Attention, Encoder, EncoderLayer
from marvin.channels import ChannelFormat
from marvin.compiled import is_traced
from marvin.conversion import prepared
from marvin.hooks import Saving, Unscripted, give_place, rounders_of, take_place
from marvin.layers import computed_weights
from marvin.model_formats import CarriedFormats, ModuleFormats, decode_formats
from marvin.nested import mapped, mapped_output
from marvin.refused import check_model, check_unsharded, check_values
from marvin.rounder import BUFFER, FLOATS, as_it_is, formats_of
from marvin.rounding import Format
from marvin.straight_through import is_differentiated

__all__ = ["FrozenRounding", "freeze", "frozen_formats", "nearest_codes", "saved_classes", "thaw"]

_NO_GRADIENT = (
    "a frozen model rounds, and the gradient of rounding is 0: none passes through its layers; where "
    "gradients are wanted, take the model that was frozen, in eval mode, whose gradients are straight-through"
)


@left_uncompiled
@torch.inference_mode(False)  # or the copy could not be trained, nor load a state
def freeze(model: nn.Module) -> nn.Module:
    """Return a copy of a model for inference, in eval mode, tied to no optimizer.

    Its modules, weights and state are those of ``model``, but for what ``forward_save`` made of
    them, which goes: nothing is kept for backward. The outputs equal those of ``model`` in eval mode
    bit for bit; ``docs/models.md`` has one exception, from some 12 bits on.

    The copy rounds activations in torch's own operators, or, where nobody traces or differentiates,
    in one pass with the same bits. It works under ``torch.inference_mode``, ``torch.export``,
    ``torch.jit.trace``, ``torch.compile`` and ``torch.save``. Its gradients are those of rounding, 0:
    take them of ``model`` itself, in eval mode. The state of any model of this kind can be loaded
    into it.

    Args:
        model: With ``marvin.quantize_activations`` or ``marvin.prepare`` on it; stays as it is.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` carries no formats, is frozen already, rounds stochastically in eval mode, or
            ``marvin.store_codes`` keeps its weights as codes; or its parameters are sharded.

    Examples:
        >>> torch.export.export(marvin.freeze(model), (images,))
    """
    check_model(model, "freeze(model)")
    check_values(model)
    check_unsharded(model)
    computed = (vars(m).get(name) for m in model.modules() for name in computed_weights(m))
    memo = {
        id(w): w.detach().clone() for w in computed if isinstance(w, Tensor)
    }  # these have graphs
    frozen = copy.deepcopy(model, memo).eval().requires_grad_(False)
    if any(map(is_converted, frozen.modules())):
        revert(frozen)  # nothing goes backward
    found = [(m, rounder) for m in frozen.modules() for rounder in rounders_of(m)]
    if not found and any(True for m in frozen.modules() for _ in hooks_of(m, FrozenRounding)):
        raise ValueError(
            "a model to freeze must be one that trains, got one that is frozen already"
        )
    if not found:
        raise ValueError(
            "a model to freeze must carry formats, got one without: first call "
            "marvin.quantize_activations(model, optimizer), or marvin.prepare(model) and load a state; a float "
            "model is frozen by marvin.calibrate(model, batches)"
        )
    for module, rounder in found:
        formats = rounder.formats(module)
        module.register_forward_pre_hook(_Inputs(formats, rounder.arguments), with_kwargs=True)
        module.register_forward_hook(_Outputs(formats, ()))
        give_place(module, FrozenRounding)
        for hook in hooks_of(module, FrozenRounding):
            module.register_load_state_dict_pre_hook(_Loading(hook))
            hook.formats_of(module)
    return frozen


def frozen_formats(model: nn.Module) -> dict[str, ModuleFormats]:
    """Return the formats that a frozen model rounds by, by the name of the module.

    Raises:
        ValueError: ``model`` is not frozen, or rounds otherwise than its state says.
    """
    found = formats_of(model)
    for name, formats in found.items():
        hooks = hooks_of(model.get_submodule(name), FrozenRounding)
        if [type(hook) for hook in hooks] != [_Inputs, _Outputs]:
            raise ValueError(f"it must round by its formats, got no such hooks at {name!r}")
        if any(hook.formats != formats for hook in hooks):
            raise ValueError(f"it must round as its state says, got other formats at {name!r}")
    if not found:
        raise ValueError("it must carry formats, got none")
    for name, module in model.named_modules():
        if name not in found and any(hooks_of(module, FrozenRounding)):
            raise ValueError(
                f"it must have the formats it rounds by in its state, got none of {name!r}"
            )
    return found


def thaw(model: nn.Module) -> nn.Module:
    """Let a frozen model carry formats that can be written, in its own modules; others stay as they are.

    Raises:
        ValueError: It rounds otherwise than its state says.
    """
    if not any(any(hooks_of(module, FrozenRounding)) for module in model.modules()):
        return model
    carried = frozen_formats(model)
    prepared(model, include=[*carried])
    for module in model.modules():
        take_place(module, FrozenRounding)
        remove_hooks(module, _Loading)
    for name, formats in carried.items():
        module = model.get_submodule(name)
        rounders_of(module)[0].write(module, formats)
    return model


def saved_classes() -> list[type]:
    """Return the classes that ``torch.save`` of a frozen model writes, besides its modules'."""
    formats = ModuleFormats, FixedPoint, BlockFloat, ChannelFormat
    spelled = Attention, Encoder, EncoderLayer
    return [hook_wrapper(), _Inputs, _Outputs, _Loading, Saving, *formats, *spelled]


class FrozenRounding(Unscripted):
    """Rounds in torch's operators.

    Attributes:
        formats: By which it rounds where nobody can read the module's buffer: what is compiled, traced or exported.
        arguments: Names of the arguments of the module's ``forward``.
    """

    def __init__(self, formats: ModuleFormats, arguments: Any) -> None:
        self.formats, self.arguments = formats, arguments
        self._carried = CarriedFormats()

    def __getstate__(self) -> StateDict:
        return {"formats": self.formats, "arguments": self.arguments}

    def __setstate__(self, state: StateDict) -> None:
        self.__init__(**state)

    def formats_of(self, module: nn.Module) -> ModuleFormats:
        """Return the formats that a module's buffer holds.

        Raises:
            ValueError: It does not hold formats, or some that a frozen model does not round by.
        """
        if torch.compiler.is_compiling():
            return self.formats
        buffer = buffer_of(module, BUFFER)
        if buffer is None or not self._carried.are_of(buffer):
            if buffer is None or buffer.is_meta or is_traced() or is_watched():
                return self.formats
            self._read(buffer, module)
        return self._carried.formats

    def _read(self, buffer: Tensor, module: nn.Module) -> None:
        carried = CarriedFormats()
        carried.read(buffer, f"{type(module).__name__}.{BUFFER}")
        _check(carried.formats)
        if buffer is self._carried.buffer:  # not one that ``functional_call`` lends
            self.formats = carried.formats
        self._carried = carried


class _Inputs(FrozenRounding):
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Round; ``torch.ao`` registers the hook anew on what it makes of a module, without keywords."""
        formats = self.formats_of(module)
        if formats.inputs is None and formats.samples is None:
            return None

        def rounded(x: Tensor) -> Tensor:
            if x.dtype not in FLOATS:
                return as_it_is(module, x, formats.inputs)
            return _round(_round(x, formats.samples, per_sample=True), formats.inputs)

        own, named = mapped(rounded, args, kwargs or {}, self.arguments)
        return own if kwargs is None else (own, named)


class _Outputs(FrozenRounding):
    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        fmt = self.formats_of(module).outputs
        return output if fmt is None else mapped_output(lambda x: _round(x, fmt), output)


class _Loading:
    """Takes the formats of a state; where a state has none, those there are stay."""

    def __init__(self, rounding: FrozenRounding) -> None:
        self.rounding = rounding

    def __call__(self, module: nn.Module, state: StateDict, prefix: str, *rest: Any) -> None:
        errors: list[str] = rest[-1]
        loaded = state.setdefault(prefix + BUFFER, getattr(module, BUFFER).detach().clone())
        try:
            formats = decode_formats(loaded, prefix + BUFFER)
            _check(formats)
        except ValueError as error:
            errors.append(str(error))
        else:
            self.rounding.formats = formats


def _check(formats: ModuleFormats) -> None:
    if formats.rounds and formats.eval_rounding != "nearest":
        raise ValueError(
            "a model to freeze must round to nearest in eval mode, got "
            f"eval_rounding={formats.eval_rounding!r}"
        )


def _round(x: Tensor, fmt: Format | None, *, per_sample: bool = False) -> Tensor:
    """Round as ``fixedpoint_kernels.quantize`` and ``quantize_block`` do to nearest."""
    if fmt is None or x.dtype not in FLOATS:
        return x
    if isinstance(fmt, FixedPoint) and _is_seen_by_nobody(x):
        return quantize(x.detach(), fmt, rounding="nearest")
    if not is_traced() and is_differentiated(x):
        warnings.warn(_NO_GRADIENT, stacklevel=2)
    if isinstance(fmt, FixedPoint):
        return (nearest_codes(x, fmt) * fmt.lsb).to(x.dtype)
    assert isinstance(fmt, BlockFloat)
    fl = block_fl(x, fmt, per_sample=per_sample)
    codes = torch.round(x.float() * power(fl)) + 0.0
    return (codes.clamp(fmt.min_code, fmt.max_code) * power(-fl)).to(x.dtype)


def _is_seen_by_nobody(x: Tensor) -> bool:
    """Say whether a kernel may round ``x``: nothing traces, compiles, transforms or differentiates."""
    if is_traced() or is_watched():
        return False
    is_plain = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.layout is torch.strided
    return is_plain and not (x.requires_grad and torch.is_grad_enabled())


def nearest_codes(x: Tensor, fmt: FixedPoint) -> Tensor:
    """Return the codes of the nearest numbers, float32, in operators that can be traced."""
    low, high = float_bounds(fmt)
    return (torch.round(x.float() * fmt.scale) + 0.0).clamp(low, high)
