"""Formats for a model that was trained without them, from what its layers see of some data."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from marvin.attention import spell_attention
from marvin.channels import ChannelFormat
from marvin.conversion import prepare
from marvin.hooks import rounders_of
from marvin.layers import is_layer
from marvin.model_formats import ModuleFormats
from marvin.rounder import FLOATS
from marvin.rounding import Format, round_one
from marvin.settings import check_model

__all__ = ["Estimator", "calibrate"]

Estimator = Literal["noise", "max", "percentile"]
_PERCENTILE = 0.9999
_KEPT = 2**15  # values of a batch that are looked at, spread evenly; all extremes are
_MOST_KEPT = 2**19  # of all batches
_FINER = 8  # bits by which a format may be finer than the one in which nothing saturates
_LONGEST_FL = 31


def calibrate(
    model: nn.Module,
    batches: Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]],
    bits: int | None = None,
    *,
    weight_bits: int | None = None,
    estimator: Estimator = "noise",
    per_channel: bool = False,
) -> nn.Module:
    """Return a copy of a model in fixed point: rounded weights, and formats for what layers take.

    The copy is in eval mode and rounds as a model does that was trained in fixed point: compare its
    accuracy, then ``marvin.freeze`` it, save it, or export it. Each layer with a weight (convolutions,
    linear layers) rounds its input and its weight, nearest; embeddings round their weights. Batch
    normalisation, biases, sums, norms and softmax stay in floats, as in the policies that measure ranges;
    an export rounds them. Attention is spelled out first: see ``spell_attention``.

    A model that already carries formats keeps its weights and their formats: its layers' inputs alone
    get new ones, of their own word lengths unless ``bits`` says otherwise. So the ranges of a training
    run can be taken again, in eval mode.

    Args:
        model: Stays as it is.
        batches: What the model takes; of tuples and lists, such as of images and labels, the first.
        bits: Word length of layers' inputs, 2 to 32; unsigned where nothing below 0 comes.
            Default: 8, or that of the formats the model carries.
        weight_bits: Word length of weights. Default: ``bits``.
        estimator: How a fractional length is found. ``"max"``: nothing saturates. ``"percentile"``: one
            value in 10,000 may. ``"noise"``: the mean square of what rounding and saturation change is
            the least.
        per_channel: Weights have a fractional length for each output channel.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: An argument is out of range; there is no batch, no layer sees one, or a value is not
            finite; or a layer carries block floating point.

    Examples:
        >>> fixed = marvin.calibrate(net, (images for images, _ in loader), bits=8)
        >>> torch.save(marvin.freeze(fixed), "net.pt")
    """
    check_model(model, "calibrate(model, batches)")
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator must be one of {get_args(Estimator)}, got {estimator!r}")
    for name, wl in (("bits", bits), ("weight_bits", weight_bits)):
        if wl is not None and not 2 <= wl <= 32:
            raise ValueError(f"{name} must be 2 to 32, got {wl}")
    found = copy.deepcopy(model).eval()
    carried = {m: r.formats(m) for m in found.modules() for r in rounders_of(m)}
    if not carried:
        found = spell_attention(found)
    seen = _observe(found, batches)
    if not carried:
        prepare(found)
    for module, values in seen.items():
        name, (rounder,) = values.name, rounders_of(module)
        old = carried.get(module)
        if old is not None and old.inputs is not None:
            new = replace(
                old, inputs=values.format(_word_length(name, old.inputs, bits), estimator)
            )
        elif carried:
            continue  # a layer that was left in floats
        else:
            weights = _round_weights(module, weight_bits or bits or 8, estimator, per_channel)
            new = ModuleFormats(values.format(bits or 8, estimator), weights=weights)
        rounder.write(module, new)
    if not carried:
        _round_embeddings(found, weight_bits or bits or 8, estimator)
    return found


def _round_embeddings(model: nn.Module, wl: int, estimator: Estimator) -> None:
    """Round the weights of embeddings, which no values come into."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            (rounder,) = rounders_of(module)
            weights = _round_weights(module, wl, estimator, False)
            rounder.write(module, ModuleFormats(weights=weights))


def _word_length(name: str, fmt: Format, bits: int | None) -> int:
    if not isinstance(fmt, FixedPoint):
        raise ValueError(f"{name} must carry fixed-point formats to be calibrated, got {fmt}")
    return bits or fmt.wl + (not fmt.signed)  # a sign that is not needed gives its bit away


