"""Formats for a model that was trained without them, from what its layers see of some data."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.tensors import storage_key, tree_leaves
from fixedpoint_kernels.undo import all_or_nothing
from marvin.attention import spell_attention
from marvin.compiled import check_uncompiled
from marvin.conversion import argument_names, prepared
from marvin.estimators import Estimator, best_format, check_estimator, weight_format
from marvin.freezing import thaw
from marvin.hooks import rounders_of, see_what_is_rounded
from marvin.layers import carried_parameters, computed_weights, is_layer
from marvin.model_formats import ModuleFormats
from marvin.nested import mapped, mapped_output
from marvin.refused import (
    check_batches,
    check_model,
    check_one_input,
    check_unsharded,
    check_values,
)
from marvin.rounder import FLOATS
from marvin.rounding import Format, round_one
from marvin.warned import listed, warn_user

__all__ = ["Batches", "calibrate", "layer_formats"]

_KEPT = 2**15  # values of a batch that are looked at, spread evenly; all extremes are
_MOST_KEPT = 2**19  # of all batches
_LEAST = 2.0**-32  # what is below is 0 in every format
_SHORT = 8  # bits of words whose exact sums, times batch norm's scale, every target has

_OF_FLOATS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d
_OF_INDICES = nn.Embedding, nn.EmbeddingBag
_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_PRODUCTS = {
    "matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "einsum", "tensordot", "linear",
}  # fmt: skip
_PRODUCTS |= {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
_LAYERS = *_OF_FLOATS, *_OF_INDICES, *_TRANSPOSED

Batches = Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]]
"""What a model takes; of tuples and lists the first."""


@left_uncompiled
@torch.inference_mode(False)  # or the copy could not be trained, nor load a state
def calibrate(
    model: nn.Module,
    batches: Batches,
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
    an export rounds them. With words of more than 8 bits, layers also round what they give: exact sums
    times batch normalisation's scale would be longer than 53 bits. Attention is spelled out first: see
    ``spell_attention``.

    A model that already carries formats, trained or frozen, keeps its weights and their formats: what
    its modules round, inputs and outputs, gets new formats of the word lengths that it has, unless
    ``bits`` says otherwise. So the ranges of a training run can be taken again, in eval mode. While
    ranges are taken nothing rounds, so no old range limits what a layer behind it sees.

    A subclass of torch's layers rounds as they do, whatever it has inside. Warnings name what stays in
    floats though it has a weight: layers that no floats came to, and modules of one's own that have
    others inside. Warnings name layers, too, that saw nothing but zeros: their formats hold nothing else.

    Args:
        model: Stays as it is.
        batches: What the model takes; of tuples and lists, such as of images and labels, the first.
        bits: Word length of layers' inputs, 2 to 32; unsigned where nothing below 0 comes.
            Default: 8, or that of the formats the model carries.
        weight_bits: Word length of weights. Default: ``bits``. A model that carries formats keeps its own.
        estimator: How a fractional length is found. ``"max"``: nothing saturates. ``"percentile"``: one
            value in 10,000 may, so none of fewer. ``"noise"``: the mean square of what rounding and saturation change is
            the least.
        per_channel: Weights have a fractional length for each entry of their first dimension: an output
            channel of linear layers and convolutions, an input channel of transposed convolutions.

    Raises:
        TypeError: ``model`` is no module, or what ``torch.compile`` returned; or ``batches`` is one
            tensor, or a batch no tensor.
        ValueError: An argument is out of range; there is no batch, no layer sees one, or a value is not
            finite, or float64; or the model carries block floating point, or formats of weights alone, or must be
            called with several tensors, or ``marvin.store_codes`` keeps its weights as codes; or each call
            computes a layer's weight, by a parametrisation or a hook; or parameters are sharded.

    Examples:
        >>> fixed = marvin.calibrate(net, (images for images, _ in loader), bits=8)
        >>> torch.save(marvin.freeze(fixed), "net.pt")
    """
    check_model(model, "calibrate(model, batches)")
    check_values(model)
    check_unsharded(model)
    check_uncompiled(model, "calibrate(model, batches)")
    check_estimator(estimator)
    if per_channel not in (False, True):
        raise ValueError(f"per_channel must be True or False, got {per_channel!r}")
    for name, wl in (("bits", bits), ("weight_bits", weight_bits)):
        if wl is not None and not (isinstance(wl, Integral) and 2 <= wl <= 32):
            raise ValueError(f"{name} must be a whole number, 2 to 32, got {wl!r}")
    found = thaw(_copy(model).eval())
    carried = {m: r.formats(m) for m in found.modules() for r in rounders_of(m)}
    if not any(formats.rounds or any(formats.weights) for formats in carried.values()):
        found = spell_attention(found)
        prepared(found)
        lengths = int(bits or 8), int(weight_bits or bits or 8)
        _fix(found, batches, lengths, (estimator, per_channel))
    else:
        _fix_again(carried, found, batches, bits and int(bits), estimator)
    return found


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model; weights that hooks have computed are refused by name: torch copies none of them."""
    try:
        return copy.deepcopy(model)
    except RuntimeError:
        _check_weights(model)
        raise


def layer_formats(
    model: nn.Module, batches: Batches, bits: int, estimator: Estimator = "noise"
) -> dict[nn.Module, ModuleFormats]:
    """Return formats for what the layers of a model take; the model stays as it is.

    Words longer than 8 bits are for what layers give, too: see ``calibrate``.

    Args:
        model: Rounds no activations; in eval mode.
        batches: What it takes.
        bits: Word length, 2 to 32.
        estimator: See ``calibrate``.

    Raises:
        TypeError: ``batches`` is one tensor, or a batch no tensor.
        ValueError: There is no batch, no layer sees one, a value is not finite, or float64, or the model must be
            called with several tensors, or each call computes a layer's weight.
    """
    _check_weights(model)
    layers = _layers_of(model)
    seen = _observed(model, batches, layers, layers if bits > _SHORT else ())
    return {
        module: ModuleFormats(
            ranges.takes.format(bits, estimator),
            ranges.gives.format(bits, estimator) if ranges.gives.kept else None,
        )
        for module, ranges in seen.items()
        if ranges.takes.kept
    }


def _input_of(batch: object) -> Tensor:
    """Return what the model takes of a batch."""
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(first, Tensor):
        return first
    instead = ""
    if isinstance(first, Mapping):
        instead = ": of mappings, write (batch[key] for batch in loader)"
    elif hasattr(first, "__array__"):
        instead = ": write (torch.as_tensor(batch) for batch in loader)"
    raise TypeError(
        "a batch must be a tensor, or a tuple or list that begins with one, got "
        f"{type(first).__name__}{instead}"
    )


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers with a weight."""
    return [
        module
        for module in model.modules()
        if any(map(is_layer, module.parameters(recurse=False)))
        if isinstance(module, _LAYERS) or not any(module.children())
    ]


