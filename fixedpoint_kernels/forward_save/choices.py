"""What becomes of a module: the classes that go before its own, or why nothing does."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fixedpoint_kernels._torch_private.modules import FORWARDS
from fixedpoint_kernels.forward_save import activations, calls, exact, layers, norms
from fixedpoint_kernels.forward_save.known import Known, known
from fixedpoint_kernels.forward_save.settings import Division, FewBit, bit_count

__all__ = ["Choice", "choose"]

DIVIDED = {
    nn.Conv1d: layers.Convolution,
    nn.Conv2d: layers.Convolution,
    nn.Conv3d: layers.Convolution,
    nn.ConvTranspose1d: layers.TransposedConvolution,
    nn.ConvTranspose2d: layers.TransposedConvolution,
    nn.ConvTranspose3d: layers.TransposedConvolution,
    nn.Linear: layers.Linear,
    nn.BatchNorm1d: norms.BatchNorm,
    nn.BatchNorm2d: norms.BatchNorm,
    nn.BatchNorm3d: norms.BatchNorm,
    nn.LayerNorm: norms.LayerNorm,
    nn.GroupNorm: norms.GroupNorm,
    nn.RMSNorm: norms.RMSNorm,
    nn.SyncBatchNorm: norms.BatchNorm,
}
EXACT = {
    nn.Dropout: (exact.Dropout, "1 bit an element"),
    nn.MaxPool1d: (exact.MaxPool, "8 bits an output"),
    nn.MaxPool2d: (exact.MaxPool, "8 bits an output"),
    nn.MaxPool3d: (exact.MaxPool, "8 bits an output"),
    nn.AvgPool1d: (exact.AvgPool, "no tensor"),
    nn.AvgPool2d: (exact.AvgPool, "no tensor"),
    nn.AvgPool3d: (exact.AvgPool, "no tensor"),
    nn.AdaptiveAvgPool1d: (exact.AdaptiveAvgPool, "no tensor"),
    nn.AdaptiveAvgPool2d: (exact.AdaptiveAvgPool, "no tensor"),
    nn.AdaptiveAvgPool3d: (exact.AdaptiveAvgPool, "no tensor"),
}
OWN = "its forward is its own, and keeps what the functions keep that it calls; see register"
NONE = "there is no small form of it"
SILENT = (  # keep no tensor
    nn.Flatten,
    nn.Identity,
    nn.ModuleDict,
    nn.ModuleList,
    nn.Sequential,
    nn.Unflatten,
)


class Choice(NamedTuple):
    """What becomes of a module.

    Args:
        bases: Classes to put before its own; none: it stays as it is.
        attributes: To set on it.
        keeps: What it then keeps.
        note: What else is different.
        reason: Why it stays as it is.
    """

    bases: tuple[type, ...] = ()
    attributes: dict[str, Any] | None = None
    keeps: str = ""
    note: str = ""
    reason: str = ""

    @property
    def is_listed(self) -> bool:
        """Whether it is a layer of the report, and not only a place where functions are called."""
        return bool(self.keeps or self.reason)


def choose(module: nn.Module, few_bit: FewBit | None, division: Division | None) -> Choice | None:
    """Return what becomes of one module; None: it is no matter of a report."""
    entry = known(module)
    if entry is not None and not _unfit(module):
        return _known(module, entry, few_bit, division)
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, few_bit, division)
    if activations.is_activation(module):
        return _activation(module, few_bit, division)
    return None if division is None else _layer(module, division)


def caller(module: nn.Module, few_bit: FewBit | None, division: Division | None) -> Choice | None:
    """Return what makes the functions keep less that a module calls; None: it calls none."""
    is_layer = type(module).__module__.startswith("torch.nn.") and not [*module.children()]
    if isinstance(module, SILENT) or _unfit(module) or is_layer:
        return None
    if type(module).forward is nn.Module.forward:
        return None
    return Choice((calls.Scoped,), {"_saving": (few_bit, division)})


def _known(
    module: nn.Module, entry: Known, few_bit: FewBit | None, division: Division | None
) -> Choice | None:
    """Return what becomes of a module of another package."""
    if entry.kind == "activation" and not getattr(module, "inplace", False):
        if few_bit is None:
            return Choice(reason="few_bit is not asked for")
        if not entry.name and activations.learns(module):
            return Choice(reason="a parameter of it learns, to which no table gives a gradient")
        attributes = {"bits": few_bit.bits, "weight": few_bit.weight, "_name": entry.name}
        keeps = f"{bit_count(few_bit.bits)} an element"
        return Choice((activations.OwnValues,), attributes, keeps)
    if division is None:
        return None
    if entry.kind == "rms_norm":
        attributes = {"_division": division, "_eps": entry.eps, "_offset": entry.offset}
        return Choice((norms.OwnRMSNorm,), attributes, str(division))
    if entry.kind == "recompute":
        return Choice((layers.Recomputed,), {"_division": division}, f"{division}; runs again")
    scope = caller(module, few_bit, division)
    return scope and scope._replace(keeps=str(division), note="by the functions it calls")


def _attention(
    module: nn.Module, few_bit: FewBit | None, division: Division | None
) -> Choice | None:
    """Return what becomes of torch's attention, which calls functions with its own parameters."""
    if reason := _unfit(module):
        return Choice(reason=reason)
    if division is None:
        return Choice(reason="division is not asked for")
    words = f"{division}; operands of attention with twice the bits"
    return Choice(
        (calls.Scoped,), {"_saving": (few_bit, division)}, words, "by the functions it calls"
    )