@dataclass
class _Values:
    """What came into a layer: extremes of all, and some of the values.

    Args:
        name: Of the layer.
        low: Smallest, at most 0.
        high: Largest, at least 0.
        kept: Values, float32, 1-d.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    kept: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        flat = x.detach().float().reshape(-1)
        if not flat.numel():
            return
        low, high = float(flat.min()), float(flat.max())
        if not abs(low) + abs(high) < float("inf"):
            raise ValueError(
                f"{self.name} must see finite values to be calibrated, got {low} to {high}"
            )
        self.low, self.high = min(self.low, low), max(self.high, high)
        if sum(map(len, self.kept)) < _MOST_KEPT:
            self.kept.append(flat[:: -(-flat.numel() // _KEPT)].cpu())

    def format(self, wl: int, estimator: Estimator) -> FixedPoint:
        """Return a format of ``wl`` bits, one of them for a sign if there is one."""
        signed = self.low < 0
        own = wl if signed else wl - (wl == 32)  # of 32 bits, all are signed
        ends = torch.tensor([self.low, self.high])
        return best_format(torch.cat([*self.kept, ends]), own, estimator, signed=signed)


def best_format(x: Tensor, wl: int, estimator: Estimator, *, signed: bool = True) -> FixedPoint:
    """Return the format of ``wl`` bits that an estimator chooses for values, float32, 1-d.

    Raises:
        ValueError: No format of ``wl`` bits holds the values.
    """
    ends = x.min(), x.max()
    if estimator == "percentile":
        size = x.abs().sort().values
        most = size[int((len(size) - 1) * _PERCENTILE)]
        ends = ends[0].clamp(min=-most), ends[1].clamp(max=most)
    widest = _fitting(float(ends[0]), float(ends[1]), wl, signed)
    if estimator != "noise":
        return widest
    finer = range(widest.fl, min(widest.fl + _FINER, _LONGEST_FL) + 1)
    formats = [FixedPoint(wl, fl, signed=signed) for fl in finer]
    noises = [
        float((round_one(x, f, rounding="nearest") - x).double().square().sum()) for f in formats
    ]
    return formats[noises.index(min(noises))]


def _fitting(low: float, high: float, wl: int, signed: bool) -> FixedPoint:
    for fl in range(_LONGEST_FL, -_LONGEST_FL - 1, -1):
        fmt = FixedPoint(wl, fl, signed=signed)
        if fmt.min_code <= round(low * fmt.scale) and round(high * fmt.scale) <= fmt.max_code:
            return fmt
    raise ValueError(f"a format of {wl} bits must hold {low} to {high}, none does")


@torch.no_grad()
def _round_weights(
    module: nn.Module, wl: int, estimator: Estimator, per_channel: bool
) -> tuple[Format | None, ...]:
    """Round a module's weights; return the format of each of its own parameters."""
    formats: list[Format | None] = []
    for p in module.parameters(recurse=False):
        fmt = (
            _weight_format(p.detach().float(), wl, estimator, per_channel) if is_layer(p) else None
        )
        if fmt is not None:
            p.copy_(round_one(p.detach(), fmt, rounding="nearest"))
        formats.append(fmt)
    return tuple(formats)


def _weight_format(x: Tensor, wl: int, estimator: Estimator, per_channel: bool) -> Format:
    if not torch.isfinite(x).all():
        raise ValueError("weights must be finite to be calibrated")
    if not per_channel:
        return best_format(x.reshape(-1), wl, estimator)
    rows = x.reshape(len(x), -1)
    fls = [best_format(row, wl, estimator).fl if row.any() else None for row in rows]
    least = min((fl for fl in fls if fl is not None), default=0)
    return ChannelFormat(
        FixedPoint(wl, least), tuple(0 if fl is None else fl - least for fl in fls)
    )


_Batches = Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]]


@torch.no_grad()
def _observe(model: nn.Module, batches: _Batches) -> dict[nn.Module, _Values]:
    """Run a model and return what came into each layer, before it rounds it."""
    seen: dict[nn.Module, _Values] = {}

    def see(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[object, ...]) -> None:
            x = inputs[0] if inputs else None
            if isinstance(x, Tensor) and x.dtype in FLOATS:
                seen.setdefault(module, _Values(name)).add(x)

        return hook

    handles = [
        module.register_forward_pre_hook(see(name), prepend=True)
        for name, module in model.named_modules()
        if any(map(is_layer, module.parameters(recurse=False))) and not any(module.children())
    ]
    try:
        for batch in batches:
            model(batch if isinstance(batch, Tensor) else batch[0])
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError("calibration must see a batch that goes through a layer, got none")
    return seen