def _check_weights(model: nn.Module) -> None:
    """Refuse weights that each call computes: they would stay in floats."""
    for name, module in model.named_modules():
        for weight in computed_weights(module):
            if not is_layer(getattr(module, weight)):
                continue
            got, remedy = (
                f"a hook that computes {weight}",
                "prune.remove, remove_weight_norm or such",
            )
            if is_parametrized(module):
                got = f"a parametrisation of {weight}"
                remedy = f"parametrize.remove_parametrizations(module, {weight!r})"
            raise ValueError(
                f"{name or 'the model'} must have plain weights to be calibrated, got {got}: "
                f"torch.nn.utils.{remedy} makes them so"
            )


class _Multiplied(TorchFunctionMode):
    """Sees by which matrices of modules of one's own a model multiplies.

    Args:
        model: Its layers' weights are no such matrices.

    Attributes:
        names: Of matrices that were multiplied with something, or are called weights; not of positions, say, which
            are added.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        layers = set(_layers_of(model))
        own = [(n, m) for n, m in model.named_modules() if m not in layers and any(m.children())]
        found = [pair for n, m in own for pair in m.named_parameters(n, recurse=False)]
        self._names = {storage_key(p): n for n, p in found if is_layer(p)}
        self.names = [n for n in self._names.values() if n.endswith("weight")]

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if self._names and getattr(func, "__name__", "").strip("_") in _PRODUCTS:
            operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            found = (self._names.get(storage_key(x)) for x in operands)
            self.names += [n for n in found if n is not None and n not in self.names]
        return func(*args, **kwargs)


def _warn_of_floats(model: nn.Module, rounded: Collection[nn.Module], own: Sequence[str]) -> None:
    """Name weights that stay in floats.

    Args:
        model: Was calibrated.
        rounded: Layers whose weights are rounded.
        own: Names of matrices of other modules that are multiplied.
    """
    layers = set(_layers_of(model))
    unmet = [n for n, m in model.named_modules() if m in layers and m not in rounded]
    what, rest = "calibration leaves in floats", "their weights and what they take are not rounded"
    if unmet:
        warn_user(f"{what} {listed(unmet)}: no floats came there; {rest}")
    if own:
        warn_user(
            f"{what} {listed(own)}: a module of one's own has it, and others inside; give it a layer of "
            "its own, such as nn.Linear",
        )


def _fix(
    model: nn.Module, batches: Batches, lengths: tuple[int, int], how: tuple[Estimator, bool]
) -> None:
    """Round a prepared model's weights, and give its layers formats for what they take.

    Args:
        model: Carries no formats yet.
        batches: What it takes.
        lengths: Of words of inputs and of weights.
        how: The estimator, and whether weights have formats by channel.
    """
    with _Multiplied(model) as multiplied:
        found = layer_formats(model, batches, lengths[0], how[0])
    rounded = [m for m in _layers_of(model) if m in found or isinstance(m, _OF_INDICES)]
    for module in rounded:
        formats = found.get(module, ModuleFormats())
        weights = _round_weights(module, lengths[1], how)
        rounders_of(module)[0].write(module, replace(formats, weights=weights))
    _warn_of_floats(model, rounded, multiplied.names)


def _fix_again(
    carried: dict[nn.Module, ModuleFormats],
    model: nn.Module,
    batches: Batches,
    bits: int | None,
    estimator: Estimator,
) -> None:
    """Take the ranges of what a model's modules round again."""
    for module, formats in carried.items():
        (rounder,) = rounders_of(module)
        for fmt in (formats.samples, formats.inputs, formats.outputs):
            if fmt is not None and not isinstance(fmt, FixedPoint):
                raise ValueError(
                    f"{rounder.name or 'the model'} must carry fixed-point formats to be calibrated, got {fmt}: "
                    "first take the trained model's formats off, marvin.prepare(model).remove()"
                )
        rounder.write(module, replace(formats, inputs=None, outputs=None))
    takes = [module for module, formats in carried.items() if formats.inputs]
    gives = [module for module, formats in carried.items() if formats.outputs]
    if not takes and not gives:
        raise ValueError(
            "a model that carries formats must round activations to be calibrated, got formats of weights "
            "alone: marvin.export.calibrate(model, batches) finds formats to go with them"
        )
    seen = _observed(model, batches, takes, gives)
    for module, formats in carried.items():
        ranges = seen.get(module)
        if ranges is None:
            continue
        inputs = ranges.takes.again(formats.inputs, bits, estimator)
        outputs = ranges.gives.again(formats.outputs, bits, estimator)
        rounders_of(module)[0].write(module, replace(formats, inputs=inputs, outputs=outputs))