def _activation(
    module: nn.Module, few_bit: FewBit | None, division: Division | None
) -> Choice | None:
    kind = activations.few_bit_of(module)
    reason = _unfit(module) or ("" if kind else activations.why_not(module))
    if reason or kind is None:
        return Choice(reason=reason)
    is_exact = kind in activations.STEPWISE
    if few_bit is None and not (is_exact and division):
        return Choice(reason="few_bit is not asked for") if division else None
    settings = few_bit or FewBit(1)
    bits = 1 if is_exact else settings.bits
    bases: tuple[type, ...] = activations.Exactly, activations.FEW_BIT[kind]
    note = ""
    if getattr(module, "inplace", False):
        bases, note = (
            (activations.Exactly, activations.InPlace, bases[1]),
            "works in place by a copy",
        )
    attributes = {"bits": bits, "weight": settings.weight}
    return Choice(bases, attributes, f"{bit_count(bits)} an element", note)


def _layer(module: nn.Module, division: Division) -> Choice | None:
    reason = _unfit(module) or _unsuited(module)
    divided, small = _kind(module, DIVIDED), _kind(module, EXACT)
    if reason and (divided or small):
        return Choice(reason=reason)
    if divided:
        words = division.of_linear if divided is layers.Linear else str(division)
        return Choice((divided,), {"_division": division}, words)
    if small:
        note = "works in place by a copy" if getattr(module, "inplace", False) else ""
        return Choice((small[0],), {}, small[1], note)
    if next(module.children(), None) is not None or isinstance(module, SILENT):
        return None
    kinds = (*DIVIDED, *EXACT)
    is_torchs = type(module).__module__.startswith("torch.nn.")
    return Choice(reason=NONE if is_torchs and not isinstance(module, kinds) else OWN)


def _kind(module: nn.Module, known: dict[Any, Any]) -> Any:
    """Return the entry of torch's class whose forward the module has."""
    kind = next((k for k in type(module).__mro__ if k in known), None)
    if kind is None:
        return None
    names = [name for name in FORWARDS if hasattr(kind, name)]
    is_torchs = all(getattr(type(module), n) is getattr(kind, n) for n in names)
    return known[kind] if is_torchs else None


def _unsuited(module: object) -> str:
    """Say why a pooling has no small form."""
    if getattr(module, "return_indices", False):
        return "its indices are asked for"
    if isinstance(module, nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d):
        size = exact.window_size(module)
        return f"its window has {size} places, more than 8 bits" if size > exact.WINDOW else ""
    size = getattr(module, "output_size", None)
    if size is not None and {*([size] if isinstance(size, int) else size)} == {1}:
        return "it keeps no tensor"
    return ""


def _unfit(module: nn.Module) -> str:
    """Say why a module of any kind cannot get another class, ``""`` if it can."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if "forward" in vars(module):
        return "its forward was put on the object"
    if any(map(is_lazy, module.parameters(recurse=False))):
        return "it has no shape yet: run the model once first"
    return ""