@dataclass
class _Values:
    """What came into a layer: extremes of all, and some of the values.

    Args:
        name: Of the layer.
        needs_floats: Whether it takes no integers, as code of one's own may do.
        low: Smallest, at most 0.
        high: Largest, at least 0.
        kept: Values, float32, 1-d, of each batch.
        share: Of how many values of a batch one is kept.
    """

    name: str
    needs_floats: bool = False
    low: float = 0.0
    high: float = 0.0
    kept: list[Tensor] = field(default_factory=list)
    share: int = 1

    def keep(self, x: Tensor) -> Tensor:
        """Take a tensor into account, if it holds floats; return it."""
        if x.dtype in FLOATS:
            self.add(x)
        elif x.is_floating_point() or self.needs_floats:
            raise ValueError(
                f"{self.name or 'the model'} must see float32 to be calibrated, got {x.dtype}: write model.float(), and "
                "x.float() of batches, scaled as in training"
            )
        return x

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
        count = -(min(flat.numel(), _KEPT) // -self.share)
        self.kept.append(_some(flat, count).to("cpu", copy=True))
        if sum(map(len, self.kept)) > _MOST_KEPT:  # each batch counts as much as any other
            self.kept, self.share = [_some(x, -(len(x) // -2)) for x in self.kept], 2 * self.share

    def format(self, wl: int, estimator: Estimator) -> FixedPoint:
        """Return a format of ``wl`` bits, one of them for a sign if there is one."""
        signed = self.low < 0
        own = max(wl, 2) if signed else min(wl, 31)  # of 32 bits, all are signed
        kept = torch.cat(self.kept)
        left_out = [x for x in (self.low, self.high) if x and not (kept == x).any()]
        with _named(f"what comes to {self.name or 'the model'}"):
            values = torch.cat([kept, torch.tensor(left_out, dtype=kept.dtype, device=kept.device)])
            return best_format(values, own, estimator, signed=signed)

    def again(self, fmt: Format | None, bits: int | None, estimator: Estimator) -> Format | None:
        """Return a format in the place of one; that one where no values came."""
        if not isinstance(fmt, FixedPoint) or not self.kept:
            return fmt
        return self.format(bits or fmt.wl, estimator)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Say of what a format was looked for, if there is none."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


@torch.no_grad()
def _round_weights(
    module: nn.Module, wl: int, how: tuple[Estimator, bool]
) -> tuple[Format | None, ...]:
    """Round a module's weights; return the format of each of ``carried_parameters``."""
    formats: list[Format | None] = []
    for name, p in carried_parameters(module):
        with _named(".".join(filter(None, (rounders_of(module)[0].name, name)))):
            fmt = weight_format(p.detach().float(), wl, *how) if is_layer(p) and p.numel() else None
        if fmt is not None:
            p.copy_(round_one(p.detach(), fmt, rounding="nearest"))
        formats.append(fmt)
    return tuple(formats)


def _some(flat: Tensor, count: int) -> Tensor:
    """Return so many of some values, always the same ones: one of each stretch of memory, at random.

    Equal steps would meet the same columns of every image where a step is as long as some rows.
    """
    if count == flat.numel():
        return flat
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(
        count, generator=generator, dtype=torch.float64, device="cpu"
    ) + torch.arange(count, device="cpu")
    return flat[(places * (flat.numel() / count)).long().to(flat.device)]


@dataclass
class _Ranges:
    """What comes into a module, and what goes out.

    Args:
        arguments: Names of what the module takes by position: masks are no values.
        takes: What comes in.
        gives: What goes out.
    """

    arguments: list[str]
    takes: _Values
    gives: _Values

    def see_inputs(self, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        mapped(self.takes.keep, args, kwargs, self.arguments)

    def see_output(self, _: nn.Module, _args: object, output: object) -> None:
        mapped_output(self.gives.keep, output)


@torch.no_grad()
def _observed(
    model: nn.Module,
    batches: Batches,
    takes: Collection[nn.Module],
    gives: Collection[nn.Module] = (),
) -> dict[nn.Module, _Ranges]:
    """Run a model, and return what comes into some of its modules, and goes out of others."""
    check_batches(batches, "calibrate(model, [x])")
    check_one_input(model)
    names = {module: name for name, module in model.named_modules()}
    seen = {
        m: _Ranges(
            argument_names(m), _Values(names[m], isinstance(m, _OF_FLOATS)), _Values(names[m])
        )
        for m in dict.fromkeys([*takes, *gives])
    }
    with all_or_nothing(model.modules()), contextlib.ExitStack() as stack:
        for module in takes:
            see = seen[module].see_inputs
            handle = module.register_forward_pre_hook(see, with_kwargs=True)
            see_what_is_rounded(module, handle)
            stack.callback(handle.remove)
        for module in gives:
            handle = module.register_forward_hook(seen[module].see_output)
            see_what_is_rounded(module, handle)
            stack.callback(handle.remove)
        for batch in batches:
            model(_input_of(batch))
    if not any(ranges.takes.kept or ranges.gives.kept for ranges in seen.values()):
        raise ValueError("calibration must see a batch that goes through a layer, got none")
    values = [own for ranges in seen.values() for own in (ranges.takes, ranges.gives) if own.kept]
    if dark := [own.name or "the model" for own in values if max(-own.low, own.high) < _LEAST]:
        warn_user(
            f"calibration saw nothing but zeros at {listed(list(dict.fromkeys(dark)))}: whatever else comes there "
            "will be clamped to almost 0; calibrate on batches of the data",
        )
    return seen
